"""Disentangled positions (He et al. 2021, DeBERTa, section 3.2): what the distance of two tokens
adds to their score.

A distance has a bucket, and a bucket a vector. A layer maps the vectors to keys and queries of its
own. The model knows them, so the export computes them; graphs multiply by those of the distances
that a text has, and look up the products.
"""

import numpy as np
from onnx_ir import Value

from .attention import scale, split_keys
from .context import GraphContext
from .positions import offsets


def disentangled_bias(g: GraphContext, name: str, query: Value, key: Value, ids: Value) -> Value:
    """Return what distances add to the scores of the self-attention module `name`, (B, H, T, T).

    `query` and `key` are (B, T, H * d), and `ids` (B, T).
    """
    op = g.op
    queries, keys = split_keys(g, query), split_keys(g, key)
    ends, rows = op.once("distance buckets", lambda: buckets_of_pairs(g, queries, ids))
    by_query = look_up(g, queries, bucket_heads(g, name, "k"), ends, rows)
    columns = op.once("distance columns", lambda: op("Transpose", rows, perm=[0, 1, 3, 2]))
    by_key = look_up(g, keys, bucket_heads(g, name, "q"), ends, columns)
    return op("Add", by_query, op("Transpose", by_key, perm=[0, 1, 3, 2]))


def look_up(
    g: GraphContext, states: Value, heads: Value, ends: tuple[Value, Value], buckets: Value
) -> Value:
    """Return the product of each of the `states` and the vector of each of its buckets, (B, H, T,
    T).

    `states` are (B, H, T, d), `heads` the vectors of all buckets, (H, d, N). The `buckets` (B, H,
    T, T) are counted from the first of the `ends`.
    """
    products = g.op("MatMul", states, g.op("Slice", heads, *ends, [2]))
    return g.op("GatherElements", products, buckets, axis=3)


def buckets_of_pairs(
    g: GraphContext, queries: Value, ids: Value
) -> tuple[tuple[Value, Value], Value]:
    """Return the ends of the range of buckets that a text has, (1,) each, and all its buckets.

    These are of each query and key, counted from the start of the range, int32 (B, H, T, T).
    """
    op, config = g.op, g.config
    buckets = buckets_by_distance(
        config.relative_attention_num_buckets, config.relative_attention_max_distance
    )
    largest = len(buckets) // 2
    last = op("Min", op("Sub", op.size(ids, 1), 1), largest)
    first, end = (
        op("Gather", buckets, op("Add", distance, largest)) for distance in (op("Neg", last), last)
    )
    distances = op("Clip", op("Neg", offsets(g, ids)), -largest, largest)
    rows = op("Sub", op("Gather", buckets, op("Add", distances, largest)), first)
    rows = op("Unsqueeze", op.cast(rows, "int32"), [0])
    heads = op.shape(op("Shape", queries, end=2), 1, 1)
    return (first, op("Add", end, 1)), op("Expand", rows, heads)


def buckets_by_distance(count: int, largest: int) -> np.ndarray:
    """Return the bucket of each distance, query position minus key position, int64 (2 * n + 1,).

    The distances are -n to n; all beyond have the bucket of the last. There are 2 * `count`
    buckets. Half of them hold one distance each. The others grow logarithmically: `largest` - 1 is
    at the end of the last but one. Logarithms are rounded to float32, as in torch.
    """
    exact = count // 2
    last = exact * ((largest - 1) / exact) ** ((count - exact - 1) / (exact - 1))
    reach = int(1.01 * last) + 2  # rounding may move it
    offset = np.arange(-reach, reach + 1)
    ratio = np.maximum(np.abs(offset), exact).astype(np.float32) / np.float32(exact)
    growth = rounded_log(ratio) / rounded_log(np.array((largest - 1) / exact, np.float32))
    far = (np.ceil(growth * np.float32(exact - 1)).astype(np.int64) + exact) * np.sign(offset)
    bucket = np.where(np.abs(offset) <= exact, offset, far) + count
    return bucket.clip(0, 2 * count - 1)


def rounded_log(values: np.ndarray | np.float32) -> np.ndarray:
    return np.log(values.astype(np.float64)).astype(np.float32)


def bucket_heads(g: GraphContext, name: str, part: str) -> Value:
    """Return the queries or keys of all buckets in the module `name`, (H, d, buckets).

    They are the vectors of buckets after the norm and the linear map of `part`, "q" or "k", times
    the scale of scores.
    """
    config = g.config
    vectors = f"{config.encoder_prefix}relative_positions"
    names = [f"{name}.{part}_proj.weight", f"{vectors}.embed.weight", f"{vectors}.norm.weight"]
    biases = [f"{vectors}.norm.bias", f"{name}.{part}_proj.bias"]
    arguments = (config.norm_type, config.layer_norm_eps, config.num_attention_heads, scale(g))
    present = tuple(g.has(bias) for bias in biases)
    names += [bias for bias, is_there in zip(biases, present) if is_there]
    return g.transform_weights(names, projected_buckets, present, *arguments)[0]


def projected_buckets(*arguments) -> tuple[np.ndarray]:
    *arrays, present, norm_type, epsilon, heads, factor = arguments
    matrix, vectors, gain, *biases = (array.astype(np.float32) for array in arrays)
    shift, bias = (biases.pop(0) if is_there else np.float32(0) for is_there in present)
    centered = vectors
    if norm_type == "layer_norm":
        centered = vectors - vectors.mean(axis=1, keepdims=True)
    spread = np.sqrt((centered * centered).mean(axis=1, keepdims=True) + np.float32(epsilon))
    states = (centered / spread * gain + shift) @ matrix.T + bias
    split = (states * np.float32(factor)).reshape(len(states), heads, -1)
    return (split.transpose(1, 2, 0).astype(arrays[0].dtype),)
