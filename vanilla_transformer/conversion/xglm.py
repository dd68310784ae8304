"""XGLM (Lin et al. 2022): the decoder of M2M100. Positions count from row 2 of the table."""

from . import bart
from .fields import Fields, Ours, TensorNames, Theirs, our_classes, require
from .sinusoids import check_table, fairseq_table
from .tensors import TensorFiles, TensorMap, constant, layers, linear, tokens

CLASSES = our_classes("Decoder", "Model", "ForCausalLM")
UNUSED = r"embed_positions\.weights"


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    require(theirs, add_cross_attention=False)
    fields = {"num_hidden_layers": theirs.num_layers, "norm_first": True, "lm_head_bias": False}
    return bart.stack_fields(theirs) | {"position_embedding_type": "learned"} | fields


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    rows = theirs.max_position_embeddings
    table = constant(
        "sinusoids", lambda: fairseq_table(rows + 2, theirs.d_model, theirs.pad_token_id)[2:]
    )
    maps = tokens(ours, "embed_tokens.weight", "lm_head.weight")
    maps.append(TensorMap(("model.embeddings.embed_positions.weight",), "", table))
    return (
        maps
        + layers(bart.LAYER, "model.layers", "layers", ours.num_hidden_layers)
        + linear("model.norm", "layer_norm")
    )


def check_tensors(files: TensorFiles, theirs: Theirs) -> None:
    """Raise ValueError if the position table in `files` is not the sinusoids that we compute.

    Old files hold the table; it is not converted.
    """
    check_table(
        files,
        "embed_positions.weights",
        lambda rows: fairseq_table(rows, theirs.d_model, theirs.pad_token_id),
    )
