"""ViT (Dosovitskiy et al. 2021): an encoder of images with a class token before the patches,
learned positions and pre-norm. Its files have the names that its class had before transformers
5."""

from dataclasses import replace

import torch

from ..configuration_vanilla_transformer import VanillaVisionConfig
from . import bert
from .fields import Fields, TensorNames, Theirs, our_classes, require, same_names
from .tensors import ROW, Op, TensorMap, linear, tensor_map

CLASSES = our_classes("Vision", "Model", "ForImageClassification")
IMAGE_PROCESSOR = "ViTImageProcessor"

FIELDS = bert.STACK | same_names("layer_norm_eps", "image_size", "patch_size", "num_channels")
# modules of a layer: our name, the name in the class, the name in files
LAYER = (
    ("self_attn.q_proj", "attention.q_proj", "attention.attention.query"),
    ("self_attn.k_proj", "attention.k_proj", "attention.attention.key"),
    ("self_attn.v_proj", "attention.v_proj", "attention.attention.value"),
    ("self_attn.o_proj", "attention.o_proj", "attention.output.dense"),
    ("self_attn_norm", "layernorm_before", "layernorm_before"),
    ("feed_forward.up_proj", "mlp.fc1", "intermediate.dense"),
    ("feed_forward.down_proj", "mlp.fc2", "output.dense"),
    ("feed_forward_norm", "layernorm_after", "layernorm_after"),
)
ZERO_BIAS = Op(
    "with a bias of zeros", lambda t: (t, torch.zeros_like(t[:, 0])), lambda weight, bias: weight
)


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    """Return the fields of our config for ViT; DeiT adds to them.

    `names` are those of the source's tensors, without the prefix `vit.`: the result has a pooler if
    they have one. Raises ValueError if the pooler's width is not the hidden size.
    """
    require(theirs, pooler_output_size=theirs.hidden_size)
    return encoder_fields(theirs) | {
        "pooler_act": theirs.pooler_act if "pooler.dense.weight" in names else None,
    }


def encoder_fields(theirs: Theirs) -> Fields:
    """Return the fields of our config, besides `FIELDS`, that ViT, DeiT and DINOv2 share."""
    return {"head_dim": getattr(theirs, "head_dim", None)}


def to_source_config(ours: VanillaVisionConfig) -> Fields:
    return {"pooler_act": ours.pooler_act or "tanh"}


def tensor_maps(ours: VanillaVisionConfig, theirs: Theirs) -> list[TensorMap]:
    first = tensor_map("model.embeddings.first_tokens", "embeddings.cls_token", ROW)
    return [first, *body(ours, theirs.qkv_bias), *linear("classifier", "classifier")]


def body(ours: VanillaVisionConfig, has_qkv_bias: bool) -> list[TensorMap]:
    """Return the maps of all tensors of ViT and DeiT except first tokens and classifiers.

    Without `has_qkv_bias` the biases of queries, keys and values become zeros.
    """
    maps = patches(ours)
    for i in range(ours.num_hidden_layers):
        maps += layer(f"model.layers.{i}", f"layers.{i}", f"encoder.layer.{i}", LAYER, has_qkv_bias)
    return maps + linear("model.norm", "layernorm") + linear("model.pooler.dense", "pooler.dense")


def patches(ours: VanillaVisionConfig) -> list[TensorMap]:
    patch = (ours.num_channels, *ours.patch_shape)
    flat = Op("flattened", lambda t: (t.flatten(1),), lambda t: t.unflatten(1, patch))
    projection = "embeddings.patch_embeddings.projection"
    return [
        tensor_map("model.embeddings.embed_patches.weight", f"{projection}.weight", flat),
        tensor_map("model.embeddings.embed_patches.bias", f"{projection}.bias"),
        tensor_map("model.embeddings.positions", "embeddings.position_embeddings", ROW),
    ]


def layer(
    ours: str, theirs: str, stored: str, names: tuple[tuple[str, ...], ...], has_qkv_bias: bool
) -> list[TensorMap]:
    """Return the tensor maps of one layer.

    Args:
        ours: our name of the layer.
        theirs: its name in the source's class.
        stored: its name in the source's files.
        names: modules of the layer, each as (our name, name in the class, name in the files).
        has_qkv_bias: False if the source has no biases of queries, keys and values; ours become
            zeros.
    """
    maps = []
    for name, in_class, in_files in names:
        weight, bias = (
            TensorMap(
                (f"{ours}.{name}.{part}",),
                f"{theirs}.{in_class}.{part}",
                stored=f"{stored}.{in_files}.{part}",
            )
            for part in ("weight", "bias")
        )
        if name.endswith(("q_proj", "k_proj", "v_proj")) and not has_qkv_bias:
            maps.append(replace(weight, ours=(*weight.ours, *bias.ours), op=ZERO_BIAS))
        else:
            maps += [weight, bias]
    return maps
