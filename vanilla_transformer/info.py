"""Facts and costs of a checkpoint: parameters per block, memory, and operations per token."""

import copy
import math
import os
import re
from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .checkpoint import config_and_class
from .configuration_vanilla_transformer import (
    VanillaEncoderConfig,
    VanillaSeq2SeqConfig,
    VanillaTransformerConfig,
    VanillaVisionConfig,
)
from .conversion import plan_conversion
from .errors import UsageError
from .modeling_vanilla_transformer import VanillaSeq2SeqForConditionalGeneration
from .source import Source
from .variants import check_variant

BYTES = {"float32": 4, "float16 or bfloat16": 2, "int8": 1, "int4": 0.5}


def info(source: str | os.PathLike, variant: str | None = None) -> dict[str, Any]:
    """Return facts and costs of the checkpoint `source`, a directory or Hub id.

    Only its config is read, and for another family the names and shapes of its tensors too; the
    facts are then those of the converted model. `variant` is as in `from_pretrained`: "fp16" reads
    model.fp16.safetensors.

    The result has `architecture`, `variant`, `shape` (config fields), `parameters` (by block, tied
    ones counted once), `total_parameters`, `memory` (bytes of the parameters by dtype),
    `cache_values` (keys and values that a decoder keeps per token) and `flops`.

    `flops` are the floating point operations of the matrix multiplications, 2 for a multiplication
    and an addition. They are counted per source token, per target token and per sequence; for
    images, per patch (a first token costs as much) and per image. Attention is counted for one
    token and one token that it looks at.

    Raises:
        OSError: if there is no config, or no weights of `variant`.
        ValueError: if it is damaged, or neither one of ours nor one that converts.
    """
    return describe(*load_config_and_class(source, variant))


def preset_info(name: str) -> dict[str, Any]:
    """Return the facts of `info` for the paper's model `name` of `VanillaSeq2SeqConfig.preset`.

    Raises UsageError for an unknown name.
    """
    try:
        config = VanillaSeq2SeqConfig.preset(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return describe(config, VanillaSeq2SeqForConditionalGeneration)


def describe(
    config: VanillaTransformerConfig, model_class: type[PreTrainedModel]
) -> dict[str, Any]:
    """Return the facts of `info` for a model of `model_class` with `config`."""
    model = with_one_layer(model_class, config)
    parameters = parameters_by_block(model, config)
    total = sum(parameters.values())
    heads = config.num_attention_heads * (config.head_dim + config.value_head_dim)
    variant = config.model_type.removeprefix("vanilla-")
    has_decoder = variant in ("decoder", "seq2seq")
    decoder_layers = config.get_text_config(decoder=True).num_hidden_layers if has_decoder else 0
    return {
        "architecture": model_class.__name__,
        "variant": variant,
        "shape": {field: getattr(config, field) for field in shape_fields(config)},
        "parameters": parameters,
        "total_parameters": total,
        "memory": {dtype: math.ceil(total * size) for dtype, size in BYTES.items()},
        "cache_values": heads * decoder_layers,
        "flops": flops(model, config) | {"attention to one token, per layer": 2 * heads},
    }


def load_config_and_class(
    source: str | os.PathLike, variant: str | None
) -> tuple[VanillaTransformerConfig, type[PreTrainedModel]]:
    """Return the config and the model class of a checkpoint of ours. For another family they are
    those of the converted model.

    `source` is a directory or Hub id. `variant` "fp16" reads model.fp16.safetensors.

    Raises:
        OSError: if there is no config, or no weights of `variant`.
        ValueError: if it is damaged, or neither one of ours nor one that converts.
    """
    opened = Source.open(source)
    if not opened.is_ours:
        model = plan_conversion(opened, variant=variant).model
        return model.config, type(model)
    if variant is not None:
        check_variant(opened.download(), variant)
    return config_and_class(opened)


def depth_fields(config: VanillaTransformerConfig) -> tuple[str, ...]:
    return (
        ("encoder_layers", "decoder_layers")
        if config.is_encoder_decoder
        else ("num_hidden_layers",)
    )


def shape_fields(config: VanillaTransformerConfig) -> tuple[str, ...]:
    widths = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "head_dim",
        "value_head_dim",
    )
    of_text = (
        "vocab_size",
        "embedding_size",
        "position_embedding_type",
        "norm_first",
        "tie_word_embeddings",
    )
    of_images = ("image_size", "patch_size", "num_channels", "num_first_tokens", "norm_first")
    return (
        *depth_fields(config),
        *widths,
        *(of_images if isinstance(config, VanillaVisionConfig) else of_text),
    )


def with_one_layer(
    model_class: type[PreTrainedModel], config: VanillaTransformerConfig
) -> PreTrainedModel:
    """Return a `model_class` of `config` with one layer per stack, enough to count the parameters
    and FLOPs of the full model.

    It is on the meta device, so its weights have no values. `config` is not changed."""
    shallow = copy.deepcopy(config)
    for name in depth_fields(config):
        setattr(shallow, name, 1)
    with torch.device("meta"):
        return model_class(shallow)


def repeats(name: str, config: VanillaTransformerConfig | None) -> int:
    """Return how often the full model of `config` has the module `name` of the model with one
    layer.

    It is 1 if `config` is `None`: the model itself is the full one.
    """
    if config is None:
        return 1
    stack = re.match(r"(?:model\.)?(?:(encoder|decoder)\.)?layers\.", name)
    return (
        getattr(config, f"{stack[1]}_layers" if stack[1] else "num_hidden_layers") if stack else 1
    )


def parameters_by_block(
    model: PreTrainedModel, config: VanillaTransformerConfig | None = None
) -> dict[str, int]:
    """Return {block: number of parameters}, with blocks such as "embeddings", "encoder.layers" and
    "lm_head".

    All layers of a stack are one block. `config` is that of the full model if `model` has only one
    layer of each stack.
    """
    counts = Counter()
    for name, parameter in model.named_parameters():
        block = re.match(r"((encoder|decoder)\.)?(layers|\w+)", name.removeprefix("model.")).group()
        counts[block] += parameter.numel() * repeats(name, config)
    return dict(counts)


def flops(model: PreTrainedModel, config: VanillaTransformerConfig | None = None) -> dict[str, int]:
    """Return {unit: operations} of the linear maps, such as {"source token": ...}: what one unit
    costs.

    Attention between tokens is not counted. A multiplication and an addition are 2 operations.
    `config` is that of the full model if `model` has only one layer of each stack.
    """
    counts = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            counts[cost_unit(name, model)] += (
                2 * module.in_features * module.out_features * repeats(name, config)
            )
    return dict(counts)


def cost_unit(name: str, model: PreTrainedModel) -> str:
    """Return the unit that the module `name` runs once for.

    It is "source token", "target token" or "sequence", and "patch" or "image" for models of images.
    """
    is_of_images = isinstance(model.config, VanillaVisionConfig)
    if not model.sequence_modules.isdisjoint(name.split(".")):
        return "image" if is_of_images else "sequence"
    if is_of_images:
        return "patch"
    if ".cross_attn.k_proj" in name or ".cross_attn.v_proj" in name or "encoder." in name:
        return "source token"
    return "source token" if isinstance(model.config, VanillaEncoderConfig) else "target token"


def report(facts: dict[str, Any]) -> str:
    """Return `facts`, the result of `info`, as lines of text."""
    lines = [
        f"{facts['architecture']} ({facts['variant']})",
        ", ".join(f"{k}={v}" for k, v in facts["shape"].items()),
        "",
    ]
    rows = {f"parameters in {block}": f"{count:,}" for block, count in facts["parameters"].items()}
    rows["parameters in all"] = f"{facts['total_parameters']:,}"
    rows |= {
        f"memory in {dtype}": f"{size / 1e6:,.1f} MB" for dtype, size in facts["memory"].items()
    }
    if facts["cache_values"]:
        rows["cache per target token"] = f"{facts['cache_values']:,} values"
    rows |= {
        f"FLOPs per {per}": f"{count / 1e6:,.3f} million"
        for per, count in facts["flops"].items()
        if "attention" not in per
    }
    rows["FLOPs of attention to one token, per layer"] = (
        f"{facts['flops']['attention to one token, per layer']:,}"
    )
    width = max(len(name) for name in rows)
    return "\n".join(lines + [f"{name:<{width}}  {value:>18}" for name, value in rows.items()])
