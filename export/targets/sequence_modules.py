"""The modeling code as graphs of whole sequences in standard operators, for every target. Padding may be on either side."""

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from .windows import attend_in_blocks, has_windows

if TYPE_CHECKING:
    from vanilla_transformer import VanillaDecoderForSequenceClassification


class SequenceGraph(nn.Module):
    """Tokens, their mask and their types in, all outputs of `model` out."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        if has_windows(model):
            attend_in_blocks(model)

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        return self.model(input_ids, attention_mask, token_type_ids).to_tuple()


class ImageGraph(nn.Module):
    """Images in, all outputs of `model` out."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, pixel_values):
        return self.model(pixel_values).to_tuple()


class DecoderSequenceGraph(nn.Module):
    """Whole sequences and their mask in, what a decoder without cache makes of them out. Padding may be on either side."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        position_ids = positions(self.model, attention_mask)
        return self.model(input_ids, attention_mask, position_ids, use_cache=False).to_tuple()


class DecoderLabelGraph(DecoderSequenceGraph):
    """As `DecoderSequenceGraph`, with the logits of each row's last token that is not padding out."""

    model: "VanillaDecoderForSequenceClassification"

    def forward(self, input_ids, attention_mask):
        position_ids = positions(self.model, attention_mask)
        states = self.model.model(input_ids, attention_mask, position_ids, use_cache=False).last_hidden_state
        last = self.model.last_real_token(states, input_ids, attention_mask)
        rows = torch.arange(states.shape[0], device=last.device)  # the model's `len(last)` is a constant to tracing
        # With an axis of tokens: the exporter makes a `Gemm` of a product of matrices, which has no int8 twin.
        return self.model.score(states[rows, last][:, None])[:, 0]


class Seq2SeqStatesGraph(nn.Module):
    """Both sequences and their masks in, the decoder's states and the encoder's out."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask):
        position_ids = positions(self.model, decoder_attention_mask)
        decoder = (decoder_input_ids, decoder_attention_mask, position_ids)
        outputs = self.model(input_ids, attention_mask, *decoder, use_cache=False)
        return outputs.last_hidden_state, outputs.encoder_last_hidden_state


class Seq2SeqHeadGraph(nn.Module):
    """Sequences and their mask in, the logits of a head that reads them with both stacks out."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        outputs = self.model(input_ids, attention_mask)
        return tuple(values for name, values in outputs.items() if name.endswith("logits"))


def positions(model: PreTrainedModel, mask: torch.Tensor) -> torch.Tensor | None:
    """(B, T), counted from the first token of each row that is not padding, for a decoder that would count places; `None` for
    others."""
    return (mask.cumsum(1) - 1).clamp(min=0) if model.config.position_ids_from == "place" else None


# What is no `SequenceGraph`.
MODULES = {
    "VanillaVisionModel": ImageGraph,
    "VanillaVisionForImageClassification": ImageGraph,
    "VanillaDecoderModel": DecoderSequenceGraph,
    "VanillaDecoderForSequenceClassification": DecoderLabelGraph,
    "VanillaDecoderForTokenClassification": DecoderSequenceGraph,
    "VanillaDecoderForQuestionAnswering": DecoderSequenceGraph,
    "VanillaSeq2SeqModel": Seq2SeqStatesGraph,
    "VanillaSeq2SeqForSequenceClassification": Seq2SeqHeadGraph,
    "VanillaSeq2SeqForQuestionAnswering": Seq2SeqHeadGraph,
}


def sequence_module(model: PreTrainedModel) -> nn.Module:
    return MODULES.get(type(model).__name__, SequenceGraph)(model)
