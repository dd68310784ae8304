"""PLBart (Ahmad et al. 2021): BART, with a sequence's last token, its language, in front of it for
the decoder."""

from . import bart
from .bart import UNUSED, tensor_maps
from .fields import Fields, TensorNames, Theirs

__all__ = ["UNUSED", "tensor_maps"]

HEADS = ("Model", "ForConditionalGeneration", "ForSequenceClassification", "ForCausalLM")
ARCHITECTURES = {f"PLBart{head}": bart.ARCHITECTURES[f"Bart{head}"] for head in HEADS}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    wraps = {} if bart.is_decoder(theirs) else {"wrap_last_token": True}
    return bart.to_vanilla_config(theirs, names) | wraps
