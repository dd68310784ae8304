"""Mistral (Jiang et al. 2023), E5-Mistral and SFR-Embedding: Llama with a window in every layer."""

from . import llama
from .fields import same_names

HUB_PREFIX = llama.HUB_PREFIX
tensor_maps = llama.tensor_maps
CLASSES = llama.CLASSES
FIELDS = llama.SIZES | same_names("sliding_window")
to_vanilla_config = llama.to_vanilla_config
to_source_config = llama.to_source_config
