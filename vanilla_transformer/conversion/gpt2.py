"""GPT-2 (Radford et al. 2019): a pre-norm decoder with learned positions, its linear maps stored
transposed and queries, keys and values as one."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .fields import Fields, require
from .tensors import (
    SAME,
    THIRDS,
    THIRDS_TRANSPOSED,
    TRANSPOSED,
    Op,
    TensorMap,
    linear,
    scaled,
    tensor_map,
    tokens,
)

CONFIG = "GPT2Config"
ARCHITECTURES = {
    "GPT2Model": "VanillaDecoderModel",
    "GPT2LMHeadModel": "VanillaDecoderForCausalLM",
    "GPT2ForSequenceClassification": "VanillaDecoderForSequenceClassification",
    "GPT2ForTokenClassification": "VanillaDecoderForTokenClassification",
    "GPT2ForQuestionAnswering": "VanillaDecoderForQuestionAnswering",
}
PREFIX = "transformer."
UNUSED = r"h\.\d+\.attn\.(bias|masked_bias)"  # stored causal masks


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    require(theirs, add_cross_attention=False)
    dropouts = (getattr(theirs, name, None) for name in ("classifier_dropout", "hidden_dropout"))
    return {
        "hidden_size": theirs.n_embd,
        "intermediate_size": theirs.n_inner or 4 * theirs.n_embd,
        "num_hidden_layers": theirs.n_layer,
        "num_attention_heads": theirs.n_head,
        "hidden_act": theirs.activation_function,
        "position_embedding_type": "learned",
        "max_position_embeddings": theirs.n_positions,
        "scale_embedding": False,
        "norm_first": True,
        "layer_norm_eps": theirs.layer_norm_epsilon,
        "initializer_range": theirs.initializer_range,
        "lm_head_bias": False,
        "embedding_dropout": theirs.embd_pdrop,
        "dropout": theirs.resid_pdrop,
        "attention_dropout": theirs.attn_pdrop,
        "classifier_dropout": next((dropout for dropout in dropouts if dropout is not None), 0.1),
    }


def to_source_config(ours: VanillaTransformerConfig, architecture: str) -> Fields:
    require(
        ours,
        position_embedding_type="learned",
        position_ids_from="place",
        scale_embedding=False,
        embedding_norm=False,
        norm_first=True,
        final_norm=True,
        linear_bias=True,
        attention_bias=True,
        sliding_window=None,
        add_cross_attention=False,
        activation_dropout=0,
    )
    if architecture == "GPT2LMHeadModel":
        require(ours, lm_head_bias=False)
    return {
        "n_embd": ours.hidden_size,
        "n_inner": ours.intermediate_size,
        "n_layer": ours.num_hidden_layers,
        "n_head": ours.num_attention_heads,
        "activation_function": ours.hidden_act,
        "n_positions": ours.max_position_embeddings,
        "layer_norm_epsilon": ours.layer_norm_eps,
        "initializer_range": ours.initializer_range,
        "embd_pdrop": ours.embedding_dropout,
        "resid_pdrop": ours.dropout,
        "attn_pdrop": ours.attention_dropout,
        "classifier_dropout": ours.classifier_dropout,
    }


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    maps = [
        *tokens("wte.weight", "lm_head.weight", theirs.tie_word_embeddings),
        tensor_map("model.embeddings.embed_positions.weight", "wpe.weight"),
        *linear("model.norm", "ln_f"),
        tensor_map("score.weight", "score.weight"),
        *linear("classifier", "classifier"),
        *linear("qa_outputs", "qa_outputs"),
    ]
    for i in range(ours.num_hidden_layers):
        layer = f"model.layers.{i}"
        their_layer = f"h.{i}"
        # the queries make up for another division of the scores than by sqrt(d_k)
        query_scale = 1.0 if theirs.scale_attn_weights else ours.head_dim**0.5
        if theirs.scale_attn_by_inverse_layer_idx:
            query_scale /= i + 1
        for part, op in (("weight", THIRDS_TRANSPOSED), ("bias", THIRDS)):
            projections = tuple(
                f"{layer}.self_attn.{projection}_proj.{part}" for projection in "qkv"
            )
            maps.append(
                TensorMap(
                    projections, f"{their_layer}.attn.c_attn.{part}", first_scaled(op, query_scale)
                )
            )
        for name, their_name in (
            ("self_attn.o_proj", "attn.c_proj"),
            ("feed_forward.up_proj", "mlp.c_fc"),
            ("feed_forward.down_proj", "mlp.c_proj"),
        ):
            maps.append(
                tensor_map(
                    f"{layer}.{name}.weight", f"{their_layer}.{their_name}.weight", TRANSPOSED
                )
            )
            maps.append(tensor_map(f"{layer}.{name}.bias", f"{their_layer}.{their_name}.bias"))
        maps += linear(f"{layer}.self_attn_norm", f"{their_layer}.ln_1")
        maps += linear(f"{layer}.feed_forward_norm", f"{their_layer}.ln_2")
    return maps


def first_scaled(op: Op, factor: float) -> Op:
    if factor == 1:
        return op
    scale = scaled(factor)
    return Op(
        f"{op.name}, queries {scale.name}",
        lambda t: tuple(
            (scale if i == 0 else SAME).to_ours(part)[0] for i, part in enumerate(op.to_ours(t))
        ),
        lambda query, *others: op.to_theirs(scale.to_theirs(query), *others),
    )
