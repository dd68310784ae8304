"""Blenderbot (Roller et al. 2021): mBART without the norm after the embeddings, its positions from
row 0."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from . import bart
from .fields import Fields
from .tensors import TensorMap

CONFIG = "BlenderbotConfig"
ARCHITECTURES = {
    "BlenderbotModel": "VanillaSeq2SeqModel",
    "BlenderbotForConditionalGeneration": "VanillaSeq2SeqForConditionalGeneration",
    "BlenderbotForCausalLM": "VanillaDecoderForCausalLM",
}
PREFIX = "model."


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    return bart.vanilla_fields(theirs, architecture, names) | {
        "position_embedding_type": "learned",
        "norm_first": True,
    }


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    return (
        bart.body(ours, theirs, architecture)
        + bart.positions(architecture)
        + bart.final_norms(architecture)
    )
