"""Pegasus (Zhang et al. 2020): Marian with pre-norm, its sinusoids stored in the file."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from . import marian
from .fields import Fields

CONFIG = "PegasusConfig"
ARCHITECTURES = {
    "PegasusModel": "VanillaSeq2SeqModel",
    "PegasusForConditionalGeneration": "VanillaSeq2SeqForConditionalGeneration",
    "PegasusForCausalLM": "VanillaDecoderForCausalLM",
}
PREFIX = "model."
UNUSED = marian.UNUSED
check_tensors = marian.check_tensors
tensor_maps = marian.tensor_maps


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    return marian.sinusoidal_fields(theirs, architecture, names) | {"norm_first": True}


def to_source_config(ours: VanillaTransformerConfig, architecture: str) -> Fields:
    return marian.sinusoidal_source_fields(ours, architecture, norm_first=True)
