"""OPT (Zhang et al. 2022): a decoder with learned positions, counted from the mask; pre-norm,
except for one size, whose token embeddings have a width of their own. No token reads row 0 of its
table, and padding reads row 1."""

from . import bart
from .fields import Fields, Ours, TensorNames, Theirs, our_classes, require, same_names
from .tensors import TensorMap, drop_rows, layers, linear, tensor_map, tokens

CLASSES = our_classes(
    "Decoder", "Model", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering"
)
FIELDS = {
    "embedding_size": "word_embed_proj_dim",
    "intermediate_size": "ffn_dim",
    "hidden_act": "activation_function",
    "norm_first": "do_layer_norm_before",
    "linear_bias": "enable_bias",
    "initializer_range": "init_std",
    **same_names(
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        *("dropout", "attention_dropout"),
    ),
}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    require(theirs, layer_norm_elementwise_affine=True)
    norm_first = theirs.do_layer_norm_before
    return {
        "position_embedding_type": "learned",
        "position_ids_from": "mask",
        "scale_embedding": False,
        "final_norm": norm_first and not theirs._remove_final_layer_norm,
        "lm_head_bias": False,
        "embedding_dropout": 0.0,
    }


def to_source_config(ours: Ours) -> Fields:
    return {
        "_remove_final_layer_norm": ours.norm_first and not ours.final_norm,
        "layerdrop": 0.0,
    }


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    maps = [
        *tokens(ours, "decoder.embed_tokens.weight", "lm_head.weight"),
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
    for names, bias in ((bart.LINEAR, ours.linear_bias), (bart.NORMS, True)):
        maps += layers(names, "model.layers", "decoder.layers", ours.num_hidden_layers, bias)
    return maps
