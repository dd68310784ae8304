"""DINOv2 (Oquab et al. 2023) without its head: ViT whose sub-layers' outputs are scaled, here in
their last weights. It reads images of any size. What its class calls `pooler_output` is the state
of the first token."""

from dataclasses import replace

from ..configuration_vanilla_transformer import VanillaVisionConfig
from . import vit
from .fields import Fields, TensorNames, Theirs, our_classes, require
from .tensors import ROW, Op, TensorMap, linear, tensor_map

CLASSES = our_classes("Vision", "Model")
FIELDS = {name: theirs for name, theirs in vit.FIELDS.items() if name != "intermediate_size"}
IMAGE_PROCESSOR = "BitImageProcessor"
UNUSED = r"embeddings\.mask_token"  # used in training only
NAMES = {"layernorm_before": "norm1", "layernorm_after": "norm2"}
IN_FILES = {
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    **NAMES,
}
LAYER = tuple(
    (ours, NAMES.get(theirs, theirs), IN_FILES.get(theirs, stored))
    for ours, theirs, stored in vit.LAYER
)
SCALES = {"o_proj": "layer_scale1", "down_proj": "layer_scale2"}
SCALED = Op("scaled", lambda t, scale: (t * (scale if t.dim() == 1 else scale[:, None]),))


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    require(theirs, use_swiglu_ffn=False)
    return vit.encoder_fields(theirs) | {
        "intermediate_size": int(theirs.hidden_size * theirs.mlp_ratio),
        "dropout": 0.0,
        "interpolate_pos_encoding": True,
    }


def tensor_maps(ours: VanillaVisionConfig, theirs: Theirs) -> list[TensorMap]:
    maps = [
        tensor_map("model.embeddings.first_tokens", "embeddings.cls_token", ROW),
        *vit.patches(ours),
    ]
    for i in range(ours.num_hidden_layers):
        name = f"encoder.layer.{i}"
        maps += [
            scaled(entry, name)
            for entry in vit.layer(f"model.layers.{i}", name, name, LAYER, theirs.qkv_bias)
        ]
    return maps + linear("model.norm", "layernorm")


def scaled(entry: TensorMap, layer: str) -> TensorMap:
    """Return `entry` with its weights multiplied by the layer scale, if it is the last linear map
    of a sub-layer; return other maps unchanged. `layer` is the layer's name in the source."""
    scale = SCALES.get(entry.ours[0].split(".")[-2])
    return replace(entry, op=SCALED, extra_inputs=(f"{layer}.{scale}.lambda1",)) if scale else entry
