"""mBART and mBART-50 (Liu et al. 2020, Tang et al. 2020): BART with pre-norm, and a sequence's last
token in front of it for the decoder."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from . import bart
from .fields import Fields
from .tensors import TensorMap

CONFIG = "MBartConfig"
ARCHITECTURES = {f"M{theirs}": ours for theirs, ours in bart.ARCHITECTURES.items()}
PREFIX = "model."
UNUSED = bart.UNUSED
to_source_config = bart.to_source_config


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    wraps = {} if bart.is_decoder(architecture) else {"wrap_last_token": True}
    return bart.to_vanilla_config(theirs, architecture, names) | {"norm_first": True, **wraps}


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    return bart.tensor_maps(ours, theirs, architecture) + bart.final_norms(architecture)
