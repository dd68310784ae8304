"""Word alignments: the cross-attention of an encoder-decoder model, from its alignment graph."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..inference.export_info import ExportInfo
from ..inference.inputs import (
    bucket_by_length,
    check_positions,
    num_positions,
    pad_sequences,
)
from ..inference.rows import cross_states
from ..specs.alignment import OUTPUT, ROLE, AlignmentHead, parse_heads
from .inputs import check_tokens

if TYPE_CHECKING:
    from .model import OnnxModel

Rows = list[list[int]]


def alignments(
    model: "OnnxModel", sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Return the weights of `Runtime.alignments` for rows of token ids."""
    model.info.check_alignment()
    heads = recorded_heads(model.info)
    return [mean_of_heads(weights, heads) for weights in head_weights(model, sources, targets)]


def recorded_heads(info: ExportInfo) -> list[AlignmentHead]:
    """Return the heads that the alignment graph returns, from the manifest of its export."""
    return parse_heads(info.manifest[ROLE].get("heads"), info.config)


def head_weights(
    model: "OnnxModel", sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Return what the alignment graph returns for each pair of rows, (heads, T, S): one row of
    weights for each step of the decoder, the first of which reads the start token.

    Rows of similar length run together.
    """
    source_rows, target_rows = list(map(list, sources)), list(map(list, targets))
    check_pairs(model.info, source_rows, target_rows)
    lengths = np.array([max(map(len, pair)) for pair in zip(source_rows, target_rows)])
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    pad = model.info.config.get("pad_token_id")
    results: list[np.ndarray] = [np.empty(0)] * len(source_rows)
    for rows, _ in bucket_by_length(mask, model.max_tokens) if len(mask) else ():
        batch = pad_sequences([source_rows[row] for row in rows], pad)
        # padding of targets is last, and later tokens change no row
        ids, _ = pad_sequences([target_rows[row] for row in rows], pad)
        for row, weights in zip(rows, cross_attentions(model, *batch, ids), strict=True):
            results[row] = weights[:, : len(target_rows[row]), : len(source_rows[row])]
    return results


def check_pairs(info: ExportInfo, sources: Rows, targets: Rows) -> None:
    """Raise ValueError for numbers of rows that differ, and for a row that the model cannot
    read."""
    if len(sources) != len(targets):
        raise ValueError(f"targets are {len(targets)} rows, expected {len(sources)}, as sources")
    for name, rows in (("sources", sources), ("targets", targets)):
        for number, row in enumerate(rows):
            if len(row) == 0:
                expected = "the start token first" if name == "targets" else "at least one"
                raise ValueError(f"row {number} of {name} has no tokens, expected {expected}")
            check_tokens(info, row)
            ids = np.array([row])
            check_positions(num_positions(ids, np.ones_like(ids), info.config), info.config)


def cross_attentions(
    model: "OnnxModel", input_ids: np.ndarray, attention_mask: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """Return the output (B, heads, T, S) of the alignment graph for sources (B, S) and `targets`
    (B, T). Padding of a source, where `attention_mask` is 0, has weight 0."""
    encoded = model.outputs({"input_ids": input_ids, "attention_mask": attention_mask})
    inputs = {"decoder_input_ids": targets, "encoder_attention_mask": attention_mask}
    inputs |= cross_states(encoded)
    [weights] = model.session(ROLE).run([OUTPUT], inputs)
    return weights


def mean_of_heads(weights: np.ndarray, heads: list[AlignmentHead]) -> np.ndarray:
    """Return the mean (T - 1, S) of the weights (heads, T, S) after the start token. The row of a
    token is that of the step that its head's shift names."""
    shifted = {"made": weights[:, :-1], "read": weights[:, 1:]}
    rows = np.stack([shifted[head.shift][number] for number, head in enumerate(heads)])
    return rows.mean(axis=0)
