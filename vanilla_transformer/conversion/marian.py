"""Marian (Junczys-Dowmunt et al. 2018), the architecture of OPUS-MT: the paper's model, but for the
order of its sinusoids.

Marian has all sines first and then all cosines, the paper (3.5) interleaves them. They are added to
the residual stream, which has no preferred order: every weight that reads the stream or writes to
it is reordered.
"""

from dataclasses import replace

import torch

from . import bart
from .fields import Fields, Ours, TensorNames, Theirs, require
from .sinusoids import check_table, marian_table
from .tensors import Op, TensorFiles, TensorMap, constant, then

CLASSES = {
    "Model": "VanillaSeq2SeqModel",
    "MTModel": "VanillaSeq2SeqForConditionalGeneration",
    "ForCausalLM": "VanillaDecoderForCausalLM",
}
TRANSLATES = True  # all its checkpoints with a language model head
UNUSED = r"(encoder|decoder)\.embed_positions\.weight"  # sinusoids, see `check_tensors`
STREAM_WRITERS = (
    "o_proj.weight",
    "o_proj.bias",
    "down_proj.weight",
    "down_proj.bias",
    "norm.weight",
    "norm.bias",
)
STREAM_READERS = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "up_proj.weight",
    "embed_tokens.weight",
    "lm_head.weight",
)


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    require(theirs, decoder_vocab_size=(None, theirs.vocab_size))
    shares = (
        {}
        if bart.is_decoder(theirs)
        else {"share_encoder_decoder_embeddings": theirs.share_encoder_decoder_embeddings}
    )
    return sinusoidal_fields(theirs, names) | shares | alignment(theirs)


def alignment(theirs: Theirs) -> Fields:
    """Return the field `alignment_heads` of a translator: the first head of the last layer, which
    Marian's guided alignment trains (Chen et al. 2016) and CTranslate2 reads."""
    if theirs.architectures[0] != "MarianMTModel":
        return {}
    return {"alignment_heads": [[theirs.decoder_layers - 1, 0, "made"]]}


def sinusoidal_fields(theirs: Theirs, names: TensorNames) -> Fields:
    """Return the fields of our config that Marian and Pegasus share.

    `names` are those of the source's tensors, without the prefix `model.`.
    Raises ValueError for an odd `d_model`, and for fields that our config cannot represent.
    """
    if theirs.d_model % 2:
        raise ValueError(
            f"d_model={theirs.d_model} cannot be converted: sinusoids need an even width"
        )
    return bart.to_vanilla_config(theirs, names) | {"position_embedding_type": "sinusoidal"}


def to_source_config(ours: Ours) -> Fields:
    return bart.source_fields(ours) | {"share_encoder_decoder_embeddings": True}


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    maps = bart.body(ours, theirs) + (bart.final_norms(theirs) if ours.final_norm else [])
    rows, width = theirs.max_position_embeddings, ours.hidden_size
    for side in bart.sides(theirs).values():
        maps.append(
            TensorMap(
                (),
                f"{side}.embed_positions.weight",
                constant("sinusoids", lambda: marian_table(rows, width)),
            )
        )
    return reordered(maps, ours)


def reordered(maps: list[TensorMap], ours: Ours) -> list[TensorMap]:
    width = ours.hidden_size
    # ours 0, 1, 2, 3 ... is theirs 0, D/2, 1, D/2 + 1 ...
    order = torch.arange(width).view(2, width // 2).T.flatten()
    back = order.argsort()
    # states given to it
    outside = (
        () if ours.is_encoder_decoder else ("cross_attn.k_proj.weight", "cross_attn.v_proj.weight")
    )

    def reorder(entry: TensorMap) -> TensorMap:
        name = entry.ours[0] if entry.ours else ""
        if not name.endswith(STREAM_WRITERS + STREAM_READERS) or name.endswith(outside):
            return entry
        axis = 0 if name.endswith(STREAM_WRITERS) else 1
        op = Op(
            "reordered",
            lambda t: (t.index_select(axis, order),),
            lambda t: t.index_select(axis, back),
        )
        return replace(entry, op=then(entry.op, op))

    return [reorder(entry) for entry in maps]


def check_tensors(files: TensorFiles, theirs: Theirs) -> None:
    """Raise ValueError if a position table in `files` is not the sinusoids that we compute.

    Files may hold these tables; they are not converted.
    """
    for side in ("encoder", "decoder"):
        check_table(
            files, f"{side}.embed_positions.weight", lambda rows: marian_table(rows, theirs.d_model)
        )
