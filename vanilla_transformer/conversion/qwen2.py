"""Qwen2 (Yang et al. 2024), Qwen2.5 and gte-Qwen2: Llama with biases of queries, keys and
values."""

from . import llama
from .fields import Fields, Ours, TensorNames, Theirs, require
from .rotary import no_bias
from .tensors import TensorMap

HUB_PREFIX = llama.HUB_PREFIX
CLASSES = llama.CLASSES
FIELDS = llama.SIZES


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    fields = {"attention_bias": True, **llama.windows(theirs)}
    return llama.to_vanilla_config(theirs, names) | fields


def to_source_config(ours: Ours) -> Fields:
    require(ours, head_dim=ours.hidden_size // ours.num_attention_heads)
    return llama.to_source_config(ours) | llama.their_windows(ours)


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    maps = [
        entry
        for entry in llama.tensor_maps(ours, theirs)
        if not entry.theirs.endswith("o_proj.bias")
    ]
    outputs = (f"model.layers.{i}.self_attn.o_proj" for i in range(ours.num_hidden_layers))
    return maps + [no_bias(name, ours.hidden_size) for name in outputs]
