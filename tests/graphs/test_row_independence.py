"""Tests of batch invariance: a row has the same outputs, bit by bit, alone and in a batch, with and
without padding, and for any number of threads.

Whole graphs of the cpu target run each row alone and in batches. A failure names the first operator
whose output differs.

In int4, onnxruntime has another kernel for a single row on CPUs without AVX-512. So a row alone
runs as two copies of the row here, and one test compares a single row with two copies: they differ
by the rounding of float32."""

import numpy as np
import onnx
import pytest
from batch_rows import BATCH_SIZES, COPIES, DTYPES, open_session
from checkpoints import default_graphs, perturbed
from graph_variants import ENCODER
from targets import MODELS, SIZES, exports_for, prompts

from vanilla_transformer_export import Options, Runtime, export
from vanilla_transformer_export.inference.rows import GenerationRequest

exported = exports_for("cpu")
FEW_BATCH_SIZES = (1, 2, 3, 8, 13)
CACHE_LENGTH = 24  # positions per cache


def check(path, dtype, make_feeds, cut, rows, threads=(1, 2)):
    """Check that each row has the same outputs alone and in batches of all sizes in `rows`.

    `make_feeds` returns the inputs of the graph at `path` for a list of rows. `cut` returns the
    part of its outputs that belongs to one row of the batch.
    """
    copies = COPIES[dtype]
    for count in threads:
        session = open_session(str(path), count)
        alone = [
            cut(session.run(None, make_feeds([row] * copies)), 0, row) for row in range(max(rows))
        ]
        for number in (number for number in rows if number >= copies):
            result = session.run(None, make_feeds(range(number)))
            for row in range(number):
                for name, single, batched in zip(
                    session.get_outputs(), alone[row], cut(result, row, row), strict=True
                ):
                    if not np.array_equal(single, batched):
                        where = first_difference(path, make_feeds, [row] * copies, number, count)
                        pytest.fail(
                            f"{name.name} of row {row} of {number} differs, {count} threads; "
                            f"first in {where}"
                        )


def first_difference(path, make_feeds, copies, number, threads):
    """Return the first operator whose output for a row differs between `copies` and a batch.

    The batch has `number` rows. All intermediate outputs are kept.
    """
    row = copies[0]
    model = onnx.load(path)
    names = {value.name for value in model.graph.output}
    kept = [
        value for node in model.graph.node for value in node.output if value and value not in names
    ]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in kept)
    session = open_session(model.SerializeToString(), threads)
    alone, together = (
        session.run(kept, make_feeds(copies)),
        session.run(kept, make_feeds(range(number))),
    )
    makers = {value: node.op_type for node in model.graph.node for value in node.output}
    for name, single, batched in zip(kept, alone, together, strict=True):
        if (
            single.shape[:1] == (len(copies),)
            and batched.shape[:1] == (number,)
            and single.dtype == np.float32
        ):
            inside = tuple(slice(size) for size in single.shape[1:])
            if not np.array_equal(single[0], batched[row][inside]):
                return f"{makers[name]} ({name})"
    return "no operator with all outputs kept: in what onnxruntime fuses"


def sequence_feeds(session_inputs, vocabulary):
    """Return a function that makes rows of 1 to 17 tokens, padded on the right."""
    names = [value.name for value in session_inputs]

    def make(rows):
        lengths = [row_length(row) for row in rows]
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


def row_length(row):
    return 1 + row * 7 % 17


def check_sequences(path, dtype, vocabulary, rows):
    session = open_session(str(path), 1)
    axes = [
        [axis for axis, size in enumerate(value.shape) if size == "source_length"]
        for value in session.get_outputs()
    ]

    def cut(outputs, place, row):
        return [
            np.take(output[place], range(row_length(row)), axis[0] - 1) if axis else output[place]
            for output, axis in zip(outputs, axes)
        ]

    check(path, dtype, sequence_feeds(session.get_inputs(), vocabulary), cut, rows)


def step_feeds(session_inputs, vocabulary):
    """Return a function that makes the inputs of a decode step.

    Each row has `row_length` earlier tokens, and a source of another length.
    """
    rng = np.random.default_rng(0)
    lengths = np.array([row_length(row) for row in range(max(BATCH_SIZES))], np.int32)
    sources = np.array([row_length(row + 3) for row in range(max(BATCH_SIZES))], np.int32)
    tokens = rng.integers(4, vocabulary, (max(BATCH_SIZES), 1))
    shapes = {value.name: value.shape for value in session_inputs}
    caches = {
        name: rng.standard_normal((max(BATCH_SIZES), shape[1], CACHE_LENGTH, shape[3]), np.float32)
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
    session = open_session(str(path), 1)
    names = [value.name for value in session.get_outputs()]

    def cut(outputs, place, row):
        """Return the logits, and the part of each cache that is in use."""
        used = [
            row_length(row + 3) if ".encoder." in name else row_length(row) + 1 for name in names
        ]
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
def test_full_sequence_graphs_are_batch_invariant(exported, name, dtype, request):
    _, directory = exported(name, dtype)
    check_sequences(
        directory / default_graphs(Runtime(directory).info.manifest)["encoder"],
        dtype,
        48,
        select_batch_sizes(request),
    )


@cases("seq2seq", "causal", "causal-window", "causal-relative", "causal-grouped")
def test_decode_step_graphs_are_batch_invariant(exported, name, dtype, request):
    """The rows have different numbers of earlier tokens."""
    _, directory = exported(name, dtype)
    manifest = Runtime(directory).info.manifest
    check_steps(
        directory / default_graphs(manifest)[manifest["step"]],
        dtype,
        48,
        select_batch_sizes(request),
    )


def select_batch_sizes(request):
    return BATCH_SIZES if request.node.get_closest_marker("slow") else FEW_BATCH_SIZES


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_steps_with_relative_positions_and_source_are_batch_invariant(tmp_path, dtype):
    architecture, fields = MODELS["seq2seq-t5"]
    manifest = save_and_export(tmp_path, dtype, architecture, {**fields, "head_dim": 8})
    check_steps(tmp_path / "out" / default_graphs(manifest)["step"], dtype, 48, BATCH_SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_mean_pooling_is_batch_invariant(tmp_path, dtype):
    """`ReduceSum` adds tokens in another order for one row than for several, and with padding."""
    fields = dict(num_hidden_layers=1, classifier_pooling="mean")
    save_and_export(tmp_path, dtype, "VanillaEncoderForSequenceClassification", fields)
    check_sequences(tmp_path / "out/onnx/model.onnx", dtype, 48, BATCH_SIZES)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("modernbert", "int8"),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name in ("modernbert", "odd buckets", "disentangled window", "rotary odd heads")
            for dtype in DTYPES
        ),
    ],
)
def test_windows_and_positions_of_encoders_are_batch_invariant(tmp_path, name, dtype, request):
    fields = {"num_hidden_layers": 2, **ENCODER[name]}
    save_and_export(tmp_path, dtype, "VanillaEncoderForSequenceClassification", fields)
    path = tmp_path / "out/onnx/model.onnx"
    check_sequences(path, dtype, 48, select_batch_sizes(request))


def save_and_export(directory, dtype, architecture, fields):
    perturbed(architecture, {**SIZES, **fields}).save_pretrained(directory / "in")
    return export(directory / "in", directory / "out", target="cpu", dtype=dtype, cases=3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["seq2seq", "causal"])
def test_runtime_logits_are_batch_invariant(exported, name, dtype):
    """Prompts and sources have several lengths, and decode steps follow."""
    _, directory = exported(name, dtype)
    for threads in (1, 2):
        runtime = Runtime(directory, threads=threads)
        together = logits(runtime, name, range(4))
        for row in range(4):
            np.testing.assert_array_equal(
                together[row], logits(runtime, name, [row] * COPIES[dtype])[0]
            )


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_logits_do_not_depend_on_padding_of_source(exported, dtype):
    """The lengths are 1 to 17, because kernels add the values of several keys at once and the
    remaining keys separately."""
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
    """Return the logits (rows, 2, V) after the start token and after one decode step."""
    first = np.ones((len(ids), 1), np.int64)
    decoder = runtime.model.factory.open(
        GenerationRequest(Options(max_new_tokens=8), first, first, (ids, mask))
    )
    return np.stack(
        [decoder.prefill(first, first)[:, -1].copy(), decoder.step(5 * first)[:, -1].copy()], axis=1
    )


def logits(runtime, name, rows):
    """Return the logits (rows, 4, V) after the prompt and after three decode steps."""
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
    decoder = runtime.model.factory.open(
        GenerationRequest(Options(max_new_tokens=8), ids, mask, source)
    )
    result = [decoder.prefill(ids, mask).copy()]
    result += [
        decoder.step(np.array([[5 + row + step] for row in rows])).copy() for step in range(3)
    ]
    return np.stack([tensor[:, -1] for tensor in result], axis=1)
