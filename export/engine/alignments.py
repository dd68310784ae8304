"""Word alignments: the cross-attention of an encoder-decoder model, from its alignment graph."""

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from ..inference.export_info import ExportInfo
from ..inference.inputs import bucket_by_length, check_row_positions, pad_sequences, position_limit
from ..inference.rows import Rows, cross_states
from ..specs.alignment import OUTPUT, ROLE, AlignmentHead, parse_heads
from .groups import Group
from .inputs import check_tokens
from .model import OnnxModel

Tokens = list[list[int]]


def align(model: OnnxModel, rows: Rows, groups: Sequence[Group], places: Sequence[int]) -> None:
    """Finish `groups` whose sequences lack only their alignments.

    The sources are those that `rows` hold at `places`, one for each group.
    """
    counts = [len(group.sequences) for group in groups]
    held = np.repeat(places, counts)
    pairs = [(group.input, sequence) for group in groups for sequence in group.sequences]
    targets = [[*row.prompt, *sequence.tokens] for row, sequence in pairs]
    lengths = [len(row.source or ()) for row, _ in pairs]
    weights = target_weights(model, targets, lengths, lambda some: rows.source_inputs(held[some]))
    heads = recorded_heads(model.info)
    rest = iter(weights)
    for group, count in zip(groups, counts):
        group.align([mean_of_heads(of_heads, heads) for of_heads in islice(rest, count)])


def alignments(
    model: OnnxModel, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Return the weights of `Runtime.alignments` for rows of token ids."""
    model.info.check_alignment()
    heads = recorded_heads(model.info)
    return [mean_of_heads(weights, heads) for weights in head_weights(model, sources, targets)]


def recorded_heads(info: ExportInfo) -> list[AlignmentHead]:
    """Return the heads that the alignment graph returns, from the manifest of its export."""
    return parse_heads(info.manifest[ROLE].get("heads"), info.config)


def head_weights(
    model: OnnxModel, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Return what the alignment graph returns for each pair of rows, (heads, T, S): one row of
    weights for each step of the decoder, the first of which reads the start token."""
    source_rows, target_rows = list(map(list, sources)), list(map(list, targets))
    check_pairs(model.info, source_rows, target_rows)
    pad = model.info.config.get("pad_token_id")

    def encode(rows: np.ndarray) -> dict[str, np.ndarray]:
        return encoded(model, *pad_sequences([source_rows[row] for row in rows], pad))

    return target_weights(model, target_rows, list(map(len, source_rows)), encode)


def target_weights(
    model: OnnxModel,
    targets: Tokens,
    lengths: Sequence[int],
    source_inputs: Callable[[np.ndarray], dict[str, np.ndarray]],
) -> list[np.ndarray]:
    """Return what the alignment graph returns for each of `targets`, (heads, T, S).

    Rows of similar length run together. `lengths` are the numbers of tokens of their sources, and
    `source_inputs` returns the inputs of the graph for the sources of some rows, see `Rows`.

    A target may have one token more than the model has learned positions, because the search does
    not read its last token. That token then has the weights of the step that made it.
    """
    limit, pad = position_limit(model.info.config), model.info.config.get("pad_token_id")
    sizes = np.array([max(len(target), length) for target, length in zip(targets, lengths)])
    mask = np.arange(sizes.max(initial=0)) < sizes[:, None]
    results: list[np.ndarray] = [np.empty(0)] * len(targets)
    for rows, _ in bucket_by_length(mask, model.max_tokens) if len(mask) else ():
        # padding of targets is last, and later tokens change no row
        ids, _ = pad_sequences([targets[row][:limit] for row in rows], pad)
        for row, weights in zip(rows, cross_attentions(model, source_inputs(rows), ids)):
            steps = np.arange(len(targets[row])).clip(max=weights.shape[1] - 1)
            results[row] = weights[:, steps, : lengths[row]]
    return results


def check_pairs(info: ExportInfo, sources: Tokens, targets: Tokens) -> None:
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
            check_row_positions(row, info.config)


def encoded(
    model: OnnxModel, input_ids: np.ndarray, attention_mask: np.ndarray
) -> dict[str, np.ndarray]:
    """Return what the decoder reads of sources (B, S), as `Rows.source_inputs` does."""
    outputs = model.outputs({"input_ids": input_ids, "attention_mask": attention_mask})
    return {"encoder_attention_mask": attention_mask} | cross_states(outputs)


def cross_attentions(
    model: OnnxModel, source_inputs: dict[str, np.ndarray], targets: np.ndarray
) -> np.ndarray:
    """Return the output (B, heads, T, S) of the alignment graph for `targets` (B, T). Padding of a
    source has weight 0."""
    [weights] = model.session(ROLE).run([OUTPUT], {"decoder_input_ids": targets} | source_inputs)
    return weights


def mean_of_heads(weights: np.ndarray, heads: list[AlignmentHead]) -> np.ndarray:
    """Return the mean (T - 1, S) of the weights (heads, T, S) after the start token. The row of a
    token is that of the step that its head's shift names."""
    shifted = {"made": weights[:, :-1], "read": weights[:, 1:]}
    first, *others = (shifted[head.shift][number] for number, head in enumerate(heads))
    return sum(others, first) / len(heads)
