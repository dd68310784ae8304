"""RoBERTa (Liu et al. 2019): BERT without next-sentence prediction. Its positions count the ids
that are not padding. They start after the padding id, which is the row of padding. No token reads
the rows before that one."""

from collections.abc import Collection
from dataclasses import replace

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from . import bert
from .fields import Fields, require_padding
from .tensors import TensorMap, drop_rows, modules

CONFIG = "RobertaConfig"
ARCHITECTURES = bert.encoder_classes("Roberta")
PREFIX = "roberta."


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    bert.require_encoder(theirs)
    return bert.encoder_fields(theirs) | {
        "max_position_embeddings": theirs.max_position_embeddings - require_padding(theirs) - 1,
        "position_ids_from": "ids",
        "pooler_act": bert.pooler_act(architecture, names),
        "lm_transform_act": "gelu",  # whatever the layers have
    }


def to_source_config(ours: VanillaTransformerConfig, architecture: str) -> Fields:
    rows = ours.max_position_embeddings + require_padding(ours) + 1
    return bert.to_source_config(ours, architecture) | {"max_position_embeddings": rows}


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    return [
        *bert.body(ours, "lm_head.decoder.weight", theirs.tie_word_embeddings),
        *positions(theirs.pad_token_id),
        *heads(ours, theirs.tie_word_embeddings, architecture),
    ]


def positions(pad_token_id: int) -> list[TensorMap]:
    """Return the tensor map of the learned position table: our row 0 is row `pad_token_id` of the
    source."""
    return [replace(bert.POSITIONS, op=drop_rows(pad_token_id))]


def heads(ours: VanillaTransformerConfig, tied: bool, architecture: str) -> list[TensorMap]:
    is_classifier = architecture.endswith("ForSequenceClassification")
    classifier = {
        "model.pooler.dense": "classifier.dense" if is_classifier else "pooler.dense",
        bert.classifier_name(architecture): "classifier.out_proj"
        if is_classifier
        else "classifier",
    }
    transform = {"transform.dense": "lm_head.dense", "transform.norm": "lm_head.layer_norm"}
    return [
        *modules(transform | classifier | {"qa_outputs": "qa_outputs"}),
        *bert.vocabulary_bias(ours, tied, "lm_head"),
    ]
