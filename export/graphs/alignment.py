"""Cross-attention of the heads that align words, for all tokens of a target at once."""

from collections.abc import Callable

from onnx_ir import Value

from .attention import attention_weights, causal_attention, source_query, weighted_values
from .context import Attention, GraphContext, Pairs, Values
from .layers import decoder_states
from .positions import cast_to_float32, source_bias, token_positions

# writes self-attention, as `causal_attention`
TargetAttention = Callable[[GraphContext, Value, Value, None], Attention]


def cross_attentions(
    g: GraphContext,
    inputs: Values,
    states: Pairs,
    attention: TargetAttention = causal_attention,
) -> list[Value]:
    """Return [weights (B, heads, T, S)] of the heads in `g.alignment`, written as nodes of the
    graph.

    The decoder reads `decoder_input_ids` in `inputs`, with the self-attention that `attention`
    writes. `states` are keys and values (B, H, S, d) of the source for each layer.
    """
    ids = inputs["decoder_input_ids"]
    positions = token_positions(g, ids, None)
    self_attn = attention(g, ids, positions, None)
    bias = source_bias(g, inputs["encoder_attention_mask"])
    weights: dict[int, Value] = {}

    def attend(layer: int, name: str, x: Value) -> Value:
        keys, values = states[layer]
        weights[layer] = attention_weights(g, source_query(g, name, x), keys, bias)
        return weighted_values(g, weights[layer], values)

    # What only later layers and the last states need is removed with all unused nodes.
    decoder_states(g, ids, positions, self_attn, attend)
    rows = [g.op("Gather", weights[head.layer], [head.head], axis=1) for head in g.alignment]
    return [cast_to_float32(g, g.op("Concat", *rows, axis=1))]
