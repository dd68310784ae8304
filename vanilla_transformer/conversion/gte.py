"""GTE (Zhang et al. 2024, mGTE), "new" on the Hub: BERT with rotary positions and gated
feed-forward networks, whose first maps have no biases."""

from .fields import require
from .rotary import HALVES, no_bias, paired_thirds
from .tensors import TensorMap, linear, tensor_map

CONFIG = "GteConfig"
ARCHITECTURES = {
    "GteModel": "VanillaEncoderModel",
    "GteForMaskedLM": "VanillaEncoderForMaskedLM",
    "GteForSequenceClassification": "VanillaEncoderForSequenceClassification",
    "GteForTokenClassification": "VanillaEncoderForTokenClassification",
}
PREFIX = "gte."
HUB_PREFIX = "new."


def rope(theirs):
    """Return our `rope_parameters`. The Hub's scaling "ntk" multiplies the base by the factor, and
    divides all angles by its power 2 / d."""
    parameters = dict(theirs.rope_parameters)
    if "ntk" in (parameters.get("type"), parameters.get("rope_type")):
        require(theirs, logn_attention_scale=(None, False))
        factor = parameters["factor"]
        if parameters.get("mixed_b") is not None:
            raise ValueError(
                f"rope_parameters={parameters} cannot be converted, expected no mixed_b"
            )
        width = theirs.hidden_size // theirs.num_attention_heads
        return {
            "rope_type": "linear",
            "rope_theta": parameters["rope_theta"] * factor,
            "factor": factor ** (2 / width),
        }
    return parameters


def to_vanilla_config(theirs, architecture, names):
    require(
        theirs, position_embedding_type=(None, "rope"), layer_norm_type=(None, "layer_norm"),
        logn_attention_scale=(None, False), pack_qkv=(None, True),
    )  # fmt: skip
    dropout = theirs.hidden_dropout_prob
    has_pooler = architecture.endswith("SequenceClassification") or "pooler.dense.weight" in names
    return {
        "hidden_size": theirs.hidden_size,
        "intermediate_size": theirs.intermediate_size,
        "num_hidden_layers": theirs.num_hidden_layers,
        "num_attention_heads": theirs.num_attention_heads,
        "hidden_act": theirs.hidden_act,
        "gated": True,
        "layer_norm_eps": theirs.layer_norm_eps,
        "position_embedding_type": "rotary",
        "rope_parameters": rope(theirs),
        "type_vocab_size": theirs.type_vocab_size,
        "scale_embedding": False,
        "embedding_norm": True,
        "embedding_dropout": dropout,
        "dropout": dropout,
        "activation_dropout": dropout,
        "attention_dropout": theirs.attention_probs_dropout_prob,
        "classifier_dropout": dropout
        if theirs.classifier_dropout is None
        else theirs.classifier_dropout,
        "initializer_range": theirs.initializer_range,
        "pooler_act": "tanh" if has_pooler else None,
        "lm_transform_act": "gelu",
    }


def tensor_maps(ours, theirs, architecture):
    tied = theirs.tie_word_embeddings
    maps = [
        tensor_map(
            "model.embeddings.embed_tokens.weight",
            "embeddings.word_embeddings.weight",
            also=("lm_head.decoder.weight",) if tied else (),
        ),
        tensor_map(
            "model.embeddings.embed_token_types.weight", "embeddings.token_type_embeddings.weight"
        ),
        *linear("model.embeddings.norm", "embeddings.LayerNorm"),
        *linear("model.pooler.dense", "pooler.dense"),
        *linear("transform.dense", "lm_head.dense"),
        *linear("transform.norm", "lm_head.norm"),
        tensor_map("lm_head.bias", "lm_head.decoder.bias"),
        *linear("classifier", "classifier"),
    ]
    if not tied:
        maps.append(tensor_map("lm_head.weight", "lm_head.decoder.weight"))
    for i in range(ours.num_hidden_layers):
        layer, source = f"model.layers.{i}", f"encoder.layer.{i}"
        for part in ("weight", "bias"):
            names = tuple(f"{layer}.self_attn.{name}_proj.{part}" for name in "qkv")
            op = paired_thirds(ours.head_dim)
            maps.append(TensorMap(names, f"{source}.attention.qkv_proj.{part}", op))
        names = tuple(f"{layer}.feed_forward.{name}_proj" for name in ("up", "gate"))
        weights = tuple(f"{name}.weight" for name in names)
        maps.append(TensorMap(weights, f"{source}.mlp.up_gate_proj.weight", HALVES))
        maps += [no_bias(name, ours.intermediate_size) for name in names]
        maps += linear(f"{layer}.self_attn.o_proj", f"{source}.attention.o_proj")
        maps += linear(f"{layer}.feed_forward.down_proj", f"{source}.mlp.down_proj")
        maps += linear(f"{layer}.self_attn_norm", f"{source}.attn_ln")
        maps += linear(f"{layer}.feed_forward_norm", f"{source}.mlp_ln")
    return maps
