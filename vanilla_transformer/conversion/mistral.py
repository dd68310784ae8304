"""Mistral (Jiang et al. 2023), E5-Mistral and SFR-Embedding: Llama with a window in every layer."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from . import llama
from .fields import Fields
from .llama import HUB_PREFIX, PREFIX, tensor_maps

__all__ = ["HUB_PREFIX", "PREFIX", "tensor_maps"]
CONFIG = "MistralConfig"
ARCHITECTURES = {f"Mistral{head}": ours for head, ours in llama.HEADS.items()}


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    return llama.to_vanilla_fields(theirs) | {"sliding_window": theirs.sliding_window}


def to_source_config(ours: VanillaTransformerConfig, architecture: str) -> Fields:
    return llama.to_source_fields(ours) | {"sliding_window": ours.sliding_window}
