"""The alignment graph of an encoder-decoder model: the cross-attention of some heads, for a whole
target at once.

It reads what the encoder graph returned, and has no projection to the vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .caches import SOURCE_MASK
from .graph_spec import GraphSpec, TensorSpec

ROLE = "alignment"
ALIGNMENT_FILE = "onnx/alignment_model.onnx"
OUTPUT = "cross_attentions"
# The decode step whose attention belongs to a token: the step that produces the token, or the next
# one, which reads it (Chen et al. 2020, Shift-Att).
SHIFTS = ("made", "read")


class AlignmentHead(NamedTuple):
    """A head of cross-attention that aligns words: the numbers of its layer and of the head in the
    layer, and its shift, one of `SHIFTS`."""

    layer: int
    head: int
    shift: str


def alignment_spec(config: dict, source: Sequence[TensorSpec]) -> GraphSpec:
    """Return the spec of the alignment graph.

    `config` is the checkpoint's config.json, and `source` the inputs that the encoder returned.
    """
    ids = TensorSpec(
        "decoder_input_ids",
        "int64",
        ("batch_size", "target_length"),
        (0, config["vocab_size"] - 1),
    )
    weights = TensorSpec(
        OUTPUT,
        "float32",
        ("batch_size", "num_alignment_heads", "target_length", "source_length"),
    )
    return GraphSpec(ALIGNMENT_FILE, (ids, SOURCE_MASK, *source), (weights,))


def alignment_heads(config: dict) -> list[AlignmentHead]:
    """Return the heads that align words best, as far as `config`, the checkpoint's config.json,
    says.

    They are its `alignment_heads`, or else all heads of the layer before the last, with the shift
    "made". Raises ValueError for `alignment_heads` that the model does not have.
    """
    heads = config.get("alignment_heads")
    if heads is not None:
        return parse_heads(heads, config)
    layer = max(config["decoder_layers"] - 2, 0)
    return [AlignmentHead(layer, head, "made") for head in range(config["num_attention_heads"])]


def parse_heads(heads: Any, config: dict) -> list[AlignmentHead]:
    """Return `heads`, lists [layer, head, shift] as JSON has them, as `AlignmentHead`s.

    Raises ValueError for an empty list, and for a head that the model of `config` does not have.
    """
    sizes = config["decoder_layers"], config["num_attention_heads"]
    expected = (
        f"expected lists [layer, head, shift] with a layer below {sizes[0]}, a head below "
        f"{sizes[1]} and a shift of {' or '.join(SHIFTS)}"
    )
    if not isinstance(heads, list) or not heads:
        raise ValueError(f"alignment_heads is {heads!r:.100}, {expected}")
    for head in heads:
        if not (
            isinstance(head, list | tuple)
            and len(head) == 3
            and all(type(number) is int for number in head[:2])
            and all(0 <= number < size for number, size in zip(head, sizes))
            and head[2] in SHIFTS
        ):
            raise ValueError(f"alignment_heads has {head!r:.100}, {expected}")
    return [AlignmentHead(*head) for head in heads]
