"""RoBERTa (Liu et al. 2019): BERT without next-sentence prediction. Its positions count the ids that are not
padding, and start behind the padding id, which is the row of padding; those before it are read by nobody."""

from .bert import body, classifier_of, encoder_fields, vocabulary_bias
from .fields import require
from .tensors import Pair, linear, pair, without_rows

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


def config(theirs, architecture, names):
    require(theirs, is_decoder=False, add_cross_attention=False, position_embedding_type=(None, "absolute"))
    if theirs.pad_token_id is None or theirs.pad_token_id < 0:
        raise ValueError(f"pad_token_id={theirs.pad_token_id} cannot be converted, expected a token: positions start behind it")
    has_pooler = architecture != "RobertaModel" or "pooler.dense.weight" in names
    return encoder_fields(theirs) | {
        "max_position_embeddings": theirs.max_position_embeddings - theirs.pad_token_id - 1,
        "position_ids_from": "ids",
        "pooler_act": "tanh" if has_pooler else None,
        "lm_transform_act": "gelu",  # whatever the layers have
    }


def pairs(ours, theirs, architecture) -> list[Pair]:
    tied = theirs.tie_word_embeddings
    found = body(ours, also=("lm_head.decoder.weight",) if tied else ())
    used = without_rows(theirs.pad_token_id)
    found.append(pair("model.embeddings.embed_positions.weight", "embeddings.position_embeddings.weight", used))
    found += linear("transform.dense", "lm_head.dense")
    found += linear("transform.norm", "lm_head.layer_norm")
    found += vocabulary_bias(ours, tied, "lm_head")
    if not tied:
        found.append(pair("lm_head.weight", "lm_head.decoder.weight"))
    found += linear("qa_outputs", "qa_outputs")
    if architecture == "RobertaForSequenceClassification":
        return found + linear("model.pooler.dense", "classifier.dense") + linear("classifier", "classifier.out_proj")
    return found + linear("model.pooler.dense", "pooler.dense") + linear(classifier_of(architecture), "classifier")
