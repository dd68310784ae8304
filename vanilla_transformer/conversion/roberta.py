"""RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2020) and CamemBERT (Martin et al. 2020): BERT
without next-sentence prediction. Positions count the ids that are not padding. They start after the
padding id, which is the row of padding. No token reads the rows before that one."""

from dataclasses import replace

from . import bert
from .fields import Fields, Ours, TensorNames, Theirs, our_classes, require_padding
from .tensors import TensorMap, drop_rows, modules

CLASSES = our_classes("Encoder", *bert.HEADS)


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    bert.require_encoder(theirs)
    return bert.encoder_fields(theirs) | {
        "max_position_embeddings": theirs.max_position_embeddings - require_padding(theirs) - 1,
        "position_ids_from": "ids",
        "pooler_act": bert.pooler_act(theirs, names),
        "lm_transform_act": "gelu",  # whatever the layers have
    }


def to_source_config(ours: Ours) -> Fields:
    rows = ours.max_position_embeddings + require_padding(ours) + 1
    return bert.to_source_config(ours) | {"max_position_embeddings": rows}


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    return [
        *bert.body(ours, "lm_head.decoder.weight"),
        *positions(theirs.pad_token_id),
        *heads(ours, theirs),
    ]


def positions(pad_token_id: int) -> list[TensorMap]:
    """Return the tensor map of the learned position table: our row 0 is row `pad_token_id` of the
    source."""
    return [replace(bert.POSITIONS, op=drop_rows(pad_token_id))]


def heads(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    is_classifier = theirs.architectures[0].endswith("ForSequenceClassification")
    classifier = {
        "model.pooler.dense": "classifier.dense" if is_classifier else "pooler.dense",
        bert.classifier_name(theirs): "classifier.out_proj" if is_classifier else "classifier",
    }
    transform = {"transform.dense": "lm_head.dense", "transform.norm": "lm_head.layer_norm"}
    return [
        *modules(transform | classifier | {"qa_outputs": "qa_outputs"}),
        *bert.vocabulary_bias(ours, "lm_head"),
    ]
