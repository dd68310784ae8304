"""Attention over a whole sequence as one standard operator, `Attention` of opset 23, for keys and values of any width."""

from onnx_ir import Value

from .attention import project, scale
from .context import GraphContext
from .layers import Attention
from .positions import bidirectional_bias


def encoder_attention(
    g: GraphContext, prefix: str, ids: Value | None, positions: Value | None, mask: Value | None
) -> Attention:
    """Write the attention of an encoder; images have no ids, positions and mask.

    The bias has a row for each query, since onnxruntime's CPU kernel repeats none.
    """
    bias = None
    if ids is not None and mask is not None:
        queries = g.op.shape(1, 1, g.op.size(ids, 1), 1)
        bias = g.op("Expand", bidirectional_bias(g, prefix, ids, mask), queries)
    return lambda layer, name, x: attend(g, *project(g, name, x, positions), bias)


def attend(g: GraphContext, query: Value, keys: Value, values: Value, bias: Value | None) -> Value:
    """Write equation 1 for heads side by side, (B, T, H * d), with `bias` (B, H or 1, T, S) added to the scores."""
    heads = g.config.num_attention_heads
    return g.op("Attention", query, keys, values, bias, q_num_heads=heads, kv_num_heads=heads, scale=scale(g))
