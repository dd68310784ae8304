"""Marian (Junczys-Dowmunt et al. 2018), the architecture of OPUS-MT: the paper's model, but for the order of its sinusoids.

Marian has all sines first and then all cosines, the paper (3.5) interleaves them. They are added to the residual stream,
which has no preferred order: every weight that reads the stream or writes to it is reordered.
"""

from collections.abc import Collection
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from . import bart
from .fields import Fields, require
from .tensors import Op, TensorFiles, TensorMap, then

CONFIG = "MarianConfig"
ARCHITECTURES = {
    "MarianModel": "VanillaSeq2SeqModel",
    "MarianMTModel": "VanillaSeq2SeqForConditionalGeneration",
}
PREFIX = "model."
UNUSED = r"(encoder|decoder)\.embed_positions\.weight"  # sinusoids, see `check_tensors`
STREAM_WRITERS = ("o_proj.weight", "o_proj.bias", "down_proj.weight", "down_proj.bias", "norm.weight", "norm.bias")
STREAM_READERS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "up_proj.weight", "embed_tokens.weight", "lm_head.weight")


def to_vanilla_config(theirs: PreTrainedConfig, architecture: str, names: Collection[str]) -> Fields:
    require(theirs, decoder_vocab_size=(None, theirs.vocab_size))
    if theirs.d_model % 2:
        raise ValueError(f"d_model={theirs.d_model} cannot be converted: sinusoids need an even width")
    return bart.seq2seq_fields(theirs, names) | {
        "position_embedding_type": "sinusoidal",
        "share_encoder_decoder_embeddings": theirs.share_encoder_decoder_embeddings,
    }


def to_source_config(ours: VanillaTransformerConfig, architecture: str) -> Fields:
    require(ours, position_embedding_type="sinusoidal", embedding_norm=False)
    require(ours, norm_first=False, final_norm=False, wrap_last_token=False)
    return bart.source_seq2seq_fields(ours) | {"share_encoder_decoder_embeddings": True}


def tensor_maps(ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str) -> list[TensorMap]:
    width = ours.hidden_size
    order = torch.arange(width).view(2, width // 2).T.flatten()  # ours 0, 1, 2, 3 ... is theirs 0, D/2, 1, D/2 + 1 ...
    maps = bart.embeddings(ours, theirs.tie_word_embeddings, theirs.share_encoder_decoder_embeddings)
    return [reordered(entry, order) for entry in maps + bart.stacks(theirs)] + [bart.final_logits_bias(ours)]


def reordered(entry: TensorMap, order: torch.Tensor) -> TensorMap:
    name = entry.ours[0] if entry.ours else ""
    if not name.endswith(STREAM_WRITERS + STREAM_READERS):
        return entry
    axis = 0 if name.endswith(STREAM_WRITERS) else 1
    back = order.argsort()
    reorder = Op("reordered", lambda t: (t.index_select(axis, order),), lambda t: t.index_select(axis, back))
    return replace(entry, op=then(entry.op, reorder))


def check_tensors(files: TensorFiles, theirs: PreTrainedConfig) -> None:
    """Old files hold the table of sinusoids, which is not converted.

    Raises:
        ValueError: for another table, which would be lost.
    """
    for side in ("encoder", "decoder"):
        name = f"{side}.embed_positions.weight"
        if name in files.shapes:
            table = files.read(name).double()
            if table.shape[1:] != (theirs.d_model,):
                raise ValueError(f"{name} has the shape {list(table.shape)}, expected rows of d_model {theirs.d_model}")
            half = theirs.d_model // 2
            frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.double) * 2 / theirs.d_model)
            angles = torch.arange(len(table), dtype=torch.double)[:, None] * frequencies
            if not torch.allclose(table, torch.cat([angles.sin(), angles.cos()], dim=1), atol=2e-3, rtol=0):
                raise ValueError(f"{name} is not the table of sinusoids, and learned positions of Marian cannot be represented")
