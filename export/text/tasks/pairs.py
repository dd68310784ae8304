"""The scores of heads that compare texts: next sentence prediction and multiple choice."""

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...heads import CHOOSE, NEXT_SENTENCE
from .rows import Pair, check_list, check_text, encode_texts, parse_pair, require, run, with_names

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
    checked = [parse_pair(pair, name) for pair, name in with_names(check_list(pairs, "pairs"))]
    rows = encode_texts(runtime, checked)
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
    pairs = check_choices(texts, choices)
    rows = encode_texts(runtime, [pair for group in pairs for pair in group])
    scores = np.zeros(len(rows), np.float32)
    for index, outputs in run(runtime, rows):
        [scores[index]] = outputs["logits"]
    return np.split(scores, np.cumsum([len(group) for group in pairs])[:-1])


def check_choices(texts: object, choices: object) -> list[list[Pair]]:
    lists = check_list(choices, "lists of strings, the choices")
    strings = check_list(texts, "strings")
    if len(strings) != len(lists):
        raise ValueError(
            f"{len(strings)} texts and {len(lists)} lists of choices, expected one list for each "
            f"text"
        )
    pairs = []
    for (text, name), options in zip(with_names(strings), lists):
        if not isinstance(options, list | tuple) or not options:
            raise ValueError(
                f"{name} has the choices {reprlib.repr(options)}, expected a list of strings, at "
                f"least one"
            )
        first = check_text(text, name)
        pairs.append(
            [
                (first, check_text(choice, f"choice {place} of {name}"))
                for place, choice in enumerate(options)
            ]
        )
    return pairs
