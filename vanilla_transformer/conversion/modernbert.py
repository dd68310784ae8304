"""ModernBERT (Warner et al. 2024): a pre-norm encoder with rotary positions and gated feed-forward
networks, most of whose layers look at a window. The norm of the embeddings stands for that before
the first attention."""

from . import bert
from .fields import Fields, Ours, TensorNames, Theirs, our_classes, require, same_names
from .rotary import HALVES, no_bias, paired_thirds
from .tensors import TensorMap, joined, linear, tensor_map, tokens

CLASSES = our_classes("Encoder", *bert.HEADS)
FIELDS = {
    "hidden_act": "hidden_activation",
    "layer_norm_eps": "norm_eps",
    "linear_bias": "mlp_bias",
    "activation_dropout": "mlp_dropout",
    "lm_head_bias": "decoder_bias",
    **same_names(
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("attention_bias", "max_position_embeddings", "embedding_dropout", "attention_dropout"),
        *("classifier_dropout", "classifier_pooling", "initializer_range"),
    ),
}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    if theirs.local_attention % 2:
        raise ValueError(
            f"local_attention={theirs.local_attention} cannot be converted, expected an even "
            "number: half of it on both sides of a token"
        )
    is_lm = theirs.architectures[0].endswith("MaskedLM")
    act = theirs.classifier_activation
    return {
        "gated": True,
        "norm_first": True,
        "skip_first_prenorm": True,
        "position_embedding_type": "rotary",
        "rope_parameters": theirs.rope_parameters,
        "layer_types": theirs.layer_types,
        "sliding_window": theirs.local_attention // 2,
        "scale_embedding": False,
        "embedding_norm": True,
        "dropout": 0.0,
        "lm_transform_act": act if is_lm else None,
        "classifier_act": None if is_lm else act,
    }


def to_source_config(ours: Ours) -> Fields:
    require(ours, position_embedding_type="rotary")
    architecture = ours.architectures[0]
    act = ours.lm_transform_act if architecture.endswith("MaskedLM") else ours.classifier_act
    if act is None and not architecture.endswith("Model"):
        raise ValueError("lm_transform_act or classifier_act is None, expected an activation")
    return {
        "norm_bias": True,  # zeros, of a checkpoint that came from a model without
        "rope_parameters": {
            name: ours.rope_parameters.get(name, ours.rope_parameters)
            for name in ("full_attention", "sliding_attention")
        },
        "layer_types": ours.types_of_layers(ours.num_hidden_layers),
        "local_attention": 2 * (ours.sliding_window or 1),
        "classifier_activation": act or "gelu",
        "classifier_bias": True,
    }


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    size, both = ours.hidden_size, ("weight", "bias")

    def biased(name: str, their_name: str, has_bias: bool) -> list[TensorMap]:
        maps = linear(name, their_name, has_bias)
        return maps if has_bias else [*maps, no_bias(name, size)]

    def norm(name: str, their_name: str) -> list[TensorMap]:
        return biased(name, their_name, theirs.norm_bias)

    head = "qa_outputs" if "Question" in theirs.architectures[0] else bert.classifier_name(theirs)
    maps = [
        *tokens(ours, "embeddings.tok_embeddings.weight", "decoder.weight"),
        *norm("model.embeddings.norm", "embeddings.norm"),
        *norm("model.norm", "final_norm"),
        *norm("transform.norm", "head.norm"),
        *biased("transform.dense", "head.dense", theirs.classifier_bias),
        *linear(head, "classifier"),
        tensor_map("lm_head.bias", "decoder.bias"),
    ]
    for i in range(ours.num_hidden_layers):
        layer, source = f"model.layers.{i}", f"layers.{i}"
        queries = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
        gates = [f"{layer}.feed_forward.{name}_proj" for name in ("gate", "up")]
        ends = both[: 1 + theirs.attention_bias]
        maps += joined(queries, f"{source}.attn.Wqkv", paired_thirds(ours.head_dim), ends)
        maps += joined(gates, f"{source}.mlp.Wi", HALVES, both[: 1 + theirs.mlp_bias])
        maps += linear(f"{layer}.self_attn.o_proj", f"{source}.attn.Wo", theirs.attention_bias)
        maps += linear(f"{layer}.feed_forward.down_proj", f"{source}.mlp.Wo", theirs.mlp_bias)
        maps += norm(f"{layer}.self_attn_norm", f"{source}.attn_norm") if i else []
        maps += norm(f"{layer}.feed_forward_norm", f"{source}.mlp_norm")
    return maps
