"""BERT (Devlin et al. 2019): an encoder with learned positions, token types, post-norm, a pooler
and a masked-LM transform."""

from . import jina_bert
from .fields import (
    Fields,
    Names,
    Ours,
    TensorNames,
    Theirs,
    our_classes,
    read_fields,
    require,
    same_names,
    write_fields,
)
from .tensors import TensorMap, layers, linear, modules, tensor_map, tokens, zeros

HEADS = (
    *("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    *("ForQuestionAnswering", "ForMultipleChoice"),
)


rename_fields = jina_bert.rename_fields
CLASSES = our_classes("Encoder", *HEADS, "ForPreTraining", "ForNextSentencePrediction")
POSITIONS = tensor_map(
    "model.embeddings.embed_positions.weight", "embeddings.position_embeddings.weight"
)
STACK = {
    **same_names("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    **same_names("hidden_act", "initializer_range"),
    "embedding_dropout": "hidden_dropout_prob",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
ENCODER = STACK | same_names("layer_norm_eps", "max_position_embeddings")
OUTPUTS = {
    "self_attn.o_proj": "attention.output.dense",
    "self_attn_norm": "attention.output.LayerNorm",
    "feed_forward.up_proj": "intermediate.dense",
    "feed_forward.down_proj": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
LAYER = OUTPUTS | {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    require_encoder(theirs, "alibi")
    fields = encoder_fields(theirs) | {
        "pooler_act": pooler_act(theirs, names),
        "lm_transform_act": theirs.hidden_act,
    }
    is_jina = jina_bert.has_alibi(vars(theirs))
    return fields | jina_bert.fields(theirs, names) if is_jina else fields


def require_encoder(theirs: Theirs, *positions: str) -> None:
    """Raise ValueError if the source config is a decoder, has cross-attention, or has positions
    that are neither absolute nor of the kinds `positions`."""
    require(
        theirs,
        is_decoder=False,
        add_cross_attention=False,
        position_embedding_type=(None, "absolute", *positions),
    )


def encoder_fields(theirs: Theirs) -> Fields:
    """Return the fields of our config that BERT and its relatives share.

    The fields of heads are not among them.
    """
    return stack_fields(theirs, ENCODER) | {
        "type_vocab_size": getattr(theirs, "type_vocab_size", 0),
        "scale_embedding": False,
        "embedding_norm": True,
    }


def pooler_act(
    theirs: Theirs, names: TensorNames, weight: str = "pooler.dense.weight"
) -> str | None:
    """Return our `pooler_act`: "tanh" for classes with a head, and for base models whose tensors
    `names` have the `weight` of the pooler, else None."""
    return "tanh" if not theirs.architectures[0].endswith("Model") or weight in names else None


def stack_fields(theirs: Theirs, names: Names) -> Fields:
    """Return the fields of ours in the table `names`, learned positions, and the classifier's
    dropout, which is by default that of the layers."""
    classifier_dropout = getattr(theirs, "classifier_dropout", None)
    return read_fields(theirs, names) | {
        "position_embedding_type": "learned",
        "classifier_dropout": theirs.hidden_dropout_prob
        if classifier_dropout is None
        else classifier_dropout,
    }


def to_source_config(ours: Ours) -> Fields:
    return write_fields(ours, ENCODER) | {
        "type_vocab_size": max(ours.type_vocab_size, 1),
        "classifier_dropout": ours.classifier_dropout,
    }


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    head = "cls.predictions"
    maps = body(ours, f"{head}.decoder.weight")
    if ours.position_embedding_type == "relative":
        maps += jina_bert.tensor_maps(ours)
    return [
        *maps,
        POSITIONS,
        *vocabulary_bias(ours, head),
        *modules(
            {
                "model.pooler.dense": "pooler.dense",
                "transform.dense": f"{head}.transform.dense",
                "transform.norm": f"{head}.transform.LayerNorm",
                "next_sentence": "cls.seq_relationship",
                classifier_name(theirs): "classifier",
                "qa_outputs": "qa_outputs",
            }
        ),
    ]


def classifier_name(theirs: Theirs) -> str:
    is_choice = theirs.architectures[0].endswith("MultipleChoice")
    return "choice_classifier" if is_choice else "classifier"


def vocabulary_bias(ours: Ours, head: str) -> list[TensorMap]:
    """Return the tensor maps of the bias of the vocabulary projection in the source's module
    `head`.

    Files have it under two names, `{head}.bias` and `{head}.decoder.bias`. With tied embeddings
    both are one tensor; otherwise the second is used if present.
    """
    if ours.tie_word_embeddings:
        return [tensor_map("lm_head.bias", f"{head}.bias", also=(f"{head}.decoder.bias",))]
    return [
        tensor_map("lm_head.bias", f"{head}.decoder.bias", otherwise=(f"{head}.bias",)),
        TensorMap((), f"{head}.bias", zeros(ours.vocab_size)),
    ]


def token_types(ours: Ours) -> TensorMap:
    """Return the tensor map of the token types; without types here, theirs has one of zeros."""
    types = "embeddings.token_type_embeddings.weight"
    if ours.type_vocab_size:
        return tensor_map("model.embeddings.embed_token_types.weight", types)
    return TensorMap((), types, zeros(1, ours.position_size))


def body(ours: Ours, head: str) -> list[TensorMap]:
    """Return the tensor maps of layers and of embeddings without positions, as in BERT, RoBERTa and
    ELECTRA.

    `head` is the source's name of the projection to the vocabulary.
    """
    return [
        *embeddings(ours, head),
        *layers(LAYER, "model.layers", "encoder.layer", ours.num_hidden_layers),
    ]


def embeddings(ours: Ours, head: str) -> list[TensorMap]:
    """Return the tensor maps of the embeddings without positions, and of the projection to the
    vocabulary `head`."""
    return [
        *tokens(ours, "embeddings.word_embeddings.weight", head),
        token_types(ours),
        *linear("model.embeddings.norm", "embeddings.LayerNorm"),
    ]
