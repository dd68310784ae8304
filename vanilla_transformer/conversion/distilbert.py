"""DistilBERT (Sanh et al. 2019): BERT without token types and pooler; its sentence heads have a linear map and a ReLU."""

from .bert import classifier_of
from .tensors import Pair, linear, pair

CONFIG = "DistilBertConfig"
ARCHITECTURES = {
    "DistilBertModel": "VanillaEncoderModel",
    "DistilBertForMaskedLM": "VanillaEncoderForMaskedLM",
    "DistilBertForSequenceClassification": "VanillaEncoderForSequenceClassification",
    "DistilBertForTokenClassification": "VanillaEncoderForTokenClassification",
    "DistilBertForQuestionAnswering": "VanillaEncoderForQuestionAnswering",
    "DistilBertForMultipleChoice": "VanillaEncoderForMultipleChoice",
}
PREFIX = "distilbert."


def config(theirs, architecture, names):
    return {
        "hidden_size": theirs.dim,
        "intermediate_size": theirs.hidden_dim,
        "num_hidden_layers": theirs.n_layers,
        "num_attention_heads": theirs.n_heads,
        "hidden_act": theirs.activation,
        "position_embedding_type": "learned",  # sinusoids too are stored as a table
        "max_position_embeddings": theirs.max_position_embeddings,
        "scale_embedding": False,
        "embedding_norm": True,
        "layer_norm_eps": 1e-12,
        "initializer_range": theirs.initializer_range,
        "embedding_dropout": theirs.dropout,
        "dropout": theirs.dropout,
        "attention_dropout": theirs.attention_dropout,
        "classifier_dropout": theirs.seq_classif_dropout,
        "pooler_act": None if architecture == "DistilBertModel" else "relu",
        "lm_transform_act": theirs.activation,
    }


def pairs(ours, theirs, architecture) -> list[Pair]:
    tied = theirs.tie_word_embeddings
    also = ("vocab_projector.weight",) if tied else ()
    found = [
        pair("model.embeddings.embed_tokens.weight", "embeddings.word_embeddings.weight", also=also),
        pair("model.embeddings.embed_positions.weight", "embeddings.position_embeddings.weight"),
        *linear("model.embeddings.norm", "embeddings.LayerNorm"),
    ]
    for i in range(ours.num_hidden_layers):
        layer, their_layer = f"model.layers.{i}", f"transformer.layer.{i}"
        for projection in "qkv":
            found += linear(f"{layer}.self_attn.{projection}_proj", f"{their_layer}.attention.{projection}_lin")
        found += linear(f"{layer}.self_attn.o_proj", f"{their_layer}.attention.out_lin")
        found += linear(f"{layer}.self_attn_norm", f"{their_layer}.sa_layer_norm")
        found += linear(f"{layer}.feed_forward.up_proj", f"{their_layer}.ffn.lin1")
        found += linear(f"{layer}.feed_forward.down_proj", f"{their_layer}.ffn.lin2")
        found += linear(f"{layer}.feed_forward_norm", f"{their_layer}.output_layer_norm")
    found += linear("transform.dense", "vocab_transform")
    found += linear("transform.norm", "vocab_layer_norm")
    found.append(pair("lm_head.bias", "vocab_projector.bias"))
    if not tied:
        found.append(pair("lm_head.weight", "vocab_projector.weight"))
    found += linear("model.pooler.dense", "pre_classifier")
    return found + linear(classifier_of(architecture), "classifier") + linear("qa_outputs", "qa_outputs")
