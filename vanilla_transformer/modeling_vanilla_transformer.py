"""The heads on the stacks of `layers_vanilla_transformer.py`, in reading order.

    (encoder, decoder, encoder-decoder, images) -> language models -> other heads

Shapes: B batch, T target length, S source length, D hidden_size, E embedding_size, V vocab_size.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithCrossAttentions,
    ImageClassifierOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
    SequenceClassifierOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple

from .configuration_vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaEncoderConfig,
    VanillaSeq2SeqConfig,
    VanillaVisionConfig,
)
from .layers_vanilla_transformer import (
    VanillaDecoderModel,
    VanillaEncoderModel,
    VanillaPooler,
    VanillaPreTrainedModel,
    VanillaSeq2SeqModel,
    VanillaVisionModel,
    has_values,
    masks_by_type,
    new_norm,
    new_projection,
)

# This module is the address of every model class, in checkpoints and in pickles. transformers
# copies the code that a class's module imports, so a stack at this address is saved with its heads
# beside it.
_stacks = (VanillaEncoderModel, VanillaDecoderModel, VanillaSeq2SeqModel, VanillaVisionModel)
for _class in (VanillaPooler, VanillaPreTrainedModel, *_stacks):
    _class.__module__ = __name__

# ---------------------------------------------------------------------------------- language models


class VanillaTransform(nn.Module):
    """Devlin et al. 2019 (BERT): linear map, activation and norm, in front of the projection to the
    vocabulary, or of a classifier."""

    def __init__(self, config: VanillaEncoderConfig, act: str, size: int):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, size)
        self.activation = ACT2FN[act]
        self.norm = new_norm(config, size)

    def forward(self, hidden_states):
        return self.norm(self.activation(self.dense(hidden_states)))


def lm_transform(config):
    """Return the module between an encoder's states (..., D) and the projection to the vocabulary
    (..., E)."""
    if config.lm_transform_act:
        return VanillaTransform(config, config.lm_transform_act, config.embedding_size)
    return new_projection(config.hidden_size, config.embedding_size)


def classifier_transform(config):
    """Return the module between an encoder's states and a classifier, (..., D) -> (..., D)."""
    if config.classifier_act is None:
        return nn.Identity()
    return VanillaTransform(config, config.classifier_act, config.hidden_size)


def select_labelled(hidden_states, labels, logits_to_keep):
    """Return states (B, S, D) and `labels` (B, S) at the positions where `logits_to_keep` (B, S) is
    True.

    The results are (N, D) and (N,). Without that mask both are returned unchanged. `labels` may be
    None.
    """
    if logits_to_keep is None:
        return hidden_states, labels
    return hidden_states[logits_to_keep], None if labels is None else labels[logits_to_keep]


class VanillaEncoderForMaskedLM(VanillaPreTrainedModel):
    """Encoder with a projection to the vocabulary; `labels` (B, S), -100 where nothing is to be
    predicted."""

    config_class = VanillaEncoderConfig
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VanillaEncoderConfig):
        super().__init__(config)
        self.model = VanillaEncoderModel(config, add_pooling_layer=False)
        self.transform = lm_transform(config)
        self.lm_head = nn.Linear(config.embedding_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: torch.BoolTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Return `logits` (B, S, V), and with `labels` (B, S) their mean cross-entropy.

        `input_ids` are (B, S), or `inputs_embeds` (B, S, E); `attention_mask` (B, S) is 0 for
        padding. Labels of -100 do not count. With a mask `logits_to_keep` (B, S), only its N
        positions have logits (N, V) and count in the loss.
        """
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
        )
        hidden_states, labels = select_labelled(outputs.last_hidden_state, labels, logits_to_keep)
        logits = self.lm_head(self.transform(hidden_states))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss, logits, outputs.hidden_states, outputs.attentions)


def create_masks_for_generate(config, inputs_embeds, attention_mask, **kwargs):
    """Return {layer type: mask of self-attention} for one step of a compiled `generate`.

    transformers' function of this name cannot read `config.layer_types` of None. The arguments are
    the same.
    """
    decoder = config.get_text_config(decoder=True)
    types = decoder.types_of_layers(decoder.num_hidden_layers)
    names = ("past_key_values", "position_ids")
    inputs = {name: kwargs.get(name) for name in names}
    return masks_by_type(types, True, decoder, inputs_embeds, attention_mask, **inputs)


class VanillaDecoderForCausalLM(VanillaPreTrainedModel, GenerationMixin):
    """Decoder with a projection to the vocabulary: the language model p(x_t | x_<t)."""

    config_class = VanillaDecoderConfig
    create_masks_for_generate = staticmethod(create_masks_for_generate)
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VanillaDecoderConfig):
        super().__init__(config)
        self.model = VanillaDecoderModel(config)
        self.lm_head = nn.Linear(config.embedding_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithCrossAttentions:
        """Return `logits` (B, T, V), only of the last `logits_to_keep` positions if that is not 0.

        As a tensor, `logits_to_keep` has the indices of the positions. `input_ids` (B, T), or
        `inputs_embeds` (B, T, E), are the tokens that are not yet in the cache. `attention_mask`
        (B, past + T) is 0 for padding. With `labels` (B, T) the loss is returned too: they are
        `input_ids` with -100 where nothing is to be predicted, and the loss shifts them by one.
        `encoder_hidden_states` (B, S, D) are a source for cross-attention, with
        `encoder_attention_mask` (B, S).
        """
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            encoder_hidden_states,
            encoder_attention_mask,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )


# `Trainer` smooths the labels of the classes in this dictionary shifted by one.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[VanillaDecoderConfig.model_type] = "VanillaDecoderForCausalLM"


def shift_tokens_right(ids, config):
    """Return `ids` (B, T) shifted right by one, with padding in place of -100.

    The first token is `config.decoder_start_token_id`. With `config.wrap_last_token` it is the last
    token of the row that is not padding; padding must be on the right. Raises ValueError if the
    config lacks a token that is needed.
    """
    for name in (
        ("pad_token_id",) if config.wrap_last_token else ("pad_token_id", "decoder_start_token_id")
    ):
        if getattr(config, name) is None:
            raise ValueError(
                f"config.{name} is None, expected a token id: sequences cannot be shifted "
                f"without it"
            )
    ids = ids.masked_fill(ids == -100, config.pad_token_id)
    if config.wrap_last_token:
        start = ids.gather(1, ((ids != config.pad_token_id).sum(1, keepdim=True) - 1).clamp(min=0))
    else:
        start = torch.full_like(ids[:, :1], config.decoder_start_token_id)
    return torch.cat([start, ids[:, :-1]], dim=1)


def both_stacks(outputs):
    """Return {name: value} of the outputs of `VanillaSeq2SeqModel`, except the last hidden state. A
    head passes them on."""
    return {name: value for name, value in outputs.items() if name != "last_hidden_state"}


class VanillaSeq2SeqForConditionalGeneration(VanillaPreTrainedModel, GenerationMixin):
    """Encoder-decoder with a projection to the vocabulary: p(y_t | y_<t, x), the paper's
    translation model."""

    config_class = VanillaSeq2SeqConfig
    create_masks_for_generate = staticmethod(create_masks_for_generate)
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VanillaSeq2SeqConfig):
        super().__init__(config)
        self.model = VanillaSeq2SeqModel(config)
        self.lm_head = nn.Linear(config.embedding_size, config.vocab_size, bias=config.lm_head_bias)
        tied_with = "encoder" if config.share_encoder_decoder_embeddings else "decoder"
        self._tied_weights_keys = {
            "lm_head.weight": f"model.{tied_with}.embeddings.embed_tokens.weight"
        }
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.LongTensor:
        """Return `labels` (B, T) shifted right by one: the decoder's inputs while it is trained.

        `config.decoder_start_token_id` comes first, or with `config.wrap_last_token` the row's last
        token. -100 becomes the pad token.
        """
        return shift_tokens_right(labels, self.config)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Return `logits` (B, T, V), only of the last `logits_to_keep` positions if that is not 0.

        `input_ids` and `attention_mask` (0 for padding) are (B, S). `encoder_outputs` may replace
        `input_ids`, not the mask. With `labels` (B, T), -100 where nothing is to be predicted,
        their mean cross-entropy is returned too. `decoder_input_ids` default to the labels shifted
        right. As a tensor, `logits_to_keep` has the indices of the positions.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            decoder_position_ids,
            encoder_outputs,
            past_key_values,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache=False if labels is not None else use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            # The labels already stand where they are predicted, so the loss must not shift them
            # again.
            kwargs["shift_labels"] = labels
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return Seq2SeqLMOutput(loss, logits, **both_stacks(outputs))


# ---------------------------------------------------------------------------------------- the heads


@dataclass
class VanillaEncoderForPreTrainingOutput(ModelOutput):
    """`loss`, `prediction_logits` (B, S, V), `seq_relationship_logits` (B, 2), and the encoder's
    states."""

    loss: torch.Tensor | None = None
    prediction_logits: torch.Tensor | None = None
    seq_relationship_logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


def pooled_state(outputs):
    """Return one state for the whole sequence, (B, D): the pooler's output, or the first token's
    state."""
    return (
        outputs.last_hidden_state[:, 0] if outputs.pooler_output is None else outputs.pooler_output
    )


def mean_state(hidden_states, attention_mask):
    """Return the mean state of the tokens that are not padding, (B, D), or 0 if there are none.

    States are (B, S, D); the mask is (B, S), or `None` without padding.
    """
    if attention_mask is None:
        return hidden_states.mean(1)
    weights = attention_mask[:, :, None].to(hidden_states.dtype)
    return (hidden_states * weights).sum(1) / weights.sum(1).clamp(min=1)


def sequence_state(config, outputs, attention_mask):
    """Return the state that the classifier of whole sequences reads, (B, D), by
    `config.classifier_pooling`."""
    if config.classifier_pooling == "mean":
        return mean_state(outputs.last_hidden_state, attention_mask)
    return pooled_state(outputs)


def classification_loss(model, logits, labels, num_items_in_batch=None, **kwargs):
    """Return the loss of `logits` (B, num_labels) by `config.problem_type`, or None without
    `labels`.

    It is a mean over the labels. With `num_items_in_batch`, the number of labels in all batches of
    an update, it is this batch's part of the mean over them.
    """
    if labels is None:
        return None
    kwargs = {"labels": labels, "pooled_logits": logits, "config": model.config, **kwargs}
    loss = model.loss_function(num_items_in_batch=num_items_in_batch, **kwargs)
    if num_items_in_batch is None or model.config.problem_type == "single_label_classification":
        return loss
    return loss * labels.numel() / num_items_in_batch  # transformers ignored the number


class VanillaEncoderForPreTraining(VanillaPreTrainedModel):
    """Devlin et al. 2019 (BERT), section 3.1: masked tokens, and whether the second sentence
    follows the first."""

    config_class = VanillaEncoderConfig
    sequence_modules = frozenset({"pooler", "next_sentence"})
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VanillaEncoderConfig):
        super().__init__(config)
        self.model = VanillaEncoderModel(config)
        self.transform = lm_transform(config)
        self.lm_head = nn.Linear(config.embedding_size, config.vocab_size, bias=config.lm_head_bias)
        self.next_sentence = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        next_sentence_label: torch.LongTensor | None = None,
        logits_to_keep: torch.BoolTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> VanillaEncoderForPreTrainingOutput:
        """Return the logits of both objectives, and the sum of the losses of those with labels.

        `input_ids` are (B, S), or `inputs_embeds` (B, S, E); `attention_mask` (B, S) is 0 for
        padding. `labels` (B, S) of masked language modeling are -100 where nothing is predicted.
        `next_sentence_label` (B,) is 0 if the second sentence follows, else 1. The losses are
        cross-entropies; without any labels the loss is None. With a mask `logits_to_keep` (B, S),
        only its N positions have prediction logits (N, V) and count in the loss.
        """
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
        )
        hidden_states, labels = select_labelled(outputs.last_hidden_state, labels, logits_to_keep)
        prediction = self.lm_head(self.transform(hidden_states))
        relationship = self.next_sentence(pooled_state(outputs))
        losses = []
        if labels is not None:
            losses.append(
                fixed_cross_entropy(prediction.flatten(0, -2).float(), labels.flatten(), **kwargs)
            )
        if next_sentence_label is not None:
            loss = fixed_cross_entropy(relationship.float(), next_sentence_label.flatten())
            # the number of labels in all batches of an update, of which this is one
            count = kwargs.get("num_items_in_batch")
            losses.append(
                loss if count is None or labels is None else loss * labels.ne(-100).sum() / count
            )
        return VanillaEncoderForPreTrainingOutput(
            sum(losses) if losses else None,
            prediction,
            relationship,
            outputs.hidden_states,
            outputs.attentions,
        )


class VanillaEncoderForNextSentencePrediction(VanillaPreTrainedModel):
    """An encoder that predicts if the second sentence follows the first: `labels` (B,) are 0 if so,
    else 1."""

    config_class = VanillaEncoderConfig
    sequence_modules = frozenset({"pooler", "next_sentence"})

    def __init__(self, config: VanillaEncoderConfig):
        super().__init__(config)
        self.model = VanillaEncoderModel(config)
        self.next_sentence = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> NextSentencePredictorOutput:
        """Return `logits` (B, 2), and with `labels` (B,) their mean cross-entropy.

        `input_ids` are (B, S), or `inputs_embeds` (B, S, E); `attention_mask` (B, S) is 0 for
        padding. A label is 0 if the second sentence follows the first, else 1.
        """
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
        )
        logits = self.next_sentence(pooled_state(outputs))
        loss = None
        if labels is not None:
            loss = fixed_cross_entropy(logits.float(), labels.flatten(), **kwargs)
        return NextSentencePredictorOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class VanillaEncoderForSequenceClassification(VanillaPreTrainedModel):
    """Encoder with a classifier of the whole sequence. `config.num_labels` classes, or with
    `config.problem_type` `"regression"` numbers, `"multi_label_classification"` independent
    yes-or-no labels."""

    config_class = VanillaEncoderConfig
    sequence_modules = frozenset({"pooler", "classifier"})

    def __init__(self, config: VanillaEncoderConfig):
        super().__init__(config)
        self.model = VanillaEncoderModel(
            config, add_pooling_layer=config.classifier_pooling == "cls"
        )
        self.transform = classifier_transform(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Return `logits` (B, num_labels), and the loss if there are `labels`.

        `input_ids` are (B, S), or `inputs_embeds` (B, S, E); `attention_mask` (B, S) is 0 for
        padding. `labels` are classes (B,), or floats (B, num_labels) for regression and several
        independent labels; see `config.problem_type`.
        """
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
        )
        state = sequence_state(self.config, outputs, attention_mask)
        logits = self.classifier(self.dropout(self.transform(state)))
        loss = classification_loss(self, logits, labels, **kwargs)
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class VanillaEncoderForTokenClassification(VanillaPreTrainedModel):
    """Encoder with a classifier of each token; `labels` (B, S), -100 where nothing is to be
    predicted."""

    config_class = VanillaEncoderConfig

    def __init__(self, config: VanillaEncoderConfig):
        super().__init__(config)
        self.model = VanillaEncoderModel(config, add_pooling_layer=False)
        self.transform = classifier_transform(config)
        if config.token_transform_act:
            dense = nn.Linear(config.hidden_size, config.hidden_size)
            self.transform = nn.Sequential(dense, ACT2FN[config.token_transform_act])
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """Return `logits` (B, S, num_labels), and with `labels` (B, S) their mean cross-entropy.

        `input_ids` are (B, S), or `inputs_embeds` (B, S, E); `attention_mask` (B, S) is 0 for
        padding. Labels of -100 do not count.
        """
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
        )
        logits = self.classifier(self.dropout(self.transform(outputs.last_hidden_state)))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class VanillaEncoderForQuestionAnswering(VanillaPreTrainedModel):
    """Encoder with two scores for each token: that the answer starts there, and that it ends
    there."""

    config_class = VanillaEncoderConfig

    def __init__(self, config: VanillaEncoderConfig):
        super().__init__(config)
        self.model = VanillaEncoderModel(config, add_pooling_layer=False)
        self.transform = classifier_transform(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Return `start_logits` and `end_logits` (B, S), and with positions the mean of their
        cross-entropies.

        `input_ids` are (B, S), or `inputs_embeds` (B, S, E); `attention_mask` (B, S) is 0 for
        padding. `start_positions` and `end_positions` are (B,); positions after the sequence are
        ignored.
        """
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
        )
        states = self.transform(outputs.last_hidden_state)
        start_logits, end_logits = self.qa_outputs(states).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(
                start_logits, end_logits, start_positions, end_positions, **kwargs
            )
        return QuestionAnsweringModelOutput(
            loss, start_logits, end_logits, outputs.hidden_states, outputs.attentions
        )


class VanillaEncoderForMultipleChoice(VanillaPreTrainedModel):
    """Encoder with one score for each of several sequences; `labels` (B,), the index of the right
    one."""

    config_class = VanillaEncoderConfig
    sequence_modules = frozenset({"pooler", "choice_classifier"})

    def __init__(self, config: VanillaEncoderConfig):
        super().__init__(config)
        self.model = VanillaEncoderModel(
            config, add_pooling_layer=config.classifier_pooling == "cls"
        )
        self.transform = classifier_transform(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        # Not `classifier`: other heads could not load a checkpoint with that of another size.
        self.choice_classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        """Return `logits` (B, C) of the C choices, and with `labels` (B,) their mean cross-entropy.

        `input_ids`, `attention_mask` (0 for padding), `token_type_ids` and `position_ids` are (B,
        C, S). A label is the index of the right choice.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        rows = [None if tensor is None else tensor.flatten(0, 1) for tensor in inputs]
        outputs = self.model(*rows, **kwargs)
        choices = (inputs_embeds if input_ids is None else input_ids).shape[1]
        state = self.transform(sequence_state(self.config, outputs, rows[1]))
        logits = self.choice_classifier(self.dropout(state)).view(-1, choices)
        loss = None
        if labels is not None:
            loss = fixed_cross_entropy(logits.float(), labels, **kwargs)
        return MultipleChoiceModelOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class VanillaDecoderForSequenceClassification(VanillaPreTrainedModel):
    """Decoder with a classifier of the last token that is not padding, which has seen all others.
    `config.num_labels` and `config.problem_type` as in
    `VanillaEncoderForSequenceClassification`."""

    config_class = VanillaDecoderConfig
    sequence_modules = frozenset({"score"})

    def __init__(self, config: VanillaDecoderConfig):
        super().__init__(config)
        self.model = VanillaDecoderModel(config)
        self.score = nn.Linear(config.embedding_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutputWithPast:
        """Return `logits` (B, num_labels), and the loss if there are `labels`.

        `input_ids` are (B, T), or `inputs_embeds` (B, T, E). Tokens that `attention_mask` (B, T)
        hides and every `config.pad_token_id` are padding. `labels` are classes (B,), or floats (B,
        num_labels); see `config.problem_type`.
        """
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        last = self.last_real_token(hidden_states, input_ids, attention_mask)
        logits = self.score(hidden_states[torch.arange(len(last), device=last.device), last])
        loss = classification_loss(self, logits, labels, **kwargs)
        return SequenceClassifierOutputWithPast(
            loss, logits, outputs.past_key_values, outputs.hidden_states, outputs.attentions
        )

    def last_real_token(self, hidden_states, input_ids, attention_mask):
        not_padding = torch.ones(
            hidden_states.shape[:2], dtype=torch.long, device=hidden_states.device
        )
        if attention_mask is not None and attention_mask.ndim == 2:
            not_padding = not_padding * (attention_mask[:, -not_padding.shape[1] :] != 0)
        if input_ids is not None and self.config.pad_token_id is not None:
            not_padding = not_padding * (input_ids != self.config.pad_token_id)
        positions = torch.arange(not_padding.shape[1], device=not_padding.device)
        return (not_padding * positions).argmax(-1)


class VanillaDecoderForTokenClassification(VanillaPreTrainedModel):
    """Decoder with a classifier of each token, which has seen those before it; `labels` (B, T),
    -100 where nothing is to be predicted."""

    config_class = VanillaDecoderConfig

    def __init__(self, config: VanillaDecoderConfig):
        super().__init__(config)
        self.model = VanillaDecoderModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.embedding_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """Return `logits` (B, T, num_labels), and with `labels` (B, T) their mean cross-entropy.

        `input_ids` are (B, T), or `inputs_embeds` (B, T, E); `attention_mask` (B, T) is 0 for
        padding. Labels of -100 do not count.
        """
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class VanillaDecoderForQuestionAnswering(VanillaPreTrainedModel):
    """Decoder with two scores for each token: that the answer starts there, and that it ends
    there."""

    config_class = VanillaDecoderConfig

    def __init__(self, config: VanillaDecoderConfig):
        super().__init__(config)
        self.model = VanillaDecoderModel(config)
        self.qa_outputs = nn.Linear(config.embedding_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        use_cache: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Return `start_logits` and `end_logits` (B, T), and with positions the mean of their
        cross-entropies.

        `input_ids` are (B, T), or `inputs_embeds` (B, T, E); `attention_mask` (B, T) is 0 for
        padding. `start_positions` and `end_positions` are (B,); positions after the sequence are
        ignored.
        """
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(
                start_logits, end_logits, start_positions, end_positions, **kwargs
            )
        return QuestionAnsweringModelOutput(
            loss, start_logits, end_logits, outputs.hidden_states, outputs.attentions
        )


class VanillaSeq2SeqForSequenceClassification(VanillaPreTrainedModel):
    """Encoder-decoder with a classifier of the whole sequence (Lewis et al. 2020, BART, section
    3.1).

    The decoder reads the source again, shifted right. The classifier reads its state at the last
    end token of the source. `config.num_labels` and `config.problem_type` are as in
    `VanillaEncoderForSequenceClassification`.
    """

    config_class = VanillaSeq2SeqConfig
    sequence_modules = frozenset({"dense", "classifier"})

    def __init__(self, config: VanillaSeq2SeqConfig):
        super().__init__(config)
        self.model = VanillaSeq2SeqModel(config)
        self.dense = nn.Linear(config.embedding_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqSequenceClassifierOutput:
        """Return `logits` (B, num_labels), and the loss if there are `labels`.

        Each row of `input_ids` (B, S) needs an end token that `attention_mask` does not hide.
        `decoder_input_ids` (B, S) are by default `input_ids` shifted right. `labels` are classes
        (B,), or floats (B, num_labels); see `config.problem_type`.

        Raises:
            ValueError: for a row without such an end token, unless all of it is hidden. Also
                without `input_ids` or `config.eos_token_id`.
        """
        last = self.last_end_token(input_ids, attention_mask)
        if decoder_input_ids is None and kwargs.get("decoder_inputs_embeds") is None:
            decoder_input_ids = shift_tokens_right(input_ids, self.config)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            decoder_position_ids,
            encoder_outputs,
            use_cache=use_cache,
            **kwargs,
        )
        rows = torch.arange(last.shape[0], device=last.device)
        state = self.dense(self.dropout(outputs.last_hidden_state[rows, last])).tanh()
        logits = self.classifier(self.dropout(state))
        loss = classification_loss(self, logits, labels, **kwargs)
        return Seq2SeqSequenceClassifierOutput(loss, logits, **both_stacks(outputs))

    def last_end_token(self, input_ids, attention_mask):
        if input_ids is None:
            raise ValueError(
                "input_ids are None, expected token ids: inputs_embeds do not show the end token"
            )
        if self.config.eos_token_id is None:
            raise ValueError("config.eos_token_id is None, expected the id of the end token")
        not_padding = (
            torch.ones_like(input_ids, dtype=torch.bool)
            if attention_mask is None
            else attention_mask != 0
        )
        ends = not_padding & (
            input_ids[..., None] == torch.tensor(self.config.eos_token_id, device=input_ids.device)
        ).any(-1)
        # a row of padding is not an error
        if has_values(ends) and (endless := not_padding.any(-1) & ~ends.any(-1)).any():
            row = endless.long().argmax().item()
            raise ValueError(
                f"row {row} of input_ids has no end token, expected {self.config.eos_token_id} in "
                "every row"
            )
        return (ends * torch.arange(ends.shape[1], device=ends.device)).argmax(-1)


class VanillaSeq2SeqForQuestionAnswering(VanillaPreTrainedModel):
    """Encoder-decoder with two scores for each token of the source, which the decoder reads once
    more, shifted right: that the answer starts there, and that it ends there."""

    config_class = VanillaSeq2SeqConfig

    def __init__(self, config: VanillaSeq2SeqConfig):
        super().__init__(config)
        self.model = VanillaSeq2SeqModel(config)
        self.qa_outputs = nn.Linear(config.embedding_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        use_cache: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqQuestionAnsweringModelOutput:
        """Return `start_logits` and `end_logits` (B, S), and with positions the mean of their
        cross-entropies.

        `input_ids` and `attention_mask` (0 for padding) are (B, S). `start_positions` and
        `end_positions` are (B,); positions after the sequence are ignored. `decoder_input_ids` (B,
        S) are by default `input_ids` shifted right.
        """
        if input_ids is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = shift_tokens_right(input_ids, self.config)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            decoder_position_ids,
            encoder_outputs,
            None,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(
                start_logits, end_logits, start_positions, end_positions, **kwargs
            )
        return Seq2SeqQuestionAnsweringModelOutput(
            loss, start_logits, end_logits, **both_stacks(outputs)
        )


class VanillaVisionForImageClassification(VanillaPreTrainedModel):
    """Encoder of images with a classifier of the states of the first tokens, side by side.
    `config.num_labels` and `config.problem_type` as in
    `VanillaEncoderForSequenceClassification`."""

    config_class = VanillaVisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    sequence_modules = frozenset({"classifier"})

    def __init__(self, config: VanillaVisionConfig):
        super().__init__(config)
        self.model = VanillaVisionModel(config, add_pooling_layer=False)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.num_first_tokens * config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.FloatTensor,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Return `logits` (B, num_labels), and the loss if there are `labels`.

        `pixel_values` (B, C, H, W) have `config.image_size`, or any size with
        `interpolate_pos_encoding`. `labels` are classes (B,), or floats (B, num_labels); see
        `config.problem_type`.
        """
        outputs = self.model(pixel_values, interpolate_pos_encoding, **kwargs)
        states = outputs.last_hidden_state[:, : self.config.num_first_tokens]
        logits = self.classifier(self.dropout(states.flatten(1)))
        loss = classification_loss(self, logits, labels, **kwargs)
        return ImageClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


__all__ = [
    "VanillaDecoderForCausalLM",
    "VanillaDecoderForQuestionAnswering",
    "VanillaDecoderForSequenceClassification",
    "VanillaDecoderForTokenClassification",
    "VanillaDecoderModel",
    "VanillaEncoderForMaskedLM",
    "VanillaEncoderForMultipleChoice",
    "VanillaEncoderForNextSentencePrediction",
    "VanillaEncoderForPreTraining",
    "VanillaEncoderForQuestionAnswering",
    "VanillaEncoderForSequenceClassification",
    "VanillaEncoderForTokenClassification",
    "VanillaEncoderModel",
    "VanillaPreTrainedModel",
    "VanillaSeq2SeqForConditionalGeneration",
    "VanillaSeq2SeqForQuestionAnswering",
    "VanillaSeq2SeqForSequenceClassification",
    "VanillaSeq2SeqModel",
    "VanillaVisionForImageClassification",
    "VanillaVisionModel",
]
