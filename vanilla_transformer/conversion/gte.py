"""GTE (Zhang et al. 2024, mGTE), "new" in older files of the Hub: BERT with rotary positions and
gated feed-forward networks, whose first maps have no biases."""

from . import bert
from .fields import Fields, Ours, TensorNames, Theirs, our_classes, require
from .rotary import HALVES, fused, no_bias, one_base, paired, paired_thirds
from .tensors import SAME, TensorMap, linear, modules, tensor_map

CLASSES = our_classes("Encoder", *bert.HEADS[:4])
HUB_PREFIX = "new."
# modules of a layer: our name, the names in the class and in files of the Hub
LAYER = {
    "self_attn.o_proj": ("self_attn.o_proj", "attention.o_proj"),
    "feed_forward.down_proj": ("mlp.down_proj", "mlp.down_proj"),
    "self_attn_norm": ("post_attention_layernorm", "attn_ln"),
    "feed_forward_norm": ("post_mlp_layernorm", "mlp_ln"),
}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    # fields of the Hub's code, which transformers does not have
    require(
        theirs,
        position_embedding_type=(None, "rope"),
        layer_norm_type=(None, "layer_norm"),
        logn_attention_scale=(None, False),
        pack_qkv=(None, True),
    )
    return bert.encoder_fields(theirs) | {
        "gated": True,
        "activation_dropout": theirs.hidden_dropout_prob,
        "position_embedding_type": "rotary",
        "rope_parameters": rope(theirs),
        "pooler_act": bert.pooler_act(theirs, names),
        "lm_transform_act": "gelu",
    }


def rope(theirs: Theirs) -> Fields:
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


def to_source_config(ours: Ours) -> Fields:
    return bert.to_source_config(ours) | {
        "type_vocab_size": ours.type_vocab_size,
        "rope_parameters": one_base(ours),
    }


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    maps = [
        *bert.embeddings(ours, "lm_head.decoder.weight"),
        tensor_map("lm_head.bias", "lm_head.decoder.bias"),
        *linear("transform.norm", "lm_head.layer_norm", hub="lm_head.norm"),
        *modules(
            {
                "model.pooler.dense": "pooler.dense",
                "transform.dense": "lm_head.dense",
                "classifier": "classifier",
            }
        ),
    ]
    for i in range(ours.num_hidden_layers):
        maps += layer_maps(ours, f"model.layers.{i}", f"layers.{i}", f"encoder.layer.{i}")
    return maps


def layer_maps(ours: Ours, layer: str, theirs: str, hub: str) -> list[TensorMap]:
    """Return the maps of our module `layer`: `theirs` in the class, `hub` in files of the Hub."""
    order, thirds, both = paired(ours.head_dim), paired_thirds(ours.head_dim), ("weight", "bias")
    parts = {f"{part}_proj": f"{theirs}.self_attn.{part}_proj" for part in "qkv"}
    gates = {f"{part}_proj": f"{theirs}.mlp.{part}_proj" for part in ("up", "gate")}
    network = f"{layer}.feed_forward"
    return [
        *fused(f"{layer}.self_attn", parts, f"{hub}.attention.qkv_proj", thirds, both, order),
        *fused(network, gates, f"{hub}.mlp.up_gate_proj", HALVES, both[:1], SAME),
        *(no_bias(f"{network}.{name}", ours.intermediate_size) for name in gates),
        *(
            entry
            for name, (their_name, hub_name) in LAYER.items()
            for entry in linear(
                f"{layer}.{name}", f"{theirs}.{their_name}", hub=f"{hub}.{hub_name}"
            )
        ),
    ]
