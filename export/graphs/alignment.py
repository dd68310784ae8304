"""Cross-attention of the heads that align words, for all tokens of a target at once."""

from onnx_ir import Value

from .attention import attention_weights, source_query, weighted_values
from .context import GraphContext, Pairs, Values
from .layers import Attention, decoder_states


def cross_attentions(
    g: GraphContext,
    inputs: Values,
    positions: Value,
    self_attn: Attention,
    states: Pairs,
    bias: Value,
) -> list[Value]:
    """Return [weights (B, heads, T, S)] of the heads in `g.alignment`, written as nodes of the
    graph.

    The decoder reads the tokens `decoder_input_ids` in `inputs` at `positions` (B or 1, T).
    `self_attn` is its self-attention, `states` are keys and values (B, H, S, d) of the source for
    each layer, and `bias` is that of the source.
    """
    weights: dict[int, Value] = {}

    def attend(layer: int, name: str, x: Value) -> Value:
        keys, values = states[layer]
        weights[layer] = attention_weights(g, source_query(g, name, x), keys, bias)
        return weighted_values(g, weights[layer], values)

    # What only later layers and the last states need is removed with all unused nodes.
    decoder_states(g, inputs["decoder_input_ids"], positions, self_attn, attend)
    rows = [g.op("Gather", weights[head.layer], [head.head], axis=1) for head in g.alignment]
    return [g.op("Concat", *rows, axis=1)]
