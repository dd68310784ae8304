"""ELECTRA (Clark et al. 2020): BERT whose embeddings may have a width of their own, as in the small
models. The discriminator becomes a classifier of tokens with one score, above 0 for a token that
was replaced."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .bert import body, classifier_name, encoder_fields, require_encoder
from .fields import Fields, require
from .tensors import TensorMap, linear, tensor_map

CONFIG = "ElectraConfig"
ARCHITECTURES = {
    "ElectraModel": "VanillaEncoderModel",
    "ElectraForPreTraining": "VanillaEncoderForTokenClassification",
    "ElectraForMaskedLM": "VanillaEncoderForMaskedLM",
    "ElectraForSequenceClassification": "VanillaEncoderForSequenceClassification",
    "ElectraForTokenClassification": "VanillaEncoderForTokenClassification",
    "ElectraForQuestionAnswering": "VanillaEncoderForQuestionAnswering",
    "ElectraForMultipleChoice": "VanillaEncoderForMultipleChoice",
}
PREFIX = "electra."


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    require_encoder(theirs)
    pooler_act = "gelu"
    if architecture == "ElectraForMultipleChoice":
        require(theirs, summary_type="first", summary_use_proj=True)
        pooler_act = theirs.summary_activation or "linear"
    fields = encoder_fields(theirs) | {
        "embedding_size": theirs.embedding_size,
        "max_position_embeddings": theirs.max_position_embeddings,
        "pooler_act": None if architecture == "ElectraModel" else pooler_act,
        "lm_transform_act": "gelu",  # whatever the layers have
    }
    if architecture == "ElectraForPreTraining":
        fields |= {"token_transform_act": theirs.hidden_act, "classifier_dropout": 0.0}
        fields |= {"id2label": {0: "replaced"}, "label2id": {"replaced": 0}}
    return fields


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    tied = theirs.tie_word_embeddings
    maps = body(ours, also=("generator_lm_head.weight",) if tied else ())
    maps.append(
        tensor_map(
            "model.embeddings.embed_positions.weight", "embeddings.position_embeddings.weight"
        )
    )
    maps += linear("model.embeddings.projection", "embeddings_project")
    maps += linear("transform.norm", "generator_predictions.LayerNorm")
    maps.append(tensor_map("lm_head.bias", "generator_lm_head.bias"))
    if not tied:
        maps.append(tensor_map("lm_head.weight", "generator_lm_head.weight"))
    maps += linear("qa_outputs", "qa_outputs")
    if architecture == "ElectraForPreTraining":
        maps += linear("transform.0", "discriminator_predictions.dense")
        return maps + linear("classifier", "discriminator_predictions.dense_prediction")
    maps += linear("transform.dense", "generator_predictions.dense")
    if architecture == "ElectraForSequenceClassification":
        return (
            maps
            + linear("model.pooler.dense", "classifier.dense")
            + linear("classifier", "classifier.out_proj")
        )
    return (
        maps
        + linear("model.pooler.dense", "sequence_summary.summary")
        + linear(classifier_name(architecture), "classifier")
    )
