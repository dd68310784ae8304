"""mBART (Liu et al. 2020): BART with pre-norm, and a sequence's last token, its language, in front of it for the decoder."""

from . import bart
from .tensors import Pair, linear

CONFIG = "MBartConfig"
ARCHITECTURES = {f"M{theirs}": ours for theirs, ours in bart.ARCHITECTURES.items()}
PREFIX = "model."
UNUSED = bart.UNUSED


def config(theirs, architecture, names):
    wraps = {} if bart.is_decoder(architecture) else {"wrap_last_token": True}
    return bart.config(theirs, architecture, names) | {"norm_first": True, **wraps}


def config_back(ours, architecture):
    return bart.config_back(ours, architecture, norm_first=True)


def pairs(ours, theirs, architecture) -> list[Pair]:
    found = bart.pairs(ours, theirs, architecture)
    if bart.is_decoder(architecture):
        return found + linear("model.norm", "decoder.layer_norm")
    return found + [norm for side in ("encoder", "decoder") for norm in linear(f"model.{side}.norm", f"{side}.layer_norm")]
