"""Positions of tokens, and what is added to the scores: biases of relative positions, and masks.

`causal_bias` writes the masks of decoders, `bidirectional_bias` those of encoders, both with their
sliding windows. `encoder_attention.block_bias` is another for windows.
"""

import math

import numpy as np
from onnx_ir import Value

from .context import GraphContext, Tokens

# added to masked scores; the softmax stays finite where all are masked
LOWEST = float(np.finfo(np.float32).min)
# numbers whose cosines CPUs compute at once; those of a remainder are rounded otherwise, and where
# it begins depends on the batch
LANES = 16


def token_positions(
    g: GraphContext, ids: Value, mask: Value | None, before: Value | None = None
) -> Value:
    """Return the position of each of `ids` (B, T), as (B, T), or (1, T) if it is the index in the
    row.

    The config's `position_ids_from` selects what is counted: tokens that are not padding by the
    `mask` (B, T) or by their ids, else all. Without a `mask`, "mask" counts all too. Padding that
    is not counted is at -1. `before` (1,) tokens of each row come before `ids`, 0 if None. They are
    not added to counts of the mask.
    """
    op, config = g.op, g.config
    if config.position_ids_from == "mask" and mask is not None:
        counted, before = mask, None
    elif config.position_ids_from == "ids":
        counted = op("Not", op("Equal", ids, config.pad_token_id))
    else:
        indices = op("Unsqueeze", op.range(op.size(ids, 1)), [0])
        return indices if before is None else op("Add", indices, before)
    counted = op.cast(op.cast(counted, "bool"), "int64")
    count = op("CumSum", counted, 1)
    count = count if before is None else op("Add", count, before)
    return op("Sub", op("Mul", count, counted), 1)


def padded_positions(g: GraphContext, ids: Value, mask: Value) -> Value:
    """Return the positions (B, T) of `ids` in rows with padding, which a decoder reads at once.

    They count from 0 at the first token after padding on the left. `mask` (B, T) is 0 for padding,
    whose positions have no meaning.
    """
    if g.config.position_ids_from != "place":
        return token_positions(g, ids, mask)
    return g.op("Max", g.op("Sub", g.op("CumSum", mask, 1), 1), 0)


def angles(g: GraphContext, positions: Value, steps: np.ndarray) -> Value:
    """Return the angle of each component at `positions` (B, T), float32 (B, T, components).

    `steps` are those of position 1.
    """
    return g.op("Mul", g.op("Unsqueeze", g.op.cast(positions, "float32"), [-1]), steps)


def angle_steps(width: int, base: float) -> np.ndarray:
    """Return 1 / base^(2i / width) for i = 0 ... width / 2 - 1, float32, rounded as torch does."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return 1 / (np.float64(base) ** exponents).astype(np.float32)


def cast_to_graph_dtype(g: GraphContext, value: Value) -> Value:
    """Return the float32 `value` in the type that the graph computes in."""
    return value if g.op.dtype == np.float32 else g.op.cast(value, g.op.dtype.name)


def cast_to_float32(g: GraphContext, value: Value) -> Value:
    """Return `value`, of the type that the graph computes in, as float32."""
    return value if g.op.dtype == np.float32 else g.op.cast(value, "float32")


def sinusoids(g: GraphContext, positions: Value) -> Value:
    """Return the paper's positions (section 3.5), (B, T, width), for `positions` (B, T), written as
    nodes.

    Even components are sines of the angles, odd ones cosines.
    """
    op, width = g.op, g.config.position_size
    turned = angles(g, positions, angle_steps(width, 10000.0).repeat(2))
    is_even = np.arange(width) % 2 == 0
    return cast_to_graph_dtype(g, op("Where", is_even, op("Sin", turned), op("Cos", turned)))


def rotate(g: GraphContext, states: Value, heads: int, positions: Value, kind: str) -> Value:
    """Return queries or keys, `states` (B, T, H * d), turned by their `positions` (B or 1, T).

    Components 2i and 2i + 1 are a point in the plane (Su et al. 2021). `kind` is the type of the
    layer. The number of `heads` is not used.
    """
    op = g.op
    cosines, sines = op.once(
        ("rotary", positions, kind), lambda: signed_factors(g, positions, kind)
    )
    x, y = op.outputs(2, "Split", op("Reshape", states, [0, 0, -1, 2]), axis=3, num_outputs=2)
    shaped, swapped = (
        op("Reshape", value, [0, 0, -1, g.config.head_dim])
        for value in (states, op("Concat", y, x, axis=3))
    )
    turned = op("Add", op("Mul", shaped, cosines), op("Mul", swapped, sines))
    return op("Reshape", turned, [0, 0, -1])


def signed_factors(g: GraphContext, positions: Value, kind: str) -> list[Value]:
    """Return the cosine of each component and the sine with its sign, each (B, T, 1, d).

    `positions` are (B, T), and `kind` is the type of the layer.
    """
    signs = np.array([-1, 1], np.float32)
    turned = angles(g, positions, np.outer(rotary_steps(g, kind), signs).reshape(-1))
    return [
        g.op("Unsqueeze", cast_to_graph_dtype(g, g.op(name, turned)), [2])
        for name in ("Cos", "Sin")
    ]


def rotary_factors(g: GraphContext, positions: Value, kind: str) -> list[Value]:
    """Return the cosines and sines of the points of a head, each (B, T, d / 2).

    `positions` are (B, T), and `kind` is the type of the layer.
    """
    steps = rotary_steps(g, kind)
    turned = angles(g, positions, np.pad(steps, (0, -len(steps) % LANES)))
    factors = [cast_to_graph_dtype(g, g.op(name, turned)) for name in ("Cos", "Sin")]
    if len(steps) % LANES == 0:
        return factors
    return [g.op("Slice", factor, [0], [len(steps)], [-1]) for factor in factors]


def rotary_steps(g: GraphContext, kind: str) -> np.ndarray:
    """Return by what angle each point of a head turns at each position, float32 (d / 2,).

    `kind` is the type of the layer.
    """
    base, factor = g.config.rope(kind)
    return angle_steps(g.config.head_dim, base) / np.float32(factor)


# ------------------------------------------------------------------------------ distances and masks


def offsets(g: GraphContext, ids: Value, before: Value | None = None) -> Value:
    """Return the position of each key minus that of each query, (1, T, S), for new tokens `ids` (B,
    T).

    `before` (1,) keys come before `ids`.
    """
    op = g.op
    length = op.size(ids, 1)
    keys = op.range(length if before is None else op("Add", length, before))
    queries = op.range(length) if before is None else op("Add", op.range(length), before)
    return op("Unsqueeze", op("Sub", keys, op("Unsqueeze", queries, [1])), [0])


def position_bias(g: GraphContext, distances: Value, is_causal: bool) -> Value:
    """Return the biases of relative positions for the attention scores, (B, H, T, S).

    `distances` (B, T, S) are key positions minus query positions. All from
    `relative_attention_max_distance` on are alike (Raffel et al. 2020, section 2.1). `is_causal`
    selects the decoder's table.
    """
    op, config = g.op, g.config
    prefix = config.decoder_prefix if is_causal else config.encoder_prefix
    largest = config.relative_attention_max_distance
    arguments = (config.relative_attention_num_buckets, largest, is_causal)
    [table] = g.transform_weights(
        [f"{prefix}relative_positions.bias.weight"], biases_by_distance, *arguments
    )
    rows = op("Add", op("Clip", distances, -largest, largest), largest)
    return op("Transpose", op("Gather", table, rows), perm=[0, 3, 1, 2])


def biases_by_distance(
    biases: np.ndarray, buckets: int, largest: int, is_causal: bool
) -> tuple[np.ndarray]:
    """Return a 1-tuple with the biases (2 * largest + 1, H) of distances from -largest to largest.

    `biases` (buckets, H) is the learned table. Distances fall into buckets as in T5. With
    `is_causal`, later keys get the bias of distance 0.
    """
    offset = np.arange(-largest, largest + 1)
    count = buckets if is_causal else buckets // 2
    distance = np.maximum(-offset, 0) if is_causal else np.abs(offset)
    exact = count // 2
    growth = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(largest / exact)
    )
    far = np.minimum(exact + (growth * (count - exact)).astype(np.int64), count - 1)
    bucket = np.where(distance < exact, distance, far)
    return (biases[bucket if is_causal else bucket + (offset > 0) * count],)


def mask_scores(g: GraphContext, is_visible: Value) -> Value:
    """Return a bias for attention scores: 0 where `is_visible`, else a very low number, which hides
    keys."""
    return g.op("Where", is_visible, 0.0, g.target.dialect.mask_value)


def key_flags(g: GraphContext, mask: Value) -> Value:
    """Return the `mask` of keys (B, S), 0 for padding, as booleans (B, 1, 1, S)."""
    return g.op("Unsqueeze", g.op.cast(mask, "bool"), [1, 2])


def source_bias(g: GraphContext, mask: Value) -> Value:
    """Return the bias (B, 1, 1, S) that is added to the scores of cross-attention.

    It hides padding of the source, where `mask` (B, S) is 0.
    """
    return mask_scores(g, key_flags(g, mask))


def bidirectional_bias(g: GraphContext, tokens: Tokens, kind: str) -> Value:
    """Return the bias (B, 1 or H, 1 or T, S) that is added to the attention scores of an encoder's
    layers of this type.

    It hides padding, and keys that are more than a `window` of tokens away (Beltagy et al. 2020,
    section 3.1). Models with relative positions add a bias for each head.
    """
    op, window = g.op, g.config.window(kind)
    is_visible = key_flags(g, tokens.mask)
    if window is not None:
        is_near = op("LessOrEqual", op("Abs", offsets(g, tokens.ids)), window)
        is_visible = op("And", is_visible, op("Unsqueeze", is_near, [1]))
    hidden = mask_scores(g, is_visible)
    if not g.config.has_relative_positions:
        return hidden
    return op("Add", position_bias(g, offsets(g, tokens.ids), is_causal=False), hidden)


def causal_biases(
    g: GraphContext, ids: Value, mask: Value | None, before: Value | None = None
) -> dict[str, Value]:
    """Return {type: bias} of the types of layers that the decoder has, see `causal_bias`.

    `ids` (B, T) are the new tokens, which `before` (1,) keys precede, none if it is None. `mask` is
    that of all keys.
    """
    distances = offsets(g, ids, before)
    return {
        kind: causal_bias(g, distances, mask, g.config.window(kind))
        for kind in g.config.types_of_stack(g.config.decoder_prefix)
    }


def causal_bias(g: GraphContext, distances: Value, mask: Value | None, window: int | None) -> Value:
    """Return the bias (B or 1, 1 or H, T, S) that is added to the attention scores of a decoder.

    It hides later keys (section 3.2.3 of the paper), padding, and all but the last `window` keys.
    Models with relative positions add a bias for each head. `distances` (B or 1, T, S) are key
    positions minus query positions. `mask` (B, S) is 0 for padding, None without any.
    """
    op = g.op
    is_visible = op("LessOrEqual", distances, 0)
    if window is not None:
        is_visible = op("And", is_visible, op("Greater", distances, -window))
    is_visible = op("Unsqueeze", is_visible, [1])
    if mask is not None:
        is_visible = op("And", is_visible, key_flags(g, mask))
    hidden = mask_scores(g, is_visible)
    return (
        op("Add", position_bias(g, distances, True), hidden)
        if g.config.has_relative_positions
        else hidden
    )
