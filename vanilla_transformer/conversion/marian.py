"""Marian (Junczys-Dowmunt et al. 2018), the architecture of OPUS-MT: the paper's model, but for the order of its sinusoids.

Marian has all sines first and then all cosines, the paper (3.5) interleaves them. They are added to the residual stream,
whose order is nobody's concern: every weight that reads the stream or writes to it is reordered.
"""

from dataclasses import replace

import torch

from . import bart
from .fields import require
from .tensors import Op, Pair, then

CONFIG = "MarianConfig"
ARCHITECTURES = {
    "MarianModel": "VanillaSeq2SeqModel",
    "MarianMTModel": "VanillaSeq2SeqForConditionalGeneration",
}
PREFIX = "model."
UNUSED = r"(encoder|decoder)\.embed_positions\.weight"  # sinusoids; `check_tensors` sees to it
WRITERS = ("o_proj.weight", "o_proj.bias", "down_proj.weight", "down_proj.bias", "norm.weight", "norm.bias")
READERS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "up_proj.weight", "embed_tokens.weight", "lm_head.weight")


def config(theirs, architecture, names):
    require(theirs, decoder_vocab_size=(None, theirs.vocab_size))
    if theirs.d_model % 2:
        raise ValueError(f"d_model={theirs.d_model} cannot be converted: sinusoids need an even width")
    return bart.seq2seq_fields(theirs, names) | {
        "position_embedding_type": "sinusoidal",
        "share_encoder_decoder_embeddings": theirs.share_encoder_decoder_embeddings,
    }


def config_back(ours, architecture):
    require(ours, position_embedding_type="sinusoidal", embedding_norm=False)
    require(ours, norm_first=False, final_norm=False, wrap_last_token=False)
    return bart.seq2seq_fields_back(ours) | {"share_encoder_decoder_embeddings": True}


def pairs(ours, theirs, architecture) -> list[Pair]:
    width = ours.hidden_size
    order = torch.arange(width).view(2, width // 2).T.flatten()  # ours 0, 1, 2, 3 ... is theirs 0, D/2, 1, D/2 + 1 ...
    found = bart.embeddings(ours, theirs.tie_word_embeddings, theirs.share_encoder_decoder_embeddings)
    return [in_order(entry, order) for entry in found + bart.stacks(theirs)] + [bart.final_logits_bias(ours)]


def in_order(entry, order):
    name = entry.ours[0] if entry.ours else ""
    if not name.endswith(WRITERS + READERS):
        return entry
    axis = 0 if name.endswith(WRITERS) else 1
    back = order.argsort()
    reordered = Op("reordered", lambda t: (t.index_select(axis, order),), lambda t: t.index_select(axis, back))
    return replace(entry, op=then(entry.op, reordered))


def check_tensors(files, theirs):
    """Old files hold the table of sinusoids. Another table would be lost."""
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
