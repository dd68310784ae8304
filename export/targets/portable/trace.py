"""The portable target: the modeling code traced into standard operators, with caches that grow."""

from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from ..sequence_modules import SequenceGraph, sequence_module


class DecoderGraph(nn.Module):
    """Tokens, mask, positions and a flat list of past keys and values in; logits and the present ones out."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, position_ids, *past):
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        outputs = self.model(input_ids, attention_mask, position_ids, past_key_values=cache, use_cache=True)
        return outputs.logits, *(states for layer in cache.layers for states in (layer.keys, layer.values))


class Seq2SeqDecoderGraph(nn.Module):
    """As `DecoderGraph`, with the encoder's output; each layer's past is the decoder's pair, then the encoder's."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids, encoder_attention_mask, encoder_hidden_states, *past):
        own = DynamicCache(list(zip(past[::4], past[1::4])))
        cross = DynamicCache(list(zip(past[2::4], past[3::4])))
        cache = EncoderDecoderCache(own, cross)
        # Not updated yet, so that attention appends what it projects; that is nothing once the past covers the source.
        cache.is_updated = dict.fromkeys(range(len(own.layers)), False)
        outputs = self.model.model.decoder(
            input_ids,
            past_key_values=cache,
            encoder_hidden_states=encoder_hidden_states[:, past[2].shape[2] :],
            encoder_attention_mask=encoder_attention_mask[:, None, None, :].bool(),
            use_cache=True,
        )
        pairs = ((layer.keys, layer.values) for both in zip(own.layers, cross.layers) for layer in both)
        return self.model.lm_head(outputs.last_hidden_state), *(states for pair in pairs for states in pair)


def trace_module(model: PreTrainedModel, role: str) -> nn.Module:
    if not model.can_generate():
        return sequence_module(model)
    if not model.config.is_encoder_decoder:
        return DecoderGraph(model)
    return SequenceGraph(model.get_encoder()) if role == "encoder" else Seq2SeqDecoderGraph(model)
