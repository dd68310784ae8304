"""Tests of operators at the sizes of real models: a row has the same bits alone and in a batch.

Kernels select their method by size.
"""

import numpy as np
import onnx
import pytest
from batch_rows import BATCH_SIZES, COPIES, DTYPES, open_session
from written import operators, write

from vanilla_transformer_export.graphs.layers import linear
from vanilla_transformer_export.graphs.quantization import BLOCK, int4_blocks

# (K, N) of the shipped models, the paper's base model, GPT-2 and BERT
MATMUL_SIZES = [
    (128, 128),
    (128, 384),
    (256, 128),
    (128, 6000),
    (512, 512),
    (512, 2048),
    (2048, 512),
    (512, 8000),
]
MATMUL_SIZES += [(768, 2304), (768, 3072), (3072, 768), (768, 2)]
ATTENTION_SIZES = [(4, 32), (8, 64), (12, 64)]  # number of heads, head size
IMPORTS = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("com.microsoft", 1)]


def value(name, shape, dtype=np.float32):
    return onnx.helper.make_tensor_value_info(
        name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape
    )


def alone_and_together(model, make_feeds, copies=1):
    """Yield pairs to compare: the outputs of rows alone, and of the same rows in a batch.

    All batch sizes run with one thread and with two.
    """
    for threads in (1, 2):
        session = open_session(model, threads)
        alone = np.concatenate(
            [
                session.run(None, make_feeds([row] * copies))[0][:1]
                for row in range(max(BATCH_SIZES))
            ]
        )
        for number in (number for number in BATCH_SIZES if number >= copies):
            yield alone[:number], session.run(None, make_feeds(slice(number)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", MATMUL_SIZES)
def test_matmuls_are_batch_invariant(size, dtype):
    """Rows have one token or several. In fp32, rows also have no token axis, as in the last matmul
    of a head."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal(size, np.float32)
    x = rng.standard_normal((64, 3, size[0]), np.float32) * rng.uniform(0.1, 10, (64, 1, 1)).astype(
        np.float32
    )
    model = matmul_model(matrix, dtype)
    for tokens in (x[:, :1], x):
        for single, batched in alone_and_together(
            model, lambda rows, tokens=tokens: {"x": tokens[rows]}, COPIES[dtype]
        ):
            np.testing.assert_array_equal(single, batched)
    if dtype == "fp32":
        node = onnx.helper.make_node("Gemm", ["x", "w"], ["y"])
        weights = [onnx.numpy_helper.from_array(matrix, "w")]
        graph = onnx.helper.make_graph(
            [node], "g", [value("x", ["rows", size[0]])], [value("y", None)], weights
        )
        model = onnx.helper.make_model(
            graph, opset_imports=IMPORTS, ir_version=10
        ).SerializeToString()
        for single, batched in alone_and_together(model, lambda rows: {"x": x[rows, 0]}):
            np.testing.assert_array_equal(single, batched)


@pytest.mark.slow
@pytest.mark.parametrize("size", MATMUL_SIZES)
def test_single_int4_row_differs_only_by_rounding(size):
    """Both kernels add a term for each block, and 8 partial sums.

    One of them multiplies by unsigned integers, and subtracts 8 times the sums of blocks of x. n
    roundings of a sum of magnitudes m lose about sqrt(n) * u * m, where u is half of float32's
    epsilon (Higham and Mary 2019). A value of x rounded to another integer would exceed the bound.
    """
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
    session = open_session(matmul_model(matrix, "int4"), 1)
    alone = np.stack([session.run(None, {"x": row[None]})[0][0, 0] for row in x])
    pairs = np.stack([session.run(None, {"x": np.stack([row, row])})[0][0, 0] for row in x])
    assert (np.abs(alone - pairs) <= bound).all()
    assert (bound.mean(axis=1) < np.abs(x[:, 0]).max(axis=1) / 127 * np.abs(matrix).mean()).all()


def matmul_model(matrix, dtype):
    """Return the serialized model of x (rows, tokens, K) times `matrix` for the cpu target."""
    inputs = {"x": np.zeros((1, 1, len(matrix)), np.float32)}
    model = write(
        lambda g, x: [linear(g, x, "w")], {"w.weight": matrix.T.copy()}, inputs, dtype=dtype
    )
    assert dtype == "fp32" or "MatMul" not in operators(model)
    return model.SerializeToString()


@pytest.mark.slow
@pytest.mark.parametrize("heads, width", ATTENTION_SIZES)
@pytest.mark.parametrize("source", [False, True])
def test_decode_step_attention_is_batch_invariant(heads, width, source):
    """The query attends to the cache and a new token, or to the cache of a source."""
    rng, cache_length = np.random.default_rng(0), 300
    names = ["q", "k", "v", "past_key", "past_value"]
    node = onnx.helper.make_node(
        "GroupQueryAttention", [*names, "last", "total"], ["y", "key", "value"],
        domain="com.microsoft", num_heads=heads, kv_num_heads=heads,
    )  # fmt: skip
    new, cache = ["rows", "new", heads * width], ["rows", heads, cache_length, width]
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
    caches = rng.standard_normal((2, 64, heads, cache_length, width), np.float32)
    lengths = rng.permutation(np.geomspace(1, cache_length, 64).astype(np.int32))

    def make(rows):
        q, *kv = states[:, rows]
        kv = [tensor[:, :0] for tensor in kv] if source else kv
        last = lengths[rows] - 1
        return dict(zip(names, [q, *kv, *caches[:, rows]])) | {
            "last": last,
            "total": last.max(keepdims=True) + 1,
        }

    for single, batched in alone_and_together(model, make):
        np.testing.assert_array_equal(single, batched)


def masked_attention(operator, heads, width):
    """Return a graph of one `operator`, which reads queries, keys, values and the mask of keys."""
    shape = ["rows", "tokens", heads * width]
    if operator == "Attention":
        sizes = {"q_num_heads": heads, "kv_num_heads": heads}
        mask, places = value("mask", ["rows", 1, "tokens", "tokens"], bool), "qkv"
        node = onnx.helper.make_node(operator, [*places, "mask"], ["y"], **sizes)
    else:
        mask, domain = value("mask", shape[:2], np.int32), "com.microsoft"
        names = [*"qkv", "", "mask"]
        node = onnx.helper.make_node(operator, names, ["y"], domain=domain, num_heads=heads)
    inputs = [*(value(name, shape) for name in "qkv"), mask]
    graph = onnx.helper.make_graph([node], "g", inputs, [value("y", None)])
    return onnx.helper.make_model(graph, opset_imports=IMPORTS, ir_version=10).SerializeToString()


def mask_rows(operator, lengths, longest):
    """Return the mask of keys of rows with these `lengths`, in the form that `operator` reads."""
    mask = np.arange(longest) < np.array(lengths)[:, None]
    if operator == "MultiHeadAttention":
        return mask.astype(np.int32)
    return mask[:, None, None].repeat(longest, axis=2)


LENGTHS = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 200]


@pytest.mark.parametrize("heads, width", [*ATTENTION_SIZES, (3, 20)])
def test_attention_has_bits_of_multi_head_attention_with_mask(heads, width):
    """Encoders have one or the other, by what their positions add to the scores."""
    states = np.random.default_rng(0).standard_normal(
        (3, len(LENGTHS), max(LENGTHS), heads * width), np.float32
    )
    results = [
        open_session(masked_attention(operator, heads, width), 1).run(
            None, dict(zip("qkv", states)) | {"mask": mask_rows(operator, LENGTHS, max(LENGTHS))}
        )[0]
        for operator in ("Attention", "MultiHeadAttention")
    ]
    np.testing.assert_array_equal(*results)


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["Attention", "MultiHeadAttention"])
@pytest.mark.parametrize("heads, width", ATTENTION_SIZES)
def test_full_sequence_attention_is_batch_and_padding_invariant(heads, width, operator):
    states = np.random.default_rng(0).standard_normal(
        (3, len(LENGTHS), max(LENGTHS), heads * width), np.float32
    )

    def make(rows, longest):
        mask = mask_rows(operator, [LENGTHS[row] for row in rows], longest)
        return dict(zip("qkv", states[:, rows, :longest])) | {"mask": mask}

    for threads in (1, 2):
        session = open_session(masked_attention(operator, heads, width), threads)
        alone = [session.run(None, make([row], length))[0][0] for row, length in enumerate(LENGTHS)]
        for number in range(1, len(LENGTHS) + 1):
            for longest in (LENGTHS[number - 1], max(LENGTHS)):
                together = session.run(None, make(list(range(number)), longest))[0]
                for row in range(number):
                    np.testing.assert_array_equal(together[row, : LENGTHS[row]], alone[row])
