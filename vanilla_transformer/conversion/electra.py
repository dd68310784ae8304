"""ELECTRA (Clark et al. 2020) with embeddings as wide as its layers. The discriminator becomes a classifier of tokens with
one score, above 0 for a token that was replaced."""

from .bert import body, classifier_of, encoder_fields
from .fields import require
from .tensors import Pair, linear, pair

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


def config(theirs, architecture, names):
    require(theirs, is_decoder=False, add_cross_attention=False, position_embedding_type=(None, "absolute"))
    require(theirs, embedding_size=theirs.hidden_size)
    pooler_act = "gelu"
    if architecture == "ElectraForMultipleChoice":
        require(theirs, summary_type="first", summary_use_proj=True)
        pooler_act = theirs.summary_activation or "linear"
    fields = encoder_fields(theirs) | {
        "max_position_embeddings": theirs.max_position_embeddings,
        "pooler_act": None if architecture == "ElectraModel" else pooler_act,
        "lm_transform_act": "gelu",  # whatever the layers have
    }
    if architecture == "ElectraForPreTraining":
        fields |= {"token_transform_act": theirs.hidden_act, "classifier_dropout": 0.0}
        fields |= {"id2label": {0: "replaced"}, "label2id": {"replaced": 0}}
    return fields


def pairs(ours, theirs, architecture) -> list[Pair]:
    tied = theirs.tie_word_embeddings
    found = body(ours, also=("generator_lm_head.weight",) if tied else ())
    found.append(pair("model.embeddings.embed_positions.weight", "embeddings.position_embeddings.weight"))
    found += linear("transform.norm", "generator_predictions.LayerNorm")
    found.append(pair("lm_head.bias", "generator_lm_head.bias"))
    if not tied:
        found.append(pair("lm_head.weight", "generator_lm_head.weight"))
    found += linear("qa_outputs", "qa_outputs")
    if architecture == "ElectraForPreTraining":
        found += linear("transform.0", "discriminator_predictions.dense")
        return found + linear("classifier", "discriminator_predictions.dense_prediction")
    found += linear("transform.dense", "generator_predictions.dense")
    if architecture == "ElectraForSequenceClassification":
        return found + linear("model.pooler.dense", "classifier.dense") + linear("classifier", "classifier.out_proj")
    return found + linear("model.pooler.dense", "sequence_summary.summary") + linear(classifier_of(architecture), "classifier")
