"""Attention in standard operators, equation 1: softmax(Q K^T / sqrt(d_k)) V.

| function | keys and values | used by |
|---|---|---|
| `self_attention` | of the same sequence | whole sequences, images |
| `growing_attention` | of a cache, with the new ones appended | portable decoders |
| `source_attention` | of the encoder's output | cross-attention |
| `slot_attention` | of a cache with slots | decoders on cuda |

Each function returns what `layers.stack` calls in its layers. Those of encoders are in
`encoder_attention`. A product writes equation 1: in several operators or, with `fused_product`, in
one. Masks and biases come from `positions`. Queries, keys and values of heads are (B, H, T, d),
others (B, T, H * d).
"""

from collections.abc import Callable

import numpy as np
from onnx_ir import Value

from .context import Attention, Caches, GraphContext, Pair, Pairs, Values
from .layers import linear, norm
from .positions import causal_biases

# queries (B, T, H * d_k), keys, values and the bias of the scores -> (B, T, H * d_v)
Product = Callable[[GraphContext, Value, Value, Value, Value | None], Value]
# the module, x and positions -> queries, keys and values
Project = Callable[[GraphContext, str, Value, Value | None], tuple[Value, Value, Value]]


# --------------------------------------------------------------------------- heads and their scores


def project(
    g: GraphContext, name: str, x: Value, positions: Value | None
) -> tuple[Value, Value, Value]:
    """Return queries (B, T, H * d), keys and values (B, T, key heads * d) of the self-attention
    module `name` for x.

    Queries and keys are normed, if the config has `use_qk_norm`, and turned by `positions`, if
    positions are rotary.
    """
    query, key, value = g.target.dialect.linears(g, x, *(f"{name}.{part}_proj" for part in "qkv"))
    query, key = query_norm(g, name, query), key_norm(g, name, key)
    if positions is not None and g.config.has_rotary_positions:
        rotate, kind = g.target.dialect.rotate, g.config.layer_type(name)
        query = rotate(g, query, g.config.num_attention_heads, positions, kind)
        key = rotate(g, key, g.config.num_key_value_heads, positions, kind)
    return query, key, value


def query_norm(g: GraphContext, name: str, states: Value) -> Value:
    return head_norm(g, f"{name}.q_norm", states, g.config.num_attention_heads)


def key_norm(g: GraphContext, name: str, states: Value) -> Value:
    return head_norm(g, f"{name}.k_norm", states, g.config.num_key_value_heads)


def head_norm(g: GraphContext, name: str, states: Value, heads: int) -> Value:
    """Return queries or keys, `states` (B, T, heads * d), with each head after the norm `name`.

    Models without such norms have no weights of this name; `states` are then returned unchanged.
    """
    if not g.has(f"{name}.weight"):
        return states
    width = g.config.head_dim
    split = g.op("Reshape", states, [0, 0, heads, width])
    return g.op("Reshape", norm(g, split, name), [0, 0, heads * width])


def source_query(g: GraphContext, name: str, x: Value) -> Value:
    """Return the queries (B, T, H * d) of the cross-attention module `name` for x."""
    return query_norm(g, name, linear(g, x, f"{name}.q_proj"))


def split_heads(g: GraphContext, states: Value, heads: int, width: int) -> Value:
    shaped = g.op("Reshape", states, [0, 0, heads, width])
    return g.op("Transpose", shaped, perm=[0, 2, 1, 3])


def split_queries(g: GraphContext, states: Value) -> Value:
    return split_heads(g, states, g.config.num_attention_heads, g.config.head_dim)


def split_keys(g: GraphContext, states: Value) -> Value:
    return split_heads(g, states, g.config.num_key_value_heads, g.config.head_dim)


def split_values(g: GraphContext, states: Value) -> Value:
    return split_heads(g, states, g.config.num_key_value_heads, g.config.value_head_dim)


def key_value_heads(g: GraphContext, keys: Value, values: Value) -> Pair:
    """Return keys and values (B, key heads, S, d) of (B, S, key heads * d)."""
    return split_keys(g, keys), split_values(g, values)


def regroup(g: GraphContext, states: Value, heads: int) -> Value:
    """Return `states` (B, H, T, n) of queries as (B, heads, H * T / heads, n).

    With `heads` of keys, the queries that share a key are rows of one matrix, and no key is
    copied. Without groups `states` are returned unchanged.
    """
    if g.config.num_key_value_groups == 1:
        return states
    return g.op("Reshape", states, [0, heads, -1, 0])


def repeat_heads(g: GraphContext, states: Value, width: int) -> Value:
    """Return keys or values (B, S, key heads * width) as (B, S, H * width), for operators without
    groups.

    Each head is repeated for the queries that share it. Without groups `states` are returned
    unchanged.
    """
    heads, config = g.config.num_attention_heads, g.config
    if config.num_key_value_groups == 1:
        return states
    split = g.op("Reshape", states, [0, 0, config.num_key_value_heads, width])
    repeated = g.op("Gather", split, np.arange(heads) // config.num_key_value_groups, axis=2)
    return g.op("Reshape", repeated, [0, 0, heads * width])


def source_states(g: GraphContext, source: Value) -> Pairs:
    """Return the keys and values (B, S, key heads * d) of a source (B, S, D) for each layer of the
    decoder."""
    modules = [
        f"{g.config.decoder_prefix}layers.{layer}.cross_attn"
        for layer in range(g.config.decoder_layers)
    ]
    names = [f"{module}.{part}_proj" for module in modules for part in "kv"]
    states = g.target.dialect.linears(g, source, *names)
    keys = [key_norm(g, module, key) for module, key in zip(modules, states[::2])]
    return list(zip(keys, states[1::2]))


def source_heads(g: GraphContext, source: Value) -> Pairs:
    """Return the keys and values (B, key heads, S, d) of a source (B, S, D) for each layer of the
    decoder."""
    return [key_value_heads(g, *states) for states in source_states(g, source)]


def scaled_dot_product(
    g: GraphContext, query: Value, keys: Value, values: Value, bias: Value | None
) -> Value:
    """Return equation 1 of "Attention Is All You Need", written as nodes of the graph.

    query (B, T, H * d_k), keys (B, key heads, S, d_k), values (B, key heads, S, d_v) -> (B, T, H *
    d_v). `bias` is added to the scores.
    """
    return weighted_values(g, attention_weights(g, query, keys, bias), values)


def dense_product(
    g: GraphContext, query: Value, keys: Value, values: Value, bias: Value | None
) -> Value:
    """Return what `scaled_dot_product` returns, for keys and values (B, S, key heads * d)."""
    return scaled_dot_product(g, query, *key_value_heads(g, keys, values), bias)


def attention_weights(g: GraphContext, query: Value, keys: Value, bias: Value | None) -> Value:
    """Return the softmax of equation 1, (B, H, T, S), for query (B, T, H * d_k) and keys (B, key
    heads, S, d_k).

    `bias` is added to the scores.
    """
    op, heads, key_heads = g.op, g.config.num_attention_heads, g.config.num_key_value_heads
    queries = regroup(g, op("Mul", split_queries(g, query), scale(g)), key_heads)
    scores = op("MatMul", queries, op("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = regroup(g, scores, heads)
    return op("Softmax", scores if bias is None else op("Add", scores, bias), axis=-1)


def weighted_values(g: GraphContext, weights: Value, values: Value) -> Value:
    """Return the sums (B, T, H * d_v) of `values` (B, key heads, S, d_v) by `weights` (B, H, T,
    S)."""
    heads, key_heads = g.config.num_attention_heads, g.config.num_key_value_heads
    sums = g.op("MatMul", regroup(g, weights, key_heads), values)
    return merge_heads(g, regroup(g, sums, heads))


def fused_product(
    g: GraphContext, query: Value, keys: Value, values: Value, bias: Value | None
) -> Value:
    """Return what `scaled_dot_product` returns, by the one operator `Attention` of opset 23.

    Queries are (B, T, H * d_k), keys (B, S, key heads * d_k) and values (B, S, key heads * d_v).
    `bias` (B, 1 or H, T, S) has a row for each query, see `for_each_query`. It is added to the
    scores, or tells by booleans which keys each query reads.
    """
    heads, key_heads = g.config.num_attention_heads, g.config.num_key_value_heads
    attributes = {"q_num_heads": heads, "kv_num_heads": key_heads, "scale": scale(g)}
    return g.op("Attention", query, keys, values, bias, **attributes)


def for_each_query(g: GraphContext, bias: Value, queries: Value) -> Value:
    """Return `bias` (B, 1 or H, 1, S) as (B, 1 or H, queries, S), since onnxruntime's kernels of
    `Attention` repeat no row. `queries` is their number, (1,)."""
    return g.op("Expand", bias, g.op.shape(1, 1, queries, 1))


def scale(g: GraphContext) -> float:
    """Return 1 / sqrt(d_k), by which attention scores are multiplied."""
    return g.config.head_dim**-0.5


def merge_heads(g: GraphContext, output: Value) -> Value:
    """Return `output` (B, H, T, d_v) as (B, T, H * d_v), the heads side by side."""
    width = g.config.num_attention_heads * g.config.value_head_dim
    return g.op("Reshape", g.op("Transpose", output, perm=[0, 2, 1, 3]), [0, 0, width])


# ------------------------------------------------------------------------------ attention of layers


def self_attention(
    g: GraphContext,
    positions: Value | None,
    bias: Value | None,
    product: Product,
    project: Project = project,
) -> Attention:
    """Return the function that writes attention over a whole sequence, for `layers.stack` to call
    in each layer.

    `positions` (B or 1, T) are for rotary embeddings, None for images. `bias` (B or 1, H or 1, T,
    S) is added to the scores. `project` writes queries, keys and values, `product` the rest.
    """
    return lambda layer, name, x: product(g, *project(g, name, x, positions), bias)


def causal_attention(
    g: GraphContext,
    ids: Value,
    positions: Value,
    mask: Value | None,
    product: Product = dense_product,
    project: Project = project,
) -> Attention:
    """Return the function that writes a decoder's attention over a whole sequence, for
    `layers.stack` to call.

    `positions` (B or 1, T) of the `ids` (B, T) are for rotary embeddings. `mask` (B, T) is 0 for
    padding, None without any. `project` writes queries, keys and values, `product` the rest.
    """
    biases = causal_biases(g, ids, mask)
    return by_layer_type(
        g,
        g.config.decoder_prefix,
        lambda kind: self_attention(g, positions, biases[kind], product, project),
    )


def by_layer_type(g: GraphContext, prefix: str, write: Callable[[str], Attention]) -> Attention:
    """Return the function that writes the attention of each layer by the type of the layer.

    `write` returns the function of a type, such as "full_attention". It is called once for each
    type of the stack `prefix`.
    """
    attentions = {kind: write(kind) for kind in g.config.types_of_stack(prefix)}
    return lambda layer, name, x: attentions[g.config.layer_type(name)](layer, name, x)


def growing_attention(
    g: GraphContext, ids: Value, positions: Value, mask: Value | None, caches: Caches
) -> Attention:
    """Return the function that writes attention over caches and the new tokens, for `layers.stack`
    to call.

    It appends the new keys and values to those in `caches.past`, and the results to
    `caches.present`. `positions` of the new tokens `ids` (B, T) are for rotary embeddings. `mask`
    (B, S + T) is 0 for padding, None without any.
    """
    biases = causal_biases(g, ids, mask, g.op.size(caches.past[0][0], 2))

    def attend(layer: int, name: str, x: Value) -> Value:
        query, *new = project(g, name, x, positions)
        states = append_keys(g, caches.past[layer], key_value_heads(g, *new))
        caches.present.append(states)
        return scaled_dot_product(g, query, *states, biases[g.config.layer_type(name)])

    return attend


def append_keys(g: GraphContext, past: Pair, new: Pair) -> Pair:
    """Return keys and values (B, H, S + T, d): those of `past`, (B, H, S, d), then the `new` ones,
    (B, H, T, d)."""
    keys, values = (g.op("Concat", *parts, axis=2) for parts in zip(past, new))
    return keys, values


def source_attention(
    g: GraphContext, states: Pairs, bias: Value | None, product: Product = scaled_dot_product
) -> Attention:
    """Return the function that writes cross-attention to a source, for `layers.stack` to call.

    `states` are keys and values of the source for each layer, in the shape that `product` reads:
    (B, H, S, d) by default, see `source_heads`. `bias`, such as `source_bias`, is added to the
    scores.
    """
    return lambda layer, name, x: product(g, source_query(g, name, x), *states[layer], bias)


def slot_attention(g: GraphContext, inputs: Values, bias: Value, caches: Caches) -> Attention:
    """Return the function that writes attention over caches with slots, for `layers.stack` to call.

    New keys and values are put into the slots of `caches.past` from the input `first_slot` on, and
    the results are appended to `caches.present`. `bias` (B, 1 or H, T, slots) hides the slots that
    a token does not read.
    """

    def attend(layer: int, name: str, x: Value) -> Value:
        query, key, value = project(g, name, x, inputs["position_ids"])
        keys, values = (
            g.op("TensorScatter", past, new, inputs["first_slot"], axis=-2)
            for past, new in zip(caches.past[layer], (key, value))
        )
        caches.present.append((keys, values))
        return fused_product(g, query, keys, values, bias)

    return attend
