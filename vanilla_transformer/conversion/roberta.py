"""RoBERTa (Liu et al. 2019): BERT without next-sentence prediction. Its positions count the ids
that are not padding. They start after the padding id, which is the row of padding. No token reads
the rows before that one."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .bert import (
    body,
    classifier_name,
    encoder_fields,
    require_encoder,
    source_fields,
    vocabulary_bias,
)
from .fields import Fields, require, require_padding
from .tensors import TensorMap, drop_rows, linear, tensor_map

CONFIG = "RobertaConfig"
ARCHITECTURES = {
    "RobertaModel": "VanillaEncoderModel",
    "RobertaForMaskedLM": "VanillaEncoderForMaskedLM",
    "RobertaForSequenceClassification": "VanillaEncoderForSequenceClassification",
    "RobertaForTokenClassification": "VanillaEncoderForTokenClassification",
    "RobertaForQuestionAnswering": "VanillaEncoderForQuestionAnswering",
    "RobertaForMultipleChoice": "VanillaEncoderForMultipleChoice",
}
PREFIX = "roberta."


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    require_encoder(theirs)
    has_pooler = not architecture.endswith("Model") or "pooler.dense.weight" in names
    return encoder_fields(theirs) | {
        "max_position_embeddings": theirs.max_position_embeddings - require_padding(theirs) - 1,
        "position_ids_from": "ids",
        "pooler_act": "tanh" if has_pooler else None,
        "lm_transform_act": "gelu",  # whatever the layers have
    }


def to_source_config(ours: VanillaTransformerConfig, architecture: str) -> Fields:
    require(ours, position_embedding_type="learned", position_ids_from="ids")
    return source_fields(ours, architecture, "gelu") | {
        "max_position_embeddings": ours.max_position_embeddings + require_padding(ours) + 1,
        "type_vocab_size": max(ours.type_vocab_size, 1),
        "classifier_dropout": ours.classifier_dropout,
    }


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    maps = body(ours, also=("lm_head.decoder.weight",) if theirs.tie_word_embeddings else ())
    return (
        maps
        + positions(theirs.pad_token_id)
        + heads(ours, theirs.tie_word_embeddings, architecture)
    )


def positions(pad_token_id: int) -> list[TensorMap]:
    """Return the tensor map of the learned position table: our row 0 is row `pad_token_id` of the
    source."""
    used = drop_rows(pad_token_id)
    return [
        tensor_map(
            "model.embeddings.embed_positions.weight", "embeddings.position_embeddings.weight", used
        )
    ]


def heads(ours: VanillaTransformerConfig, tied: bool, architecture: str) -> list[TensorMap]:
    maps = linear("transform.dense", "lm_head.dense")
    maps += linear("transform.norm", "lm_head.layer_norm")
    maps += vocabulary_bias(ours, tied, "lm_head")
    if not tied:
        maps.append(tensor_map("lm_head.weight", "lm_head.decoder.weight"))
    maps += linear("qa_outputs", "qa_outputs")
    if architecture.endswith("ForSequenceClassification"):
        return (
            maps
            + linear("model.pooler.dense", "classifier.dense")
            + linear("classifier", "classifier.out_proj")
        )
    return (
        maps
        + linear("model.pooler.dense", "pooler.dense")
        + linear(classifier_name(architecture), "classifier")
    )
