"""GTE (Zhang et al. 2024, mGTE), "new" in older files of the Hub: BERT with rotary positions and
gated feed-forward networks, whose first maps have no biases."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from . import bert
from .fields import Fields, require
from .rotary import HALVES, fused, no_bias, paired, paired_thirds, renamed, rotary_bert_fields
from .tensors import SAME, TensorMap, linear, tensor_map

CONFIG = "GteConfig"
ARCHITECTURES = {
    "GteModel": "VanillaEncoderModel",
    "GteForMaskedLM": "VanillaEncoderForMaskedLM",
    "GteForSequenceClassification": "VanillaEncoderForSequenceClassification",
    "GteForTokenClassification": "VanillaEncoderForTokenClassification",
}
PREFIX = "gte."
HUB_PREFIX = "new."


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    # fields of the Hub's code, which transformers does not have
    require(
        theirs,
        position_embedding_type=(None, "rope"),
        layer_norm_type=(None, "layer_norm"),
        logn_attention_scale=(None, False),
        pack_qkv=(None, True),
    )
    has_pooler = architecture != "GteModel" or "pooler.dense.weight" in names
    return bert.encoder_fields(theirs) | {
        "gated": True,
        "activation_dropout": theirs.hidden_dropout_prob,
        "position_embedding_type": "rotary",
        "rope_parameters": rope(theirs),
        "max_position_embeddings": theirs.max_position_embeddings,
        "pooler_act": "tanh" if has_pooler else None,
        "lm_transform_act": "gelu",
    }


def rope(theirs: PreTrainedConfig) -> Fields:
    """Return our `rope_parameters`.

    The scaling "ntk" of the Hub's code multiplies the base by the factor, and divides all angles by
    factor^(2 / head_dim). transformers does not have it.
    """
    parameters = theirs.rope_parameters
    if parameters["rope_type"] != "ntk":
        return parameters
    if parameters.get("mixed_b") is not None:
        raise ValueError(f"mixed_b={parameters['mixed_b']} cannot be converted, expected None")
    factor = parameters["factor"]
    return {
        "rope_type": "linear",
        "rope_theta": parameters["rope_theta"] * factor,
        "factor": factor ** (2 * theirs.num_attention_heads / theirs.hidden_size),
    }


def to_source_config(ours: VanillaTransformerConfig, architecture: str) -> Fields:
    require(
        ours,
        head_dim=ours.hidden_size // ours.num_attention_heads,
        linear_bias=True,
        attention_bias=True,
        activation_dropout=ours.dropout,
    )
    fields = rotary_bert_fields(ours, architecture, "gelu")
    return fields | {"type_vocab_size": ours.type_vocab_size}


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
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
        *renamed("transform.norm", "lm_head.layer_norm", "lm_head.norm"),
        tensor_map("lm_head.bias", "lm_head.decoder.bias"),
        *linear("classifier", "classifier"),
    ]
    if not tied:
        maps.append(tensor_map("lm_head.weight", "lm_head.decoder.weight"))
    for i in range(ours.num_hidden_layers):
        maps += layer_maps(ours, f"model.layers.{i}", f"layers.{i}", f"encoder.layer.{i}")
    return maps


def layer_maps(
    ours: VanillaTransformerConfig, layer: str, theirs: str, hub: str
) -> list[TensorMap]:
    """Return the maps of our module `layer`: `theirs` in the class, `hub` in files of the Hub."""
    order, thirds, both = paired(ours.head_dim), paired_thirds(ours.head_dim), ("weight", "bias")
    parts = {f"{part}_proj": f"{theirs}.self_attn.{part}_proj" for part in "qkv"}
    gates = {f"{part}_proj": f"{theirs}.mlp.{part}_proj" for part in ("up", "gate")}
    network = f"{layer}.feed_forward"
    return [
        *fused(f"{layer}.self_attn", parts, f"{hub}.attention.qkv_proj", thirds, both, order),
        *fused(network, gates, f"{hub}.mlp.up_gate_proj", HALVES, both[:1], SAME),
        *(no_bias(f"{network}.{name}", ours.intermediate_size) for name in gates),
        *renamed(
            f"{layer}.self_attn.o_proj", f"{theirs}.self_attn.o_proj", f"{hub}.attention.o_proj"
        ),
        *renamed(f"{network}.down_proj", f"{theirs}.mlp.down_proj", f"{hub}.mlp.down_proj"),
        *renamed(f"{layer}.self_attn_norm", f"{theirs}.post_attention_layernorm", f"{hub}.attn_ln"),
        *renamed(f"{layer}.feed_forward_norm", f"{theirs}.post_mlp_layernorm", f"{hub}.mlp_ln"),
    ]
