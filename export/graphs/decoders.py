"""What the decoders of several targets share."""

from onnx_ir import Value

from .attention import source_heads
from .context import GraphContext, Pairs, Values
from .layers import Attention, embed, stack
from .sequences import EncoderAttention, encoder_states


def caches(inputs: Values, part: str = "") -> Pairs:
    """Return the past keys and values of each layer, of one attention of a seq2seq model."""
    past = [value for name, value in inputs.items() if name.startswith("past_key_values") and part in name]
    return list(zip(past[::2], past[1::2], strict=True))


def flat(pairs: Pairs) -> list[Value]:
    """Return keys and values of all layers in one list, as specs have them."""
    return [value for pair in pairs for value in pair]


def seq2seq_states(g: GraphContext, ids: Value, positions: Value, self_attn: Attention, cross_attn: Attention) -> Value:
    """Write the decoder of a seq2seq model: (B, T) -> (B, T, D)."""
    x = embed(g, "model.decoder.", ids, positions)
    return stack(g, "model.decoder.", g.config.decoder_layers, x, {"self_attn": self_attn, "cross_attn": cross_attn})


def source_encoder(g: GraphContext, inputs: Values, attention: EncoderAttention) -> list[Value]:
    """Write the encoder of a seq2seq model, and the keys and values that all layers of its decoder read."""
    states = encoder_states(g, "model.encoder.", g.config.encoder_layers, inputs, attention)
    return flat(source_heads(g, "model.decoder.", states))
