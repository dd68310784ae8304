"""mBART and mBART-50 (Liu et al. 2020, Tang et al. 2020): BART with pre-norm, and a sequence's last
token in front of it for the decoder."""

from . import bart
from .fields import Ours, Theirs
from .tensors import TensorMap

CLASSES = bart.CLASSES
FIXED = bart.FIXED | {"norm_first": True}
UNUSED = bart.UNUSED
to_vanilla_config = bart.wrapped_config
to_source_config = bart.to_source_config


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    return bart.tensor_maps(ours, theirs) + bart.final_norms(theirs)
