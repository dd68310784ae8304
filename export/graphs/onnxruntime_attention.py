"""Attention in operators that only onnxruntime has.

| function | operator | caches | used by |
|---|---|---|---|
| `tiled_attention` | Attention, or MultiHeadAttention without a mask | none | encoders on cpu |
| `grouped_attention` | GroupQueryAttention | rows of different lengths | decoders on cpu |
| `row_cross_attention` | GroupQueryAttention | of sources of different lengths | seq2seq on cpu |
| `beam_attention` | DecoderMaskedMultiHeadAttention | with room, shared by beams | beams on cpu |
| `cross_attention`, `beam_cross_attention` | MultiHeadAttention | of the source | seq2seq |

Each function returns what `layers.stack` calls in its layers. Past and present of a cache are one
buffer.
"""

from collections.abc import Sequence
from functools import partial

from onnx_ir import Value

from ..specs.graph_spec import LONG
from .attention import (
    for_each_query,
    fused_product,
    project,
    repeat_heads,
    scale,
    self_attention,
    source_attention,
    source_query,
)
from .context import Attention, Caches, GraphContext, Pairs, Tokens, Values
from .encoder_attention import encoder_attention
from .layers import linear
from .ops import CONTRIB
from .positions import key_flags, offsets, position_bias, rotary_factors


def tiled_attention(g: GraphContext, tokens: Tokens | None) -> Attention:
    """Return the function that writes an encoder's attention, for `layers.stack` to call in each
    layer. `tokens` is None for images."""
    return encoder_attention(g, tokens, multi_head, full_attention)


def full_attention(g: GraphContext, tokens: Tokens) -> Attention:
    """Return the function that writes attention to all tokens that are not padding.

    It is that of `full_tiles`, unless relative positions add something to the scores.
    """
    if not g.config.has_relative_positions:
        return full_tiles(g, tokens)
    flags = g.op.cast(tokens.mask, "int32")
    bias = position_bias(g, offsets(g, tokens.ids), is_causal=False)
    return self_attention(g, tokens.positions, bias, partial(multi_head, mask=flags))


def full_tiles(g: GraphContext, tokens: Tokens) -> Attention:
    """Return the function that writes attention to all tokens that are not padding.

    If a batch has `LONG` tokens or more per row and no padding, it runs without a mask. onnxruntime
    then works in tiles: faster, and in memory that grows with the length instead of its square.
    Other batches have the operator `Attention`, which is faster below that length.
    """
    op, length = g.op, g.op.size(tokens.ids, 1)
    is_full = op.cast(op("ReduceMin", tokens.mask, keepdims=0), "bool")
    is_tiled = op("And", is_full, op("GreaterOrEqual", length, [LONG]))
    # tiles read no mask, so it is not repeated for each query there
    mask = for_each_query(g, key_flags(g, tokens.mask), op("Where", is_tiled, [1], length))

    def attend(layer: int, name: str, x: Value) -> Value:
        states = project(g, name, x, tokens.positions)
        return g.choose(
            is_tiled,
            (f"{name}.tiles", lambda g: multi_head(g, *states)),
            (f"{name}.masked", lambda g: fused_product(g, *states, mask)),
        )

    return attend


def grouped_attention(g: GraphContext, inputs: Values, caches: Caches) -> Attention:
    """Return the function that writes causal attention of rows that differ in length, for
    `layers.stack` to call.

    The caches have room for later tokens and are written in place. `inputs` of the graph are
    position_ids, last_position and total_length. The operator masks later keys and those outside
    the sliding window of the layer.
    """
    positions, last, total = (
        inputs[name] for name in ("position_ids", "last_position", "total_length")
    )
    bias = cache_bias(g, positions, total)

    def attend(layer: int, name: str, x: Value) -> Value:
        states: Sequence[Value | None]
        states = (
            [packed(g, name, x), None, None] if is_packed(g) else project(g, name, x, positions)
        )
        operands = [*states, *caches.past[layer], last, total, None, None, None, bias]
        window = g.config.window(g.config.layer_type(name)) or -1
        attributes = {"kv_num_heads": g.config.num_key_value_heads, "local_window_size": window}
        return write_cache(g, "GroupQueryAttention", operands, caches, **attributes)

    return attend


def row_cross_attention(g: GraphContext, inputs: Values, caches: Caches) -> Attention:
    """Return the function that writes attention of one token in each row to sources that differ in
    length.

    `caches` hold the keys and values of the sources, and are at least as long as the longest.
    `inputs` of the graph are last_source_position and total_source_length. The one query may read
    all keys of its source, so causal attention without new keys gives the same; it is faster.
    """
    last, total = inputs["last_source_position"], inputs["total_source_length"]

    def attend(layer: int, name: str, x: Value) -> Value:
        query = source_query(g, name, x)
        none = g.op.once("no keys", lambda: g.op("Slice", query, [0], [0], [1]))
        operands = [query, none, none, *caches.past[layer], last, total]
        return write_cache(
            g, "GroupQueryAttention", operands, caches, kv_num_heads=g.config.num_attention_heads
        )

    return attend


def beam_attention(g: GraphContext, inputs: Values, caches: Caches) -> Attention:
    """Return the function that writes attention of one token in each beam, for `layers.stack` to
    call.

    All beams have `past_length` earlier tokens, whose keys other beams may have written: the input
    `cache_indirection` says which. `caches` are its keys and values, to which the new ones are
    written.
    """
    op, length = g.op, inputs["past_length"]
    before = op.cast(length, "int64")
    positions = op("Unsqueeze", before, [0])
    bias = cache_bias(g, positions, op("Add", before, 1))
    beams = [length, inputs["num_beams"], inputs["cache_indirection"]]

    def attend(layer: int, name: str, x: Value) -> Value:
        states = split_projections(g, name, x, positions)
        operands = [*states, None, bias, *caches.past[layer], *beams]
        return write_cache(
            g, "DecoderMaskedMultiHeadAttention", operands, caches, past_present_share_buffer=1
        )

    return attend


def cross_attention(g: GraphContext, mask: Value, states: Pairs) -> Attention:
    """Return the function that writes attention to a source, for `layers.stack` to call in each
    layer.

    `states` are keys and values of the source for each layer, computed once, and `mask` (B, S) is 0
    for padding.
    """
    flags = g.op.cast(mask, "int32")
    return source_attention(g, states, None, partial(multi_head, mask=flags))


def beam_cross_attention(g: GraphContext, mask: Value, states: Pairs) -> Attention:
    """Return the function that writes attention of one token in each beam to its source.

    The beams of a source are queries of one row. `states` are keys and values of the sources for
    each layer, and `mask` (B, S) is 0 for padding.
    """
    flags = g.op.cast(mask, "int32")
    by_source = g.op.shape(g.op.size(flags, 0), -1, key_width(g))

    def attend(layer: int, name: str, x: Value) -> Value:
        queries = g.op("Reshape", source_query(g, name, x), by_source)
        output = multi_head(g, queries, *states[layer], mask=flags)
        return g.op("Reshape", output, [-1, 1, key_width(g)])

    return attend


# ---------------------------------------------------------------------------------------- operators


def head_attributes(g: GraphContext) -> dict[str, int | float]:
    return {"num_heads": g.config.num_attention_heads, "scale": scale(g)}


def is_packed(g: GraphContext) -> bool:
    """Return True if one matrix multiplication computes queries, keys and values: without rotary
    positions and norms, which change queries and keys but not values."""
    return not (g.config.has_rotary_positions or g.config.use_qk_norm)


def packed(g: GraphContext, name: str, x: Value) -> Value:
    """Return queries, keys and values of the module `name` for x side by side, (B, T, (H + 2 * key
    heads) * d)."""
    return linear(g, x, *(f"{name}.{part}_proj" for part in "qkv"))


def split_projections(
    g: GraphContext, name: str, x: Value, positions: Value | None
) -> tuple[Value, Value, Value]:
    """Return queries, keys and values (B, T, H * d) of the module `name` for x, from one matrix
    multiplication if `is_packed`.

    `positions` (B or 1, T) are for rotary embeddings.
    """
    if not is_packed(g):
        return project(g, name, x, positions)
    widths = [key_width(g)] * 3
    query, key, value = g.op.outputs(3, "Split", packed(g, name, x), widths, axis=-1)
    return query, key, value


def key_width(g: GraphContext) -> int:
    return g.config.num_attention_heads * g.config.head_dim


def multi_head(
    g: GraphContext,
    query: Value,
    keys: Value,
    values: Value,
    bias: Value | None = None,
    mask: Value | None = None,
) -> Value:
    keys = repeat_heads(g, keys, g.config.head_dim)
    values = repeat_heads(g, values, g.config.value_head_dim)
    return g.contrib(
        "MultiHeadAttention", query, keys, values, None, mask, bias, **head_attributes(g)
    )


def fused_rotate(g: GraphContext, states: Value, heads: int, positions: Value, kind: str) -> Value:
    """Return queries or keys (B, T, H * d) turned by their `positions` (B or 1, T), with one
    operator. `kind` is the type of the layer."""
    op = g.op
    tables = op.once(
        ("rotary", positions, kind),
        lambda: [
            op("Reshape", factors, [-1, g.config.head_dim // 2])
            for factors in rotary_factors(g, positions, kind)
        ],
    )
    rows = op.once(("rotary rows", positions), lambda: rotary_rows(g, positions, states))
    return g.contrib("RotaryEmbedding", states, rows, *tables, num_heads=heads, interleaved=1)


def rotary_rows(g: GraphContext, positions: Value, states: Value) -> Value:
    """Return the row of the tables of cosines and sines for each of the `states`, (B, T). The
    tables have a row for each of the `positions`."""
    op = g.op
    rows = op("Reshape", op("Range", 0, op("Size", positions), 1), op("Shape", positions))
    return op("Expand", rows, op("Shape", states, end=2))


def write_cache(
    g: GraphContext, op_type: str, operands: list[Value | None], caches: Caches, **attributes: int
) -> Value:
    """Return the output of an attention operator that returns its keys and values too.

    They are appended to `caches.present`. `operands` are the inputs of the operator `op_type`, and
    `attributes` its attributes by name.
    """
    output, keys, values = g.op.outputs(
        3, op_type, *operands, domain=CONTRIB, **head_attributes(g), **attributes
    )
    caches.present.append((keys, values))
    return output


def cache_bias(g: GraphContext, positions: Value, total: Value) -> Value | None:
    """Return the bias that relative positions of a decoder add to the attention scores, or `None`
    if the model has none. Queries are at `positions` (rows, T), and there are `total` keys."""
    if not g.config.has_relative_positions:
        return None
    keys = g.op.range(g.op.cast(total, "int64"))
    return position_bias(g, g.op("Sub", keys, g.op("Unsqueeze", positions, [-1])), is_causal=True)
