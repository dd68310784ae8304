"""Blenderbot (Roller et al. 2021): mBART without the norm after the embeddings, its positions from
row 0."""

from . import bart
from .fields import Fields, Ours, TensorNames, Theirs
from .tensors import TensorMap

ARCHITECTURES = {
    "BlenderbotModel": "VanillaSeq2SeqModel",
    "BlenderbotForConditionalGeneration": "VanillaSeq2SeqForConditionalGeneration",
    "BlenderbotForCausalLM": "VanillaDecoderForCausalLM",
}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    return bart.vanilla_fields(theirs, names) | {
        "position_embedding_type": "learned",
        "norm_first": True,
    }


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    return bart.body(ours, theirs) + bart.positions(theirs) + bart.final_norms(theirs)
