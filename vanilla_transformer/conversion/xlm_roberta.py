"""XLM-R (Conneau et al. 2020): RoBERTa in many languages, its tensors named as there."""

from . import bert
from .roberta import tensor_maps, to_source_config, to_vanilla_config

__all__ = ["tensor_maps", "to_source_config", "to_vanilla_config"]

ARCHITECTURES = bert.encoder_classes("XLMRoberta")
