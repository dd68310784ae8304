"""Pegasus (Zhang et al. 2020): Marian with pre-norm, its sinusoids stored in the file."""

from . import bart, marian
from .fields import Fields, TensorNames, Theirs

ARCHITECTURES = {
    "PegasusModel": "VanillaSeq2SeqModel",
    "PegasusForConditionalGeneration": "VanillaSeq2SeqForConditionalGeneration",
    "PegasusForCausalLM": "VanillaDecoderForCausalLM",
}
UNUSED = marian.UNUSED
check_tensors = marian.check_tensors
tensor_maps = marian.tensor_maps
to_source_config = bart.source_fields


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    return marian.sinusoidal_fields(theirs, names) | {"norm_first": True}
