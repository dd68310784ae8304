"""ELECTRA (Clark et al. 2020): BERT whose embeddings may have a width of their own, as in the small
models. The discriminator becomes a classifier of tokens with one score, above 0 for a token that
was replaced."""

from . import bert
from .fields import Fields, Ours, TensorNames, Theirs, our_classes, require
from .tensors import TensorMap, modules, tensor_map

CLASSES = our_classes("Encoder", *bert.HEADS) | {
    "ForPreTraining": "VanillaEncoderForTokenClassification"
}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    bert.require_encoder(theirs)
    architecture = theirs.architectures[0]
    pooler_act = "gelu"
    if architecture == "ElectraForMultipleChoice":
        require(theirs, summary_type="first", summary_use_proj=True)
        pooler_act = theirs.summary_activation or "linear"
    fields = bert.encoder_fields(theirs) | {
        "embedding_size": theirs.embedding_size,
        "pooler_act": None if architecture == "ElectraModel" else pooler_act,
        "lm_transform_act": "gelu",  # whatever the layers have
    }
    if architecture == "ElectraForPreTraining":
        fields |= {"token_transform_act": theirs.hidden_act, "classifier_dropout": 0.0}
        fields |= {"id2label": {0: "replaced"}, "label2id": {"replaced": 0}}
    return fields


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    return [
        *bert.body(ours, "generator_lm_head.weight"),
        bert.POSITIONS,
        tensor_map("lm_head.bias", "generator_lm_head.bias"),
        *modules(
            {
                "model.embeddings.projection": "embeddings_project",
                "transform.norm": "generator_predictions.LayerNorm",
                "qa_outputs": "qa_outputs",
                **heads(theirs),
            }
        ),
    ]


def heads(theirs: Theirs) -> dict[str, str]:
    """Return {our module: theirs} of the modules that depend on the source's class."""
    architecture = theirs.architectures[0]
    if architecture == "ElectraForPreTraining":
        head = "discriminator_predictions"
        return {"transform.0": f"{head}.dense", "classifier": f"{head}.dense_prediction"}
    transform = {"transform.dense": "generator_predictions.dense"}
    if architecture == "ElectraForSequenceClassification":
        return transform | {
            "model.pooler.dense": "classifier.dense",
            "classifier": "classifier.out_proj",
        }
    return transform | {
        "model.pooler.dense": "sequence_summary.summary",
        bert.classifier_name(theirs): "classifier",
    }
