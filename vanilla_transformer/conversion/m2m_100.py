"""M2M100 and NLLB-200 (Fan et al. 2021, NLLB Team 2022): mBART's layers with sinusoids. They are
fairseq's, not the paper's, and are counted as RoBERTa's positions, so a learned table holds
them."""

from . import bart
from .fields import Fields, Ours, Theirs, our_classes, require_padding
from .sinusoids import check_table, fairseq_table
from .tensors import TensorFiles, TensorMap, constant

CLASSES = our_classes("Seq2Seq", "Model", "ForConditionalGeneration")
FIXED = {
    "position_embedding_type": "learned",
    "position_ids_from": "ids",
    "norm_first": True,
}
to_vanilla_config = bart.to_vanilla_config
TRANSLATES = True  # all its checkpoints with a language model head
UNUSED = r"(encoder|decoder)\.(version|embed_positions\.weights|embed_positions\._float_tensor)"


def to_source_config(ours: Ours) -> Fields:
    return bart.source_fields(ours) | {
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
    }


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    maps = bart.body(ours, theirs) + bart.final_norms(theirs)
    pad, rows, width = theirs.pad_token_id, theirs.max_position_embeddings, ours.hidden_size
    # from the row of padding on
    table = constant("sinusoids", lambda: fairseq_table(pad + 1 + rows, width, pad)[pad:])
    for stack in bart.sides(theirs):
        maps.append(TensorMap((f"{stack}.embeddings.embed_positions.weight",), "", table))
    return maps


def check_tensors(files: TensorFiles, theirs: Theirs) -> None:
    """Raise ValueError if a position table in `files` is not the sinusoids that we compute.

    Old files hold these tables; they are not converted. A decoder that starts with padding, which
    has no position, raises it too.
    """
    if require_padding(theirs) == theirs.decoder_start_token_id:
        raise ValueError(
            f"decoder_start_token_id={theirs.decoder_start_token_id} cannot be converted, "
            "expected another token than pad_token_id: padding has no position"
        )
    for side in ("encoder", "decoder"):
        name = f"{side}.embed_positions.weights"
        check_table(
            files, name, lambda rows: fairseq_table(rows, theirs.d_model, theirs.pad_token_id)
        )
