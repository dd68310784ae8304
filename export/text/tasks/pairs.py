"""The scores of heads that compare texts: next sentence prediction and multiple choice."""

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...heads import CHOOSE, NEXT_SENTENCE
from .rows import Pair, check_text, listed, named, pair_of, require, rows_of, run

if TYPE_CHECKING:
    from ...text_runtime import TextRuntime


def next_sentence(runtime: "TextRuntime", pairs: Sequence[Pair | dict[str, str]], /) -> np.ndarray:
    """Return two scores for each pair (B, 2), float32: that the second text follows the first, and
    that it does not (Devlin et al. 2019, section 3.1). Their softmax are the probabilities.

    Args:
        pairs: `(text, text_pair)` or `{"text": ..., "text_pair": ...}`. They are not cut.

    Raises:
        ValueError: for an export without a next sentence head, a single text, and one that is empty
            or has more tokens than the model has positions.
    """
    require(runtime, NEXT_SENTENCE)
    checked = [pair_of(pair, name) for pair, name in named(listed(pairs, "pairs"))]
    rows = rows_of(runtime, checked)
    scores = np.zeros((len(rows), 2), np.float32)
    for index, outputs in run(runtime, rows):
        scores[index] = list(outputs.values())[-1]  # pretraining has those of its tokens before
    return scores


def choose(
    runtime: "TextRuntime", texts: Sequence[str], choices: Sequence[Sequence[str]], /
) -> list[np.ndarray]:
    """Return the score of each of a text's choices (C,), float32: how well the choice continues the
    text. Their softmax are the probabilities.

    Args:
        texts: strings. They are not cut.
        choices: for each of the texts what may follow it, one or more.

    Raises:
        ValueError: for an export without a multiple choice head, choices that do not fit the texts,
            and a text that is empty or has more tokens than the model has positions.
    """
    require(runtime, CHOOSE)
    pairs = checked_choices(texts, choices)
    rows = rows_of(runtime, [pair for each in pairs for pair in each])
    found = np.zeros(len(rows), np.float32)
    for index, outputs in run(runtime, rows):
        [found[index]] = outputs["logits"]
    return np.split(found, np.cumsum([len(each) for each in pairs])[:-1])


def checked_choices(texts: object, choices: object) -> list[list[Pair]]:
    given = listed(choices, "lists of strings, the choices")
    found = listed(texts, "strings")
    if len(found) != len(given):
        raise ValueError(
            f"{len(found)} texts and {len(given)} lists of choices, expected as many of one as of "
            "the other"
        )
    pairs = []
    for (text, name), own in zip(named(found), given):
        if not isinstance(own, list | tuple) or not own:
            raise ValueError(
                f"{name} has the choices {reprlib.repr(own)}, expected a list of strings, at "
                f"least one"
            )
        first = check_text(text, name)
        pairs.append(
            [
                (first, check_text(choice, f"choice {place} of {name}"))
                for place, choice in enumerate(own)
            ]
        )
    return pairs
