"""RoBERTa (Liu et al. 2019): BERT without next-sentence prediction. Its positions count the ids that are not
padding. They start after the padding id, which is the row of padding. No token reads the rows before that one."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .bert import body, classifier_of, encoder_fields, require_encoder, vocabulary_bias
from .fields import Fields, require_padding
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


def to_vanilla_config(theirs: PreTrainedConfig, architecture: str, names: Collection[str]) -> Fields:
    require_encoder(theirs)
    has_pooler = not architecture.endswith("Model") or "pooler.dense.weight" in names
    return encoder_fields(theirs) | {
        "max_position_embeddings": theirs.max_position_embeddings - require_padding(theirs) - 1,
        "position_ids_from": "ids",
        "pooler_act": "tanh" if has_pooler else None,
        "lm_transform_act": "gelu",  # whatever the layers have
    }


def tensor_maps(ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str) -> list[TensorMap]:
    tied = theirs.tie_word_embeddings
    maps = body(ours, also=("lm_head.decoder.weight",) if tied else ())
    used = drop_rows(theirs.pad_token_id)
    maps.append(tensor_map("model.embeddings.embed_positions.weight", "embeddings.position_embeddings.weight", used))
    maps += linear("transform.dense", "lm_head.dense")
    maps += linear("transform.norm", "lm_head.layer_norm")
    maps += vocabulary_bias(ours, tied, "lm_head")
    if not tied:
        maps.append(tensor_map("lm_head.weight", "lm_head.decoder.weight"))
    maps += linear("qa_outputs", "qa_outputs")
    if architecture.endswith("ForSequenceClassification"):
        return maps + linear("model.pooler.dense", "classifier.dense") + linear("classifier", "classifier.out_proj")
    return maps + linear("model.pooler.dense", "pooler.dense") + linear(classifier_of(architecture), "classifier")
