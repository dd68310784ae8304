"""Blenderbot (Roller et al. 2021): mBART without the norm after the embeddings, its positions from
row 0."""

from . import bart
from .fields import Ours, Theirs
from .tensors import TensorMap

CLASSES = bart.LM_CLASSES
FIXED = {"position_embedding_type": "learned", "norm_first": True}
to_vanilla_config = bart.to_vanilla_config


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    return bart.body(ours, theirs) + bart.positions(theirs) + bart.final_norms(theirs)
