"""mBART (Liu et al. 2020): BART with pre-norm, and a sequence's last token, its language, in front of it for the decoder."""

from . import bart
from .tensors import Pair, linear

CONFIG = "MBartConfig"
ARCHITECTURES = {
    "MBartModel": "VanillaSeq2SeqModel",
    "MBartForConditionalGeneration": "VanillaSeq2SeqForConditionalGeneration",
}
PREFIX = "model."
UNUSED = bart.UNUSED


def config(theirs, architecture, names):
    return bart.config(theirs, architecture, names) | {"norm_first": True, "wrap_last_token": True}


def pairs(ours, theirs, architecture) -> list[Pair]:
    norms = [found for side in ("encoder", "decoder") for found in linear(f"model.{side}.norm", f"{side}.layer_norm")]
    return bart.pairs(ours, theirs, architecture) + norms
