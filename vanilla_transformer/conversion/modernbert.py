"""ModernBERT (Warner et al. 2024): a pre-norm encoder with rotary positions and gated feed-forward
networks, most of whose layers look at a window. The norm of the embeddings stands for that before
the first attention."""

from .rotary import HALVES, no_bias, paired_thirds
from .tensors import TensorMap, linear, tensor_map

CONFIG = "ModernBertConfig"
ARCHITECTURES = {
    "ModernBertModel": "VanillaEncoderModel",
    "ModernBertForMaskedLM": "VanillaEncoderForMaskedLM",
    "ModernBertForSequenceClassification": "VanillaEncoderForSequenceClassification",
    "ModernBertForTokenClassification": "VanillaEncoderForTokenClassification",
    "ModernBertForQuestionAnswering": "VanillaEncoderForQuestionAnswering",
}
PREFIX = "model."


def to_vanilla_config(theirs, architecture, names):
    is_lm = architecture.endswith("MaskedLM")
    return {
        "hidden_size": theirs.hidden_size,
        "intermediate_size": theirs.intermediate_size,
        "num_hidden_layers": theirs.num_hidden_layers,
        "num_attention_heads": theirs.num_attention_heads,
        "hidden_act": theirs.hidden_activation,
        "gated": True,
        "norm_first": True,
        "skip_first_prenorm": True,
        "layer_norm_eps": theirs.norm_eps,
        "linear_bias": theirs.mlp_bias,
        "attention_bias": theirs.attention_bias,
        "position_embedding_type": "rotary",
        "rope_parameters": theirs.rope_parameters,
        "layer_types": theirs.layer_types,
        "sliding_window": theirs.sliding_window,
        "scale_embedding": False,
        "embedding_norm": True,
        "embedding_dropout": theirs.embedding_dropout,
        "dropout": 0.0,
        "attention_dropout": theirs.attention_dropout,
        "activation_dropout": theirs.mlp_dropout,
        "classifier_dropout": theirs.classifier_dropout,
        "initializer_range": theirs.initializer_range,
        "lm_transform_act": theirs.classifier_activation if is_lm else None,
        "lm_head_bias": theirs.decoder_bias,
        "classifier_act": None if is_lm else theirs.classifier_activation,
        "classifier_pooling": theirs.classifier_pooling,
    }


def tensor_maps(ours, theirs, architecture):
    size, both = ours.hidden_size, ("weight", "bias")

    def norm(name, their_name):
        maps = linear(name, their_name, bias=theirs.norm_bias)
        return maps if theirs.norm_bias else [*maps, no_bias(name, size)]

    maps = [
        tensor_map(
            "model.embeddings.embed_tokens.weight",
            "embeddings.tok_embeddings.weight",
            also=("decoder.weight",) if theirs.tie_word_embeddings else (),
        ),
        *norm("model.embeddings.norm", "embeddings.norm"),
        *norm("model.norm", "final_norm"),
        *norm("transform.norm", "head.norm"),
        *linear("transform.dense", "head.dense", bias=theirs.classifier_bias),
        *linear("qa_outputs" if "Question" in architecture else "classifier", "classifier"),
        tensor_map("lm_head.bias", "decoder.bias"),
    ]
    if not theirs.classifier_bias:
        maps.append(no_bias("transform.dense", size))
    if not theirs.tie_word_embeddings:
        maps.append(tensor_map("lm_head.weight", "decoder.weight"))
    for i in range(ours.num_hidden_layers):
        layer, source = f"model.layers.{i}", f"layers.{i}"
        for part in both[: 1 + theirs.attention_bias]:
            names = tuple(f"{layer}.self_attn.{name}_proj.{part}" for name in "qkv")
            op = paired_thirds(ours.head_dim)
            maps.append(TensorMap(names, f"{source}.attn.Wqkv.{part}", op))
        for part in both[: 1 + theirs.mlp_bias]:
            names = tuple(f"{layer}.feed_forward.{name}_proj.{part}" for name in ("gate", "up"))
            maps.append(TensorMap(names, f"{source}.mlp.Wi.{part}", HALVES))
        maps += linear(f"{layer}.self_attn.o_proj", f"{source}.attn.Wo", theirs.attention_bias)
        maps += linear(f"{layer}.feed_forward.down_proj", f"{source}.mlp.Wo", theirs.mlp_bias)
        maps += norm(f"{layer}.self_attn_norm", f"{source}.attn_norm") if i else []
        maps += norm(f"{layer}.feed_forward_norm", f"{source}.mlp_norm")
    return maps
