"""DistilBERT (Sanh et al. 2019): BERT without token types and pooler; its sentence heads have a
linear map and a ReLU."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .bert import classifier_name
from .fields import Fields
from .tensors import TensorMap, linear, tensor_map, tokens

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


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
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


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    maps = [
        *tokens(
            "embeddings.word_embeddings.weight",
            "vocab_projector.weight",
            theirs.tie_word_embeddings,
        ),
        tensor_map(
            "model.embeddings.embed_positions.weight", "embeddings.position_embeddings.weight"
        ),
        *linear("model.embeddings.norm", "embeddings.LayerNorm"),
    ]
    for i in range(ours.num_hidden_layers):
        layer = f"model.layers.{i}"
        their_layer = f"transformer.layer.{i}"
        for projection in "qkv":
            maps += linear(
                f"{layer}.self_attn.{projection}_proj", f"{their_layer}.attention.{projection}_lin"
            )
        maps += linear(f"{layer}.self_attn.o_proj", f"{their_layer}.attention.out_lin")
        maps += linear(f"{layer}.self_attn_norm", f"{their_layer}.sa_layer_norm")
        maps += linear(f"{layer}.feed_forward.up_proj", f"{their_layer}.ffn.lin1")
        maps += linear(f"{layer}.feed_forward.down_proj", f"{their_layer}.ffn.lin2")
        maps += linear(f"{layer}.feed_forward_norm", f"{their_layer}.output_layer_norm")
    maps += linear("transform.dense", "vocab_transform")
    maps += linear("transform.norm", "vocab_layer_norm")
    maps.append(tensor_map("lm_head.bias", "vocab_projector.bias"))
    maps += linear("model.pooler.dense", "pre_classifier")
    return (
        maps
        + linear(classifier_name(architecture), "classifier")
        + linear("qa_outputs", "qa_outputs")
    )
