"""mBART and mBART-50 (Liu et al. 2020, Tang et al. 2020): BART with pre-norm, and a sequence's last
token in front of it for the decoder."""

from . import bart
from .fields import Fields, Ours, TensorNames, Theirs
from .tensors import TensorMap

ARCHITECTURES = {f"M{theirs}": ours for theirs, ours in bart.ARCHITECTURES.items()}
UNUSED = bart.UNUSED
to_source_config = bart.to_source_config


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    wraps = {} if bart.is_decoder(theirs) else {"wrap_last_token": True}
    return bart.to_vanilla_config(theirs, names) | {"norm_first": True, **wraps}


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    return bart.tensor_maps(ours, theirs) + bart.final_norms(theirs)
