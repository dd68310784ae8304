"""Embeddings, sublayers and stacks: Figure 1 of the paper. States are (B, T, D)."""

import math
from functools import partial

import numpy as np
from onnx_ir import Value

from .activations import activation
from .context import Attention, Dialect, GraphContext
from .positions import LOWEST, rotate, sinusoids

# of the sublayers, in order
LAST_MAPS = {"self_attn": "o_proj", "cross_attn": "o_proj", "feed_forward": "down_proj"}
LM_HEAD = "lm_head"


def embed(
    g: GraphContext, prefix: str, ids: Value, positions: Value, types: Value | None = None
) -> Value:
    """Return the embeddings of the stack `prefix`, sections 3.4 and 3.5, written as nodes: (B, T)
    -> (B, T, D).

    `prefix` is such as "model.encoder.". `ids` and token `types` are (B, T); without `types`, no
    embeddings of types are added. `positions` (B or 1, T) count from 0: the row for padding that
    some learned tables begin with is added here.
    """
    op, config = g.op, g.config
    name = f"{prefix}embeddings"
    x = g.target.precision.look_up(g, f"{name}.embed_tokens.weight", ids)
    if config.scale_embedding:
        x = op("Mul", x, math.sqrt(config.embedding_size))
    if not config.embedding_norm:
        x = project(g, x, f"{name}.projection")
    if config.position_embedding_type == "sinusoidal":
        x = op("Add", x, sinusoids(g, positions))
    elif config.has_learned_positions:
        # A table has a first row for padding, which is at -1, where padding is not counted.
        rows = positions if config.position_ids_from == "place" else op("Add", positions, 1)
        x = op("Add", x, op("Gather", g.weight(f"{name}.embed_positions.weight"), rows))
    if types is not None:
        x = op("Add", x, op("Gather", g.weight(f"{name}.embed_token_types.weight"), types))
    return (
        project(g, norm(g, x, f"{name}.norm"), f"{name}.projection") if config.embedding_norm else x
    )


def decoder_states(g: GraphContext, ids: Value, positions: Value, *attentions: Attention) -> Value:
    """Return the states (B, T, D) of a decoder for `ids` (B, T) at `positions` (B or 1, T), written
    as nodes of the graph.

    `attentions` are the functions for self-attention and, in a seq2seq model, cross-attention.
    """
    prefix = g.config.decoder_prefix
    return stack(g, prefix, embed(g, prefix, ids, positions), *attentions)


def stack(g: GraphContext, prefix: str, x: Value, *attentions: Attention) -> Value:
    """Return the states of the stack `prefix` for its embeddings x (B, T, D), written as nodes of
    the graph.

    These are its layers, its last norm, and a decoder's projection to the width of its embeddings.
    A layer has one sublayer for each of `attentions`, to the sequence itself and to a source, then
    the feed-forward network. Post-norm is norm(x + sublayer(x)), pre-norm x + sublayer(norm(x)),
    where with `sandwich_norm` another norm of the sublayer's output comes before the sum.
    """
    config = g.config
    sublayers: dict[str, Attention] = {
        **dict(zip(LAST_MAPS, attentions)),
        "feed_forward": partial(feed_forward, g),
    }
    parts = [(layer, part) for layer in range(config.depth(prefix)) for part in sublayers]
    names = [f"{prefix}layers.{layer}.{part}" for layer, part in parts]
    norms: list[str | None] = [f"{name}_norm" for name in names]
    final = f"{prefix}norm" if config.final_norm else None
    normed = x
    if config.norm_first:
        skips = getattr(config, "skip_first_prenorm", False)
        normed, norms = x if skips else norm(g, x, str(norms[0])), [*norms[1:], final]
    for (layer, part), name, after in zip(parts, names, norms):
        inner = sublayers[part](layer, name, normed)
        total, normed = g.target.dialect.add_and_norm(
            g, x, inner, f"{name}.{LAST_MAPS[part]}", after
        )
        x = total if config.norm_first else normed
    states = normed if config.norm_first or final is None else norm(g, normed, final)
    return project(g, states, f"{prefix}output_projection")


def feed_forward(g: GraphContext, layer: int, name: str, x: Value) -> Value:
    """Return act(x W_1 + b_1), the input of the last linear map of equation 2, written as nodes of
    the graph.

    If the config is `gated`, it is act(x W_g) * x W_1 (Shazeer 2020). `act` is the config's
    `hidden_act`; in the paper it is ReLU. `name` is the module, such as
    "layers.0.feed_forward". The number of the layer is not used.
    """
    dialect, act = g.target.dialect, g.config.hidden_act
    if not g.config.gated:
        return dialect.activated_linear(g, x, f"{name}.up_proj", act)
    gate, inner = dialect.linears(g, x, f"{name}.gate_proj", f"{name}.up_proj")
    return g.op("Mul", activation(g, gate, act, f"{name}.activation"), inner)


# ---------------------------------------------------------------------------- linear maps and norms


def linear(g: GraphContext, x: Value, *names: str) -> Value:
    """Return x W + b with the columns of all linear maps `names` side by side, written as nodes of
    the graph.

    Either all of them have biases or none.
    """
    bias = g.bias(names[0])
    if len(names) > 1 and bias is not None:
        [bias] = g.transform_weights([f"{name}.bias" for name in names], concatenated)
    return g.target.precision.matmul(g, x, names, bias)


def project(g: GraphContext, x: Value, name: str) -> Value:
    """Return x after the linear map `name` between embeddings and states of different widths.

    Models of one width lack this map; x is then returned unchanged.
    """
    return linear(g, x, name) if g.has(f"{name}.weight") else x


def row_linear(g: GraphContext, x: Value, name: str) -> Value:
    """Return x W + b (B, N) of the linear map `name` for x (B, D), one state of each row.

    This is so little work that it stays in floating point.
    """
    return g.op("Gemm", x, g.weight(f"{name}.weight"), g.bias(name), transB=1)


def pool(g: GraphContext, states: Value) -> Value:
    """Return one state for each row, (B, D): the first token's of `states` (B, S, D), after the
    pooler if there is one (Devlin et al. 2019)."""
    first = g.op("Gather", states, 0, axis=1)
    if not g.config.pooler_act:
        return first
    name = f"{g.config.prefix}pooler"
    return activation(
        g, row_linear(g, first, f"{name}.dense"), g.config.pooler_act, f"{name}.activation"
    )


def linears(g: GraphContext, x: Value, *names: str) -> list[Value]:
    """Return x W + b of each of the linear maps `names`, in order, written as nodes of the
    graph."""
    # `precisions.calibrated_steps` chooses one scale of x for all of them
    g.op.once(("readers", x), lambda: names)
    return [linear(g, x, name) for name in names]


def activated_linear(g: GraphContext, x: Value, name: str, act: str) -> Value:
    """Return the activation `act` of the linear map `name` of x, written as nodes of the graph.

    If the activation has weights, they are in the module `activation` beside the map.
    """
    return activation(g, linear(g, x, name), act, f"{name.rpartition('.')[0]}.activation")


def add_and_norm(
    g: GraphContext, x: Value, inner: Value, last: str, after: str | None
) -> tuple[Value, Value]:
    """Return x + the linear map `last` of `inner`, and that sum after the norm `after`.

    This ends a sublayer. If `after` is None, the sum is returned twice.
    """
    output = linear(g, inner, last)
    if has_output_norm(g, last):
        output = norm(g, output, output_norm(last))
    total = g.op("Add", x, output)
    return total, total if after is None else norm(g, total, after)


def has_output_norm(g: GraphContext, last: str) -> bool:
    """Return True if a norm follows the linear map `last` of a sublayer, as in `sandwich_norm`."""
    return g.has(f"{output_norm(last)}.weight")


def output_norm(last: str) -> str:
    return f"{last.rpartition('.')[0]}_output_norm"


def norm(g: GraphContext, x: Value, name: str) -> Value:
    """Return x after the norm `name`, LayerNorm (Ba et al. 2016) or RMSNorm, written as nodes of
    the graph."""
    epsilon, weight = g.config.layer_norm_eps, g.weight(f"{name}.weight")
    if g.config.norm_type == "rms_norm":
        return g.target.dialect.rms_norm(g, x, weight, epsilon)
    return g.op("LayerNormalization", x, weight, g.weight(f"{name}.bias"), axis=-1, epsilon=epsilon)


def rms_norm(g: GraphContext, x: Value, weight: Value, epsilon: float) -> Value:
    """Return x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019), written as nodes of
    the graph."""
    op = g.op
    mean = op("ReduceMean", op("Mul", x, x), [-1], keepdims=1)
    return op("Mul", op("Div", x, op("Sqrt", op("Add", mean, epsilon))), weight)


def fused_rms_norm(g: GraphContext, x: Value, weight: Value, epsilon: float) -> Value:
    """Return x / sqrt(mean(x^2) + epsilon) * weight, written as one of onnxruntime's operators."""
    return g.op("SimplifiedLayerNormalization", x, weight, epsilon=epsilon)


def last_index(g: GraphContext, indices: Value) -> Value:
    """Return the position of the largest number in each row of `indices` (B, T), (B,).

    `indices` has i or 0 at each position i, so this is also the largest number.
    """
    return g.op("ArgMax", indices, axis=1, keepdims=0)


STANDARD = Dialect(rms_norm, linears, activated_linear, add_and_norm, rotate, last_index, LOWEST)


# ------------------------------------------------------------------------------------------- logits


def logits(g: GraphContext, x: Value) -> Value:
    """Return the logits of the vocabulary for states x, (..., D) -> (..., V), written as nodes of
    the graph.

    Tokens outside the shortlist get minus infinity.
    """
    computed = linear(g, x, LM_HEAD)
    if g.shortlist is None:
        return computed
    columns = np.full(g.config.vocab_size, len(g.shortlist))
    columns[g.shortlist] = np.arange(len(g.shortlist))
    padded = g.op("Pad", computed, [0, 1], g.op.dtype.type(-np.inf), [-1])
    return g.op("Gather", padded, columns, axis=-1)


def concatenated(*vectors: np.ndarray) -> tuple[np.ndarray]:
    return (np.concatenate(vectors),)
