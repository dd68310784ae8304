"""Pegasus (Zhang et al. 2020): Marian with pre-norm, its sinusoids stored in the file."""

from . import bart, marian

CLASSES = bart.LM_CLASSES
UNUSED = marian.UNUSED
check_tensors = marian.check_tensors
tensor_maps = marian.tensor_maps
FIXED = {"norm_first": True}
to_vanilla_config = marian.sinusoidal_fields
to_source_config = bart.source_fields
