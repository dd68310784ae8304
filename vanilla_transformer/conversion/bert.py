"""BERT (Devlin et al. 2019): an encoder with learned positions, token types, post-norm, a pooler
and a masked-LM transform."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from . import jina_bert
from .fields import Fields, require
from .tensors import TensorMap, linear, tensor_map, zeros

CONFIG = "BertConfig"
ARCHITECTURES = {
    "BertModel": "VanillaEncoderModel",
    "BertForPreTraining": "VanillaEncoderForPreTraining",
    "BertForMaskedLM": "VanillaEncoderForMaskedLM",
    "BertForNextSentencePrediction": "VanillaEncoderForNextSentencePrediction",
    "BertForSequenceClassification": "VanillaEncoderForSequenceClassification",
    "BertForTokenClassification": "VanillaEncoderForTokenClassification",
    "BertForQuestionAnswering": "VanillaEncoderForQuestionAnswering",
    "BertForMultipleChoice": "VanillaEncoderForMultipleChoice",
}
PREFIX = "bert."
POOLED = (
    "Model",
    "PreTraining",
    "NextSentencePrediction",
    "SequenceClassification",
    "MultipleChoice",
)


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    require_encoder(theirs, "alibi")
    has_pooler = architecture != "BertModel" or "pooler.dense.weight" in names
    fields = encoder_fields(theirs) | {
        "max_position_embeddings": theirs.max_position_embeddings,
        "pooler_act": "tanh" if has_pooler else None,
        "lm_transform_act": theirs.hidden_act,
    }
    is_jina = jina_bert.has_alibi(vars(theirs))
    return fields | jina_bert.fields(theirs, names) if is_jina else fields


def rename_fields(content: Fields) -> Fields:
    """Return the `content` of a config.json with BERT's classes for those of JinaBERT."""
    return jina_bert.rename_classes(content) if jina_bert.has_alibi(content) else content


def require_encoder(theirs: PreTrainedConfig, *positions: str) -> None:
    """Raise ValueError if the source config is a decoder, has cross-attention, or has positions
    that are neither absolute nor of the kinds `positions`."""
    require(
        theirs,
        is_decoder=False,
        add_cross_attention=False,
        position_embedding_type=(None, "absolute", *positions),
    )


def encoder_fields(theirs: PreTrainedConfig) -> Fields:
    """Return the fields of our config that BERT, RoBERTa, ELECTRA and MPNet share.

    The number of positions and the fields of heads are not among them.
    """
    return stack_fields(theirs) | {
        "type_vocab_size": getattr(theirs, "type_vocab_size", 0),
        "scale_embedding": False,
        "embedding_norm": True,
        "layer_norm_eps": theirs.layer_norm_eps,
    }


def stack_fields(theirs: PreTrainedConfig) -> Fields:
    dropout = theirs.hidden_dropout_prob
    classifier_dropout = getattr(theirs, "classifier_dropout", None)
    return {
        "hidden_size": theirs.hidden_size,
        "intermediate_size": theirs.intermediate_size,
        "num_hidden_layers": theirs.num_hidden_layers,
        "num_attention_heads": theirs.num_attention_heads,
        "hidden_act": theirs.hidden_act,
        "position_embedding_type": "learned",
        "initializer_range": theirs.initializer_range,
        "embedding_dropout": dropout,
        "dropout": dropout,
        "attention_dropout": theirs.attention_probs_dropout_prob,
        "classifier_dropout": dropout if classifier_dropout is None else classifier_dropout,
    }


def to_source_config(ours: VanillaTransformerConfig, architecture: str) -> Fields:
    require(ours, position_embedding_type="learned", position_ids_from="place")
    return source_fields(ours, architecture, ours.hidden_act) | {
        "max_position_embeddings": ours.max_position_embeddings,
        "type_vocab_size": max(ours.type_vocab_size, 1),
        "classifier_dropout": ours.classifier_dropout,
    }


def source_fields(
    ours: VanillaTransformerConfig, architecture: str, lm_transform_act: str
) -> Fields:
    """Return the source's config fields that BERT, RoBERTa, MPNet and ALBERT share.

    `architecture` is the source's class. `lm_transform_act` is the activation in the family's
    masked-LM head. Raises ValueError for a field of ours that these families cannot represent.
    """
    if architecture.endswith(POOLED):
        require(ours, pooler_act="tanh")
    return encoder_source_fields(ours, architecture, lm_transform_act)


def encoder_source_fields(
    ours: VanillaTransformerConfig, architecture: str, lm_transform_act: str
) -> Fields:
    """Return what `source_fields` returns, also for DeBERTa, whose pooler has any activation."""
    require(
        ours,
        scale_embedding=False,
        embedding_norm=True,
        norm_first=False,
        final_norm=False,
        linear_bias=True,
        attention_bias=True,
        sliding_window=None,
        token_transform_act=None,
        classifier_pooling="cls",
        activation_dropout=0,
        embedding_dropout=ours.dropout,
    )
    if architecture.endswith(("MaskedLM", "PreTraining")):
        require(ours, lm_transform_act=lm_transform_act, lm_head_bias=True)
    return source_sizes(ours)


def source_sizes(ours: VanillaTransformerConfig) -> Fields:
    """Return the source's config fields that BERT, its relatives and ViT share: widths, number of
    layers and heads, activation, norm epsilon, initializer range and dropouts."""
    return {
        "hidden_size": ours.hidden_size,
        "intermediate_size": ours.intermediate_size,
        "num_hidden_layers": ours.num_hidden_layers,
        "num_attention_heads": ours.num_attention_heads,
        "hidden_act": ours.hidden_act,
        "layer_norm_eps": ours.layer_norm_eps,
        "initializer_range": ours.initializer_range,
        "hidden_dropout_prob": ours.dropout,
        "attention_probs_dropout_prob": ours.attention_dropout,
    }


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    tied = theirs.tie_word_embeddings
    maps = body(ours, also=("cls.predictions.decoder.weight",) if tied else ())
    if ours.position_embedding_type == "relative":
        maps += jina_bert.tensor_maps(ours)
    maps.append(
        tensor_map(
            "model.embeddings.embed_positions.weight", "embeddings.position_embeddings.weight"
        )
    )
    maps += linear("model.pooler.dense", "pooler.dense")
    maps += linear("transform.dense", "cls.predictions.transform.dense")
    maps += linear("transform.norm", "cls.predictions.transform.LayerNorm")
    maps += vocabulary_bias(ours, tied, "cls.predictions")
    if not tied:
        maps.append(tensor_map("lm_head.weight", "cls.predictions.decoder.weight"))
    maps += linear("next_sentence", "cls.seq_relationship")
    return (
        maps
        + linear(classifier_name(architecture), "classifier")
        + linear("qa_outputs", "qa_outputs")
    )


def classifier_name(architecture: str) -> str:
    return "choice_classifier" if architecture.endswith("MultipleChoice") else "classifier"


def vocabulary_bias(ours: VanillaTransformerConfig, tied: bool, head: str) -> list[TensorMap]:
    """Return the tensor maps of the bias of the vocabulary projection in the source's module
    `head`.

    Files have it under two names, `{head}.bias` and `{head}.decoder.bias`. With `tied` embeddings
    both are one tensor; otherwise the second is used if present.
    """
    if tied:
        return [tensor_map("lm_head.bias", f"{head}.bias", also=(f"{head}.decoder.bias",))]
    return [
        tensor_map("lm_head.bias", f"{head}.decoder.bias", otherwise=(f"{head}.bias",)),
        TensorMap((), f"{head}.bias", zeros(ours.vocab_size)),
    ]


def token_types(ours: VanillaTransformerConfig) -> TensorMap:
    """Return the tensor map of the token types; without types here, theirs has one of zeros."""
    types = "embeddings.token_type_embeddings.weight"
    if ours.type_vocab_size:
        return tensor_map("model.embeddings.embed_token_types.weight", types)
    return TensorMap((), types, zeros(1, ours.position_size))


def body(ours: VanillaTransformerConfig, also: tuple[str, ...] = ()) -> list[TensorMap]:
    """Return the tensor maps of layers and of embeddings without positions, as in BERT, RoBERTa and
    ELECTRA.

    `also` are further names of the token embeddings in the source.
    """
    maps = [
        tensor_map(
            "model.embeddings.embed_tokens.weight", "embeddings.word_embeddings.weight", also=also
        )
    ]
    maps.append(token_types(ours))
    maps += linear("model.embeddings.norm", "embeddings.LayerNorm")
    for i in range(ours.num_hidden_layers):
        layer = f"model.layers.{i}"
        their_layer = f"encoder.layer.{i}"
        for projection, name in (("q", "query"), ("k", "key"), ("v", "value")):
            maps += linear(
                f"{layer}.self_attn.{projection}_proj", f"{their_layer}.attention.self.{name}"
            )
        maps += layer_outputs(layer, their_layer)
    return maps


def layer_outputs(ours: str, theirs: str) -> list[TensorMap]:
    """Return the tensor maps of all modules of a layer but the queries, keys and values. `ours` and
    `theirs` are the layer's names."""
    return [
        *linear(f"{ours}.self_attn.o_proj", f"{theirs}.attention.output.dense"),
        *linear(f"{ours}.self_attn_norm", f"{theirs}.attention.output.LayerNorm"),
        *linear(f"{ours}.feed_forward.up_proj", f"{theirs}.intermediate.dense"),
        *linear(f"{ours}.feed_forward.down_proj", f"{theirs}.output.dense"),
        *linear(f"{ours}.feed_forward_norm", f"{theirs}.output.LayerNorm"),
    ]
