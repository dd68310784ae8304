"""The portable target: the modeling code traced into standard operators, with caches that grow."""

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel


class EncoderGraph(nn.Module):
    """Tokens, their mask and their types in, all outputs of `model` out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        return self.model(input_ids, attention_mask, token_type_ids).to_tuple()


class DecoderGraph(nn.Module):
    """Tokens, mask, positions and a flat list of past keys and values in; logits and the present ones out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, position_ids, *past):
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        outputs = self.model(input_ids, attention_mask, position_ids, past_key_values=cache, use_cache=True)
        return outputs.logits, *(states for layer in cache.layers for states in (layer.keys, layer.values))


class Seq2SeqDecoderGraph(nn.Module):
    """As `DecoderGraph`, with the encoder's output; each layer's past is the decoder's pair, then the encoder's."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, encoder_attention_mask, encoder_hidden_states, *past):
        own, cross = DynamicCache(list(zip(past[::4], past[1::4]))), DynamicCache(list(zip(past[2::4], past[3::4])))
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


class DecoderReadsGraph(nn.Module):
    """Whole sequences and their mask in, what a decoder without cache makes of them out. Padding may be on either side."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        given = positions(self.model, attention_mask)
        return self.model(input_ids, attention_mask, given, use_cache=False).to_tuple()


class DecoderLabelsGraph(DecoderReadsGraph):
    """As `DecoderReadsGraph`, with the logits of each row's last real token out."""

    def forward(self, input_ids, attention_mask):
        given = positions(self.model, attention_mask)
        states = self.model.model(input_ids, attention_mask, given, use_cache=False).last_hidden_state
        last = self.model.last_real_token(states, input_ids, attention_mask)
        rows = torch.arange(states.shape[0], device=last.device)  # the model's `len(last)` is a constant to tracing
        # With an axis of tokens: the exporter makes a `Gemm` of a product of matrices, which has no int8 twin.
        return self.model.score(states[rows, last][:, None])[:, 0]


class Seq2SeqStatesGraph(nn.Module):
    """Both sequences and their masks in, the decoder's states and the encoder's out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask):
        decoder = decoder_input_ids, decoder_attention_mask, positions(self.model, decoder_attention_mask)
        outputs = self.model(input_ids, attention_mask, *decoder, use_cache=False)
        return outputs.last_hidden_state, outputs.encoder_last_hidden_state


class Seq2SeqHeadGraph(nn.Module):
    """Sequences and their mask in, the logits of a head that reads them with both stacks out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        outputs = self.model(input_ids, attention_mask)
        return tuple(values for name, values in outputs.items() if name.endswith("logits"))


def positions(model, mask):
    """(B, T), counted from the first real token of each row, for a decoder that would count places; `None` for others."""
    return (mask.cumsum(1) - 1).clamp(min=0) if model.config.position_ids_from == "place" else None


def graph_module(model: PreTrainedModel, role: str) -> nn.Module:
    if not model.can_generate():
        return READERS.get(type(model).__name__, EncoderGraph)(model)
    if not model.config.is_encoder_decoder:
        return DecoderGraph(model)
    return EncoderGraph(model.get_encoder()) if role == "encoder" else Seq2SeqDecoderGraph(model)


READERS = {
    "VanillaDecoderModel": DecoderReadsGraph,
    "VanillaDecoderForSequenceClassification": DecoderLabelsGraph,
    "VanillaDecoderForTokenClassification": DecoderReadsGraph,
    "VanillaDecoderForQuestionAnswering": DecoderReadsGraph,
    "VanillaSeq2SeqModel": Seq2SeqStatesGraph,
    "VanillaSeq2SeqForSequenceClassification": Seq2SeqHeadGraph,
    "VanillaSeq2SeqForQuestionAnswering": Seq2SeqHeadGraph,
}
