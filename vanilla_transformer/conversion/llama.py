"""Llama (Touvron et al. 2023) and SmolLM: a pre-norm decoder with RMSNorm, rotary positions, gated
feed-forward networks and grouped keys and values. Qwen2, Qwen3, Mistral and EuroBERT are its
relatives."""

from collections.abc import Mapping

import transformers

from .fields import Fields, Ours, TensorNames, Theirs, our_classes, same_names, write_fields
from .reranker import row_difference
from .rotary import one_base, paired
from .tensors import SAME, Op, TensorMap, linear, tensor_map, then, tokens

CLASSES = our_classes(
    "Decoder",
    *("Model", "ForCausalLM", "ForSequenceClassification"),
    *("ForTokenClassification", "ForQuestionAnswering"),
)
HUB_PREFIX = "transformer."  # with the head of question answering
# fields that Llama, its relatives and Gemma share
SIZES = {
    "layer_norm_eps": "rms_norm_eps",
    **same_names(
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "rope_parameters", "max_position_embeddings"),
        *("attention_dropout", "initializer_range"),
    ),
}
FIELDS = SIZES | {"attention_bias": "attention_bias", "linear_bias": "mlp_bias"}
NORMS = {
    "self_attn_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    """Return the fields of our config, besides `FIELDS`, that all relatives of Llama share.

    Raises ValueError for a class with code of its own.
    """
    check_code(theirs)
    dropout = getattr(theirs, "classifier_dropout", None)
    return {
        "head_dim": getattr(theirs, "head_dim", None)
        or theirs.hidden_size // theirs.num_attention_heads,
        "hidden_act": getattr(theirs, "hidden_act", None),
        "gated": True,
        "norm_first": True,
        "norm_type": "rms_norm",
        "linear_bias": theirs.model_type == "llama" and theirs.mlp_bias,
        "position_embedding_type": "rotary",
        "scale_embedding": False,
        "lm_head_bias": False,
        "embedding_dropout": 0.0,
        "dropout": 0.0,
        "classifier_dropout": 0.1 if dropout is None else dropout,
    }


def check_code(theirs: Theirs) -> None:
    """Raise ValueError if config.json names a class that is none of transformers, with code of its
    own.

    The tensors of such a class fit a decoder's, but its tokens may attend to both sides.
    """
    names = [name for name in theirs.architectures or () if not hasattr(transformers, str(name))]
    if names and getattr(theirs, "is_causal", True):
        raise ValueError(
            f"architectures={names!r} has code of its own, which may look at both sides, expected "
            "a class of transformers: --set architectures=NAME selects one, --set is_causal=false "
            "makes an encoder"
        )


def windows(theirs: Theirs) -> Fields:
    """Return the fields of ours that say which layers have a window, of a decoder that has them in
    some layers."""
    return {"sliding_window": theirs.sliding_window, "layer_types": theirs.layer_types}


def their_windows(ours: Ours) -> Fields:
    """Return the fields of Qwen2 and Qwen3 that say which layers have a window."""
    return {
        "sliding_window": ours.sliding_window,
        "use_sliding_window": ours.sliding_window is not None,
        "layer_types": kinds_of_layers(ours),
    }


def kinds_of_layers(ours: Ours) -> list[str]:
    """Return the type of each layer. Without a window, a type of ours makes no difference."""
    if ours.sliding_window is None:
        return ["full_attention"] * ours.num_hidden_layers
    return ours.types_of_layers(ours.num_hidden_layers)


def to_source_config(ours: Ours) -> Fields:
    """Return the fields, besides `FIELDS`, that all relatives of Llama share.

    Raises ValueError for positions that none of them has.
    """
    one_base(ours)
    return write_fields(ours, same_names("head_dim", "hidden_act", "classifier_dropout"))


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    return [
        *tokens(ours, "embed_tokens.weight", "lm_head.weight"),
        tensor_map("model.norm.weight", "norm.weight"),
        *heads(theirs),
        *layers(ours),
    ]


def heads(theirs: Theirs) -> list[TensorMap]:
    """Return the tensor maps of the heads, of which "score" classifies sequences or tokens.

    That of a reranker is made of the projection to the vocabulary, see `reranker`.
    """
    if tokens := getattr(theirs, "score_tokens", None):
        matrix = "embed_tokens" if theirs.tie_word_embeddings else "lm_head"
        return [tensor_map("score.weight", f"{matrix}.weight", row_difference(tokens))]
    labels_tokens = theirs.architectures[0].endswith("TokenClassification")
    ours = "classifier" if labels_tokens else "score"
    return [*linear(ours, "score"), *linear("qa_outputs", "qa_outputs")]


def layers(
    ours: Ours,
    norms: Mapping[str, str] = NORMS,
    norm: Op = SAME,
    scale: Op = SAME,
) -> list[TensorMap]:
    """Return the tensor maps of the layers, whose linear maps all relatives of Llama name alike.

    Args:
        norms: names of our norms of a layer, each with theirs.
        norm: the operation that makes our weights of norms of theirs.
        scale: one more operation, on the norm of queries.
    """
    order = paired(ours.head_dim)
    modules = {
        "self_attn.q_proj": ("self_attn.q_proj", order, ours.attention_bias),
        "self_attn.k_proj": ("self_attn.k_proj", order, ours.attention_bias),
        "self_attn.v_proj": ("self_attn.v_proj", SAME, ours.attention_bias),
        "self_attn.o_proj": ("self_attn.o_proj", SAME, ours.attention_bias),
        "feed_forward.gate_proj": ("mlp.gate_proj", SAME, ours.linear_bias),
        "feed_forward.up_proj": ("mlp.up_proj", SAME, ours.linear_bias),
        "feed_forward.down_proj": ("mlp.down_proj", SAME, ours.linear_bias),
        **{name: (their_name, norm, False) for name, their_name in norms.items()},
    }
    if ours.use_qk_norm:
        normed = then(norm, order)
        modules["self_attn.q_norm"] = ("self_attn.q_norm", then(normed, scale), False)
        modules["self_attn.k_norm"] = ("self_attn.k_norm", normed, False)
    return [
        tensor_map(f"model.layers.{i}.{name}.{part}", f"layers.{i}.{their_name}.{part}", op)
        for i in range(ours.num_hidden_layers)
        for name, (their_name, op, has_bias) in modules.items()
        for part in ("weight", "bias")[: 1 + has_bias]
    ]
