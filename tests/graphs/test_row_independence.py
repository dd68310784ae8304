"""A row's outputs are the same bits whatever stands beside it: other rows, longer rows that it is
padded for, more threads.

Whole graphs of the cpu target, each row alone and in company; and single products and attentions of
the sizes that models have, because kernels choose their way by size. A failure names the first
operator whose output differs.

In int4, onnxruntime has another kernel for a single row on processors without AVX-512. So a row
alone is two copies of the row here, and a test of products compares one row with two copies of the
row: they differ by the rounding of float32."""

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import default_graphs, perturbed
from targets import MODELS, SIZES, exports_for, prompts
from written import operators, write

from vanilla_transformer_export import Options, Runtime, export
from vanilla_transformer_export.graphs.layers import linear
from vanilla_transformer_export.graphs.quantization import BLOCK, int4_blocks
from vanilla_transformer_export.inference.decoder import GenerationRequest

exported = exports_for("cpu")

COMPANY = (1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 24, 31, 32, 33, 48, 63, 64)  # numbers of rows
FEW = (1, 2, 3, 8, 13)
DTYPES = ("fp32", "int8", "int4")
ROOM = 24  # positions of each cache
COPIES = {"fp32": 1, "int8": 1, "int4": 2}  # of a row that is alone


def opened(graph, threads):
    """A session of a file, or of a file's content."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def check(path, dtype, make_feeds, cut, rows, threads=(1, 2)):
    """`make_feeds` of some rows are what the graph at `path` takes; `cut` of its outputs is what is
    of the row at a place."""
    copies = COPIES[dtype]
    for count in threads:
        session = opened(str(path), count)
        alone = [
            cut(session.run(None, make_feeds([row] * copies)), 0, row) for row in range(max(rows))
        ]
        for number in (number for number in rows if number >= copies):
            result = session.run(None, make_feeds(range(number)))
            for row in range(number):
                for name, one, other in zip(
                    session.get_outputs(), alone[row], cut(result, row, row), strict=True
                ):
                    if not np.array_equal(one, other):
                        where = first_difference(path, make_feeds, [row] * copies, number, count)
                        pytest.fail(
                            f"{name.name} of row {row} of {number} differs, {count} threads; "
                            f"first in {where}"
                        )


def first_difference(path, make_feeds, copies, number, threads):
    """The first node whose output for a row differs between its `copies` and `number` rows, where
    all outputs are kept."""
    row = copies[0]
    model = onnx.load(path)
    names = {value.name for value in model.graph.output}
    kept = [
        value for node in model.graph.node for value in node.output if value and value not in names
    ]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in kept)
    session = opened(model.SerializeToString(), threads)
    alone, together = (
        session.run(kept, make_feeds(copies)),
        session.run(kept, make_feeds(range(number))),
    )
    makers = {value: node.op_type for node in model.graph.node for value in node.output}
    for name, one, other in zip(kept, alone, together, strict=True):
        if (
            one.shape[:1] == (len(copies),)
            and other.shape[:1] == (number,)
            and one.dtype == np.float32
        ):
            inside = tuple(slice(size) for size in one.shape[1:])
            if not np.array_equal(one[0], other[row][inside]):
                return f"{makers[name]} ({name})"
    return "no operator with all outputs kept: in what onnxruntime fuses"


# ------------------------------------------------------------------------------------- whole graphs


def sequence_feeds(session_inputs, vocabulary):
    """Rows of 1 to 17 tokens, padded on the right to the longest."""
    names = [value.name for value in session_inputs]

    def make(rows):
        lengths = [length_of(row) for row in rows]
        ids, mask = np.zeros((2, len(lengths), max(lengths)), np.int64)
        for place, (row, length) in enumerate(zip(rows, lengths)):
            ids[place, :length], mask[place, :length] = (
                np.random.default_rng(row).integers(4, vocabulary, length),
                1,
            )
        feeds = {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": np.where(mask, ids % 2, 0),
        }
        return {name: feeds[name] for name in names}

    return make


def length_of(row):
    return 1 + row * 7 % 17


def check_sequences(path, dtype, vocabulary, rows):
    session = opened(str(path), 1)
    axes = [
        [axis for axis, size in enumerate(value.shape) if size == "source_length"]
        for value in session.get_outputs()
    ]

    def cut(outputs, place, row):
        return [
            np.take(output[place], range(length_of(row)), axis[0] - 1) if axis else output[place]
            for output, axis in zip(outputs, axes)
        ]

    check(path, dtype, sequence_feeds(session.get_inputs(), vocabulary), cut, rows)


def step_feeds(session_inputs, vocabulary):
    """One new token of each row, after `length_of` tokens of its own, over a source of another
    length."""
    rng = np.random.default_rng(0)
    lengths = np.array([length_of(row) for row in range(max(COMPANY))], np.int32)
    sources = np.array([length_of(row + 3) for row in range(max(COMPANY))], np.int32)
    tokens = rng.integers(4, vocabulary, (max(COMPANY), 1))
    shapes = {value.name: value.shape for value in session_inputs}
    caches = {
        name: rng.standard_normal((max(COMPANY), shape[1], ROOM, shape[3]), np.float32)
        for name, shape in shapes.items()
        if name.startswith("past")
    }

    def make(rows):
        rows = list(rows)
        feeds = {
            "input_ids": tokens[rows],
            "position_ids": lengths[rows, None].astype(np.int64),
            "last_position": lengths[rows],
            "total_length": lengths[rows].max(keepdims=True) + 1,
            "last_source_position": sources[rows] - 1,
            "total_source_length": sources[rows].max(keepdims=True),
        }
        feeds |= {name: states[rows] for name, states in caches.items()}
        return {name: feeds[name] for name in shapes}

    return make


def check_steps(path, dtype, vocabulary, rows):
    session = opened(str(path), 1)
    names = [value.name for value in session.get_outputs()]

    def cut(outputs, place, row):
        """Logits, and of caches what is in use."""
        used = [length_of(row + 3) if ".encoder." in name else length_of(row) + 1 for name in names]
        return [
            output[place] if output.ndim == 2 else output[place][:, :end]
            for output, end in zip(outputs, used)
        ]

    check(path, dtype, step_feeds(session.get_inputs(), vocabulary), cut, rows)


def cases(*names):
    """Parametrize a test by `names` and all dtypes.

    Only the first name in int8 is fast; the others are slow tests.
    """
    slow = [pytest.param(name, dtype, marks=pytest.mark.slow) for name in names for dtype in DTYPES]
    return pytest.mark.parametrize("name, dtype", [(names[0], "int8"), *slow])


@cases("seq2seq", "encoder", "seq2seq-t5", "encoder-relative")
def test_what_reads_whole_sequences(exported, name, dtype, request):
    _, directory = exported(name, dtype)
    check_sequences(
        directory / default_graphs(Runtime(directory).info.manifest)["encoder"],
        dtype,
        48,
        company(request),
    )


@cases("seq2seq", "causal", "causal-window", "causal-relative")
def test_steps_that_rows_join_and_leave(exported, name, dtype, request):
    """The next token of each row, after any number of its own."""
    _, directory = exported(name, dtype)
    manifest = Runtime(directory).info.manifest
    check_steps(
        directory / default_graphs(manifest)[manifest["step"]],
        dtype,
        48,
        company(request),
    )


def company(request):
    return COMPANY if request.node.get_closest_marker("slow") else FEW


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_with_relative_positions_over_a_source(tmp_path, dtype):
    architecture, fields = MODELS["seq2seq-t5"]
    manifest = saved_and_exported(tmp_path, dtype, architecture, {**fields, "head_dim": 8})
    check_steps(tmp_path / "out" / default_graphs(manifest)["step"], dtype, 48, COMPANY)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_over_tokens(tmp_path, dtype):
    """`ReduceSum` over tokens adds in another order for one row than for several, and again with
    padding."""
    fields = dict(num_hidden_layers=1, classifier_pooling="mean")
    saved_and_exported(tmp_path, dtype, "VanillaEncoderForSequenceClassification", fields)
    check_sequences(tmp_path / "out/onnx/model.onnx", dtype, 48, COMPANY)


def saved_and_exported(directory, dtype, architecture, fields):
    perturbed(architecture, {**SIZES, **fields}).save_pretrained(directory / "in")
    return export(directory / "in", directory / "out", target="cpu", dtype=dtype, cases=3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["seq2seq", "causal"])
def test_batches_of_the_runtime(exported, name, dtype):
    """Prompts and sources of several lengths, and the steps after them."""
    _, directory = exported(name, dtype)
    for threads in (1, 2):
        runtime = Runtime(directory, threads=threads)
        together = logits(runtime, name, range(4))
        for row in range(4):
            np.testing.assert_array_equal(
                together[row], logits(runtime, name, [row] * COPIES[dtype])[0]
            )


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_sources_beside_a_longer_one(exported, dtype):
    """The lengths are 1 to 17: kernels add the values of several keys at once, and some keys of a
    source are left over."""
    _, directory = exported("seq2seq", dtype)
    runtime, lengths = Runtime(directory, threads=1), range(1, 18)
    ids = np.random.default_rng(0).integers(4, 48, (len(lengths), max(lengths)))
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    together = logits_after_source(runtime, ids, mask)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(
            logits_after_source(runtime, ids[[row], :length], mask[[row], :length])[0],
            together[row],
        )


def logits_after_source(runtime, ids, mask):
    """After the first token of the translation, and after one more: (rows, 2, V)."""
    first = np.ones((len(ids), 1), np.int64)
    decoder = runtime.model.decoders.start(
        GenerationRequest(Options(max_new_tokens=8), first, first, (ids, mask))
    )
    return np.stack(
        [decoder.prefill(first, first)[:, -1].copy(), decoder.step(5 * first)[:, -1].copy()], axis=1
    )


def logits(runtime, name, rows):
    """After the prompt, and after three more tokens: (rows, 4, V)."""
    ids, mask = (array[list(rows)] for array in prompts(name))
    longest = mask.sum(axis=1).max()
    used = slice(longest) if name == "seq2seq" else slice(-longest, None)
    ids, mask = ids[:, used], mask[:, used]
    source = None
    if name == "seq2seq":
        source, ids, mask = (
            (ids, mask),
            np.ones((len(ids), 1), np.int64),
            np.ones((len(ids), 1), np.int64),
        )
    decoder = runtime.model.decoders.start(
        GenerationRequest(Options(max_new_tokens=8), ids, mask, source)
    )
    result = [decoder.prefill(ids, mask).copy()]
    result += [
        decoder.step(np.array([[5 + row + step] for row in rows])).copy() for step in range(3)
    ]
    return np.stack([each[:, -1] for each in result], axis=1)


# --------------------------------------------------------------------------- sizes that models have

# The shipped models, the paper's base model, and GPT-2 or BERT: (K, N).
PRODUCTS = [
    (128, 128),
    (128, 384),
    (256, 128),
    (128, 6000),
    (512, 512),
    (512, 2048),
    (2048, 512),
    (512, 8000),
]
PRODUCTS += [(768, 2304), (768, 3072), (3072, 768), (768, 2)]
ATTENTIONS = [(4, 32), (8, 64), (12, 64)]  # heads, and the width of each
IMPORTS = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]


def value(name, shape, dtype=np.float32):
    return onnx.helper.make_tensor_value_info(
        name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape
    )


def alone_and_together(model, make_feeds, copies=1):
    """The outputs of each row alone, as rows, and of all numbers of rows: pairs to compare, at one
    thread and at two."""
    for threads in (1, 2):
        session = opened(model, threads)
        alone = np.concatenate(
            [session.run(None, make_feeds([row] * copies))[0][:1] for row in range(max(COMPANY))]
        )
        for number in (number for number in COMPANY if number >= copies):
            yield alone[:number], session.run(None, make_feeds(slice(number)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", PRODUCTS)
def test_products(size, dtype):
    """One token of each row, and several of each; in fp32 also without an axis of tokens, as the
    last product of a head."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal(size, np.float32)
    x = rng.standard_normal((64, 3, size[0]), np.float32) * rng.uniform(0.1, 10, (64, 1, 1)).astype(
        np.float32
    )
    model = product(matrix, dtype)
    for tokens in (x[:, :1], x):
        for one, other in alone_and_together(
            model, lambda rows, tokens=tokens: {"x": tokens[rows]}, COPIES[dtype]
        ):
            np.testing.assert_array_equal(one, other)
    if dtype == "fp32":
        node = onnx.helper.make_node("Gemm", ["x", "w"], ["y"])
        weights = [onnx.numpy_helper.from_array(matrix, "w")]
        graph = onnx.helper.make_graph(
            [node], "g", [value("x", ["rows", size[0]])], [value("y", None)], weights
        )
        model = onnx.helper.make_model(
            graph, opset_imports=IMPORTS, ir_version=10
        ).SerializeToString()
        for one, other in alone_and_together(model, lambda rows: {"x": x[rows, 0]}):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("size", PRODUCTS)
def test_a_single_row_in_int4_differs_by_rounding(size):
    """Both kernels add a term for each block, and 8 partial sums. One of them multiplies by
    unsigned integers, and subtracts 8 times the sums of blocks of x. n roundings of a sum of
    magnitudes m lose about sqrt(n) * u * m, where u is half of float32's epsilon (Higham and Mary
    2019). A value of x that is rounded to another integer would be more."""
    rng = np.random.default_rng(0)
    matrix, x = (
        rng.standard_normal(size, np.float32),
        rng.standard_normal((16, 1, size[0]), np.float32),
    )
    integers, scales = int4_blocks(matrix)
    blocks = np.stack([integers & 15, integers >> 4], axis=-1).reshape(size[1], -1)[:, : size[0]]
    unsigned = blocks * np.abs(scales).repeat(BLOCK, axis=1)[:, : size[0]]
    offsets = 8 * np.abs(scales).repeat(BLOCK, axis=1)[:, : size[0]]
    magnitudes = np.abs(x[:, 0]) @ (unsigned + offsets).T
    unit, roundings = np.finfo(np.float32).eps / 2, 2 * scales.shape[1] + 16
    bound = 2 * np.sqrt(roundings) * unit * magnitudes
    session = opened(product(matrix, "int4"), 1)
    alone = np.stack([session.run(None, {"x": row[None]})[0][0, 0] for row in x])
    pairs = np.stack([session.run(None, {"x": np.stack([row, row])})[0][0, 0] for row in x])
    assert (np.abs(alone - pairs) <= bound).all()
    assert (bound.mean(axis=1) < np.abs(x[:, 0]).max(axis=1) / 127 * np.abs(matrix).mean()).all()


def product(matrix, dtype):
    """x (rows, tokens, K) times `matrix`, as the cpu target writes it."""
    inputs = {"x": np.zeros((1, 1, len(matrix)), np.float32)}
    model = write(
        lambda g, x: [linear(g, x, "w")], {"w.weight": matrix.T.copy()}, inputs, dtype=dtype
    )
    assert dtype == "fp32" or "MatMul" not in operators(model)
    return model.SerializeToString()


@pytest.mark.slow
@pytest.mark.parametrize("heads, width", ATTENTIONS)
@pytest.mark.parametrize("source", [False, True])
def test_attention_of_one_token_over_rows_of_any_length(heads, width, source):
    """The step's: over the tokens so far with a new one, or over a source without."""
    rng, room = np.random.default_rng(0), 300
    names = ["q", "k", "v", "past_key", "past_value"]
    node = onnx.helper.make_node(
        "GroupQueryAttention", [*names, "last", "total"], ["y", "key", "value"],
        domain="com.microsoft", num_heads=heads, kv_num_heads=heads,
    )  # fmt: skip
    new, cache = ["rows", "new", heads * width], ["rows", heads, room, width]
    inputs = [
        value(name, shape)
        for name, shape in zip(names, [["rows", 1, heads * width], new, new, cache, cache])
    ]
    inputs += [value("last", ["rows"], np.int32), value("total", [1], np.int32)]
    graph = onnx.helper.make_graph(
        [node], "g", inputs, [value(name, None) for name in ("y", "key", "value")]
    )
    model = onnx.helper.make_model(graph, opset_imports=IMPORTS, ir_version=10).SerializeToString()
    states = rng.standard_normal((3, 64, 1, heads * width), np.float32)
    caches = rng.standard_normal((2, 64, heads, room, width), np.float32)
    lengths = rng.permutation(np.geomspace(1, room, 64).astype(np.int32))

    def make(rows):
        q, *kv = states[:, rows]
        kv = [each[:, :0] for each in kv] if source else kv
        last = lengths[rows] - 1
        return dict(zip(names, [q, *kv, *caches[:, rows]])) | {
            "last": last,
            "total": last.max(keepdims=True) + 1,
        }

    for one, other in alone_and_together(model, make):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("heads, width", ATTENTIONS)
def test_attention_of_whole_sequences_over_padding(heads, width):
    rng = np.random.default_rng(0)
    node = onnx.helper.make_node(
        "MultiHeadAttention",
        ["q", "k", "v", "", "mask"],
        ["y"],
        domain="com.microsoft",
        num_heads=heads,
    )
    shape = ["rows", "tokens", heads * width]
    inputs = [*(value(name, shape) for name in "qkv"), value("mask", shape[:2], np.int32)]
    graph = onnx.helper.make_graph([node], "g", inputs, [value("y", None)])
    model = onnx.helper.make_model(graph, opset_imports=IMPORTS, ir_version=10).SerializeToString()
    lengths = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 200]
    states = rng.standard_normal((3, len(lengths), max(lengths), heads * width), np.float32)

    def make(rows, longest):
        mask = np.array(
            [[place < lengths[row] for place in range(longest)] for row in rows], np.int32
        )
        return dict(zip("qkv", states[:, rows, :longest])) | {"mask": mask}

    for threads in (1, 2):
        session = opened(model, threads)
        alone = [session.run(None, make([row], length))[0][0] for row, length in enumerate(lengths)]
        for number in range(1, len(lengths) + 1):
            for longest in (lengths[number - 1], max(lengths)):
                together = session.run(None, make(list(range(number)), longest))[0]
                for row in range(number):
                    np.testing.assert_array_equal(together[row, : lengths[row]], alone[row])
