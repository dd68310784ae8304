"""Mistral (Jiang et al. 2023), E5-Mistral and SFR-Embedding: Llama with a window in every layer."""

from . import llama
from .fields import Fields, Ours, TensorNames, Theirs
from .llama import HUB_PREFIX, tensor_maps

__all__ = ["HUB_PREFIX", "tensor_maps"]
ARCHITECTURES = {f"Mistral{head}": ours for head, ours in llama.HEADS.items()}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    return llama.to_vanilla_fields(theirs) | {"sliding_window": theirs.sliding_window}


def to_source_config(ours: Ours) -> Fields:
    return llama.to_source_fields(ours) | {"sliding_window": ours.sliding_window}
