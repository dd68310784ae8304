"""PLBart (Ahmad et al. 2021): BART, with a sequence's last token, its language, in front of it for
the decoder."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from . import bart
from .bart import PREFIX, UNUSED, tensor_maps
from .fields import Fields

__all__ = ["PREFIX", "UNUSED", "tensor_maps"]

CONFIG = "PLBartConfig"
HEADS = ("Model", "ForConditionalGeneration", "ForSequenceClassification", "ForCausalLM")
ARCHITECTURES = {f"PLBart{head}": bart.ARCHITECTURES[f"Bart{head}"] for head in HEADS}


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    wraps = {} if bart.is_decoder(architecture) else {"wrap_last_token": True}
    return bart.to_vanilla_config(theirs, architecture, names) | wraps
