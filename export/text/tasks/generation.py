"""Generation from rows of tokens that differ in their prefixes and languages."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...engine.inputs import Generated
from ...inference.logits import row_seeds
from ...inference.options import Options
from ..text_model import TextModel


def generate_rows(
    runtime: TextModel,
    rows: list[list[int]],
    options: Sequence[Options],
    prefixes: list[list[int]] | None = None,
    seeds: Sequence[int] | None = None,
    is_scored: bool = False,
    are_aligned: Sequence[bool] | None = None,
    unknown_token: int | None = None,
) -> list[Generated]:
    """Return the B * N results for `rows` of token ids. Their tokens follow the start token or the
    prompt, and have the prefix.

    Rows with prefixes of the same length and one target language run together.

    Args:
        options: those of each row, which differ in their target language only.
        prefixes: tokens that each result begins with, one list for each row; by default none.
        seeds: seeds of sampling, one for each row; by default derived from that of `options`.
        is_scored: True if results have scores.
        are_aligned: True for each row whose results have alignments; by default none has.
        unknown_token: token whose results have alignments too.
    """
    count = len(rows)
    if seeds is None:
        seeds = row_seeds(options[0].seed, count)
    all_seeds = [None] * count if seeds is None else seeds
    prefixes, are_aligned = prefixes or [[]] * count, are_aligned or [False] * count
    kinds: dict[tuple[int, int], list[int]] = {}
    for row in range(count):
        kinds.setdefault((len(prefixes[row]), id(options[row])), []).append(row)
    by_row: dict[int, list[Generated]] = {}
    for (length, _), indices in kinds.items():
        shared = options[indices[0]]
        first = runtime.languages.first_tokens(shared)
        starts = np.array([first + prefixes[row] for row in indices]) if length else None
        padded = runtime.batch([rows[row] for row in indices])
        inputs = [
            dataclasses.replace(
                checked,
                seed=all_seeds[row],
                is_aligned=are_aligned[row],
                unknown_token=unknown_token,
            )
            for row, checked in zip(
                indices, runtime.runtime.inputs(*padded, starts, shared, is_scored), strict=True
            )
        ]
        results = runtime.runtime.sequences(inputs)
        for row, of_row, sequences in zip(indices, inputs, results, strict=True):
            prefix = of_row.prompt[1:] if of_row.source else []
            by_row[row] = [
                dataclasses.replace(sequence, tokens=[*prefix, *sequence.tokens])
                for sequence in sequences
            ]
    return [result for row in range(count) for result in by_row[row]]
