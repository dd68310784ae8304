"""OPT (Zhang et al. 2022): a decoder with learned positions, counted from the mask; pre-norm,
except for one size, whose token embeddings have a width of their own. No token reads row 0 of its
table, and padding reads row 1."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .fields import Fields, require
from .tensors import TensorMap, drop_rows, linear, tensor_map, tokens

CONFIG = "OPTConfig"
ARCHITECTURES = {
    "OPTModel": "VanillaDecoderModel",
    "OPTForCausalLM": "VanillaDecoderForCausalLM",
    "OPTForSequenceClassification": "VanillaDecoderForSequenceClassification",
    "OPTForQuestionAnswering": "VanillaDecoderForQuestionAnswering",
}
PREFIX = "model."


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    require(theirs, layer_norm_elementwise_affine=True)
    norm_first = theirs.do_layer_norm_before
    return {
        "hidden_size": theirs.hidden_size,
        "embedding_size": theirs.word_embed_proj_dim,
        "intermediate_size": theirs.ffn_dim,
        "num_hidden_layers": theirs.num_hidden_layers,
        "num_attention_heads": theirs.num_attention_heads,
        "hidden_act": theirs.activation_function,
        "position_embedding_type": "learned",
        "max_position_embeddings": theirs.max_position_embeddings,
        "position_ids_from": "mask",
        "scale_embedding": False,
        "norm_first": norm_first,
        "final_norm": norm_first and not theirs._remove_final_layer_norm,
        "linear_bias": theirs.enable_bias,
        "initializer_range": theirs.init_std,
        "lm_head_bias": False,
        "embedding_dropout": 0.0,
        "dropout": theirs.dropout,
        "attention_dropout": theirs.attention_dropout,
    }


def to_source_config(ours: VanillaTransformerConfig, architecture: str) -> Fields:
    require(
        ours,
        position_embedding_type="learned",
        position_ids_from="mask",
        scale_embedding=False,
        embedding_norm=False,
        attention_bias=ours.linear_bias,
        layer_norm_eps=1e-5,
        sliding_window=None,
        add_cross_attention=False,
        activation_dropout=0,
        embedding_dropout=0,
    )
    if architecture == "OPTForCausalLM":
        require(ours, lm_head_bias=False)
    if not ours.norm_first:
        require(ours, final_norm=False)
    return {
        "hidden_size": ours.hidden_size,
        "word_embed_proj_dim": ours.embedding_size,
        "ffn_dim": ours.intermediate_size,
        "num_hidden_layers": ours.num_hidden_layers,
        "num_attention_heads": ours.num_attention_heads,
        "activation_function": ours.hidden_act,
        "max_position_embeddings": ours.max_position_embeddings,
        "do_layer_norm_before": ours.norm_first,
        "_remove_final_layer_norm": ours.norm_first and not ours.final_norm,
        "enable_bias": ours.linear_bias,
        "init_std": ours.initializer_range,
        "dropout": ours.dropout,
        "attention_dropout": ours.attention_dropout,
        "layerdrop": 0.0,
    }


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    bias = ours.linear_bias
    maps = [
        *tokens("decoder.embed_tokens.weight", "lm_head.weight", theirs.tie_word_embeddings),
        tensor_map(
            "model.embeddings.embed_positions.weight",
            "decoder.embed_positions.weight",
            drop_rows(1),
        ),
        *linear("model.norm", "decoder.final_layer_norm"),
        tensor_map("model.embeddings.projection.weight", "decoder.project_in.weight"),
        tensor_map("model.output_projection.weight", "decoder.project_out.weight"),
        tensor_map("score.weight", "score.weight"),
        *linear("qa_outputs", "qa_outputs"),
    ]
    for i in range(ours.num_hidden_layers):
        layer = f"model.layers.{i}"
        their_layer = f"decoder.layers.{i}"
        for projection, name in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
            maps += linear(
                f"{layer}.self_attn.{projection}_proj", f"{their_layer}.self_attn.{name}_proj", bias
            )
        maps += linear(f"{layer}.self_attn_norm", f"{their_layer}.self_attn_layer_norm")
        maps += linear(f"{layer}.feed_forward.up_proj", f"{their_layer}.fc1", bias)
        maps += linear(f"{layer}.feed_forward.down_proj", f"{their_layer}.fc2", bias)
        maps += linear(f"{layer}.feed_forward_norm", f"{their_layer}.final_layer_norm")
    return maps
