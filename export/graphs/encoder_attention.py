"""Attention of encoders: a token attends to all tokens that are not padding, or to those near it.

A layer is written by its type. Layers with a sliding window work in blocks from `LONG` tokens on,
so that time and memory grow with the length and not with its square. Shorter sequences have a bias
instead, which is faster there.
"""

from collections.abc import Callable

import numpy as np
from onnx_ir import Value

from ..specs.graph_spec import LONG
from .attention import (
    Product,
    by_layer_type,
    dense_product,
    for_each_query,
    fused_product,
    merge_heads,
    project,
    repeat_heads,
    scale,
    self_attention,
    split_heads,
    split_queries,
)
from .context import Attention, GraphContext, Tokens
from .disentangled import disentangled_bias
from .positions import bidirectional_bias, mask_scores

MIN_BLOCK = 64  # queries; with fewer, matrices would be too small to multiply well
# Keys beside those of its own block that a block reads, and what else blocks cost, take as long as
# a bias in sequences of so many blocks.
MIN_BLOCKS = 4


def encoder_attention(
    g: GraphContext,
    tokens: Tokens | None,
    product: Product = dense_product,
    full: Callable[[GraphContext, Tokens], Attention] | None = None,
) -> Attention:
    """Return the function that writes the attention of an encoder, for `layers.stack` to call.

    Args:
        g: the graph.
        tokens: what the encoder reads; `None` for images.
        product: the operators, by default the standard ones.
        full: returns the function for layers that read all tokens, unless positions are
            disentangled; by default they have a bias as others.
    """
    if tokens is None:
        return self_attention(g, None, None, product)

    def write(kind: str) -> Attention:
        if works_in_blocks(g, kind):
            return window_attention(g, tokens, product)
        if full and g.config.window(kind) is None and not g.config.has_disentangled_positions:
            return full(g, tokens)
        return biased_attention(g, tokens, bidirectional_bias(g, tokens, kind), product)

    return by_layer_type(g, g.config.encoder_prefix, write)


def fused_attention(g: GraphContext, tokens: Tokens | None) -> Attention:
    """Return the function that writes an encoder's attention as one operator, see `fused_product`.

    `tokens` is None for images.
    """
    if tokens is None:
        return self_attention(g, None, None, fused_product)
    length = g.op.size(tokens.ids, 1)

    def write(kind: str) -> Attention:
        bias = for_each_query(g, bidirectional_bias(g, tokens, kind), length)
        return biased_attention(g, tokens, bias, fused_product)

    return by_layer_type(g, g.config.encoder_prefix, write)


def biased_attention(g: GraphContext, tokens: Tokens, bias: Value, product: Product) -> Attention:
    """Return the function that writes attention by the operators of `product`, with a `bias` of the
    scores.

    `bias` is (B or 1, H or 1, T or 1, T). Disentangled positions are added to it.
    """

    def attend(layer: int, name: str, x: Value) -> Value:
        query, key, value = project(g, name, x, tokens.positions)
        if not g.config.has_disentangled_positions:
            return product(g, query, key, value, bias)
        distances = disentangled_bias(g, name, query, key, tokens.ids)
        return product(g, query, key, value, g.op("Add", distances, bias))

    return attend


# ------------------------------------------------------------------------------------------ windows


def works_in_blocks(g: GraphContext, kind: str) -> bool:
    """Return True if layers of this type have a window, and positions add nothing to scores."""
    return g.config.window(kind) is not None and not g.config.has_position_bias


def block_size(window: int) -> int:
    """Return the number of queries of a block in layers with a `window`."""
    return max(window, MIN_BLOCK)


def min_block_length(window: int) -> int:
    """Return the number of tokens from which on layers with a `window` work in blocks."""
    return max(LONG, MIN_BLOCKS * block_size(window))


def window_attention(g: GraphContext, tokens: Tokens, product: Product) -> Attention:
    """Return the function that writes attention with a sliding window.

    Sequences of few blocks are computed by `product` with a bias, others in blocks.
    """
    block = block_size(g.config.sliding_window)
    length = min_block_length(g.config.sliding_window)
    is_long = g.op("GreaterOrEqual", g.op.size(tokens.mask, 1), length)
    kind = "sliding_attention"
    bias = g.choose(
        is_long,
        ("window.blocks", lambda g: block_bias(g, tokens.mask, block)),
        ("window.all", lambda g: bidirectional_bias(g, tokens, kind)),
    )

    def attend(layer: int, name: str, x: Value) -> Value:
        states = project(g, name, x, tokens.positions)
        return g.choose(
            is_long,
            (f"{name}.blocks", lambda g: block_product(g, *states, bias, block)),
            (f"{name}.all", lambda g: product(g, *states, bias)),
        )

    return attend


def block_bias(g: GraphContext, mask: Value, block: int) -> Value:
    """Return the bias (B, 1, blocks, block, 3 * block) of the scores of each block of queries and
    the keys of `neighbors`. It hides padding, where `mask` (B, T) is 0, and keys too far away."""
    op = g.op
    flags = neighbors(g, op("Unsqueeze", op.cast(mask, "float32"), [1, 3]), block, 1)
    is_key = op("Transpose", op("Greater", flags, np.float32(0)), perm=[0, 1, 2, 4, 3])
    distance = np.arange(-block, 2 * block) - np.arange(block)[:, None]
    return mask_scores(g, op("And", is_key, np.abs(distance) <= g.config.sliding_window))


def block_product(
    g: GraphContext, query: Value, key: Value, value: Value, bias: Value, block: int
) -> Value:
    """Return attention in blocks (Beltagy et al. 2020, section 3.1), (B, T, H * d_v).

    A block of queries reads its keys and those of the blocks before and after it. Queries are (B,
    T, H * d_k), keys and values (B, T, key heads * d). `bias` is that of `block_bias`.
    """
    op, config = g.op, g.config
    heads, length = config.num_attention_heads, op.size(query, 1)
    queries = split_queries(g, op("Mul", query, scale(g)))
    queries = op("Pad", queries, op.shape(0, 0, 0, 0, 0, 0, missing(g, length, block), 0))
    queries = op("Reshape", queries, [0, 0, -1, block, config.head_dim])
    keys, values = (
        neighbors(g, split_heads(g, repeat_heads(g, states, width), heads, width), block, width)
        for states, width in ((key, config.head_dim), (value, config.value_head_dim))
    )
    scores = op("MatMul", queries, op("Transpose", keys, perm=[0, 1, 2, 4, 3]))
    weights = op("Softmax", op("Add", scores, bias), axis=-1)
    shape = [0, heads, -1, config.value_head_dim]
    output = op("Reshape", op("MatMul", weights, values), shape)
    return merge_heads(g, op("Slice", output, [0], length, [2]))


def neighbors(g: GraphContext, states: Value, block: int, width: int) -> Value:
    """Return the states of each block with those of the blocks before and after it, (B, H, blocks,
    3 * block, width).

    `states` are (B, H, T, width).
    """
    op = g.op
    after = op("Add", missing(g, op.size(states, 2), block), block)
    padded = op("Pad", states, op.shape(0, 0, block, 0, 0, 0, after, 0))
    blocks = op("Reshape", padded, [0, 0, -1, block, width])
    ends = (0, -2), (1, -1), (2, np.iinfo(np.int64).max)
    parts = [op("Slice", blocks, [start], [end], [2]) for start, end in ends]
    return op("Concat", *parts, axis=3)


def missing(g: GraphContext, length: Value, block: int) -> Value:
    """Return by how many tokens `length` is less than a multiple of `block`."""
    return g.op("Mod", g.op("Neg", length), block)
