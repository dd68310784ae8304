"""Next sentence prediction and multiple choice."""

import reprlib
from collections.abc import Sequence

import numpy as np

from ...heads import CHOICES, CHOOSE, NEXT_SENTENCE, PAIR
from ..checks import Pair, check_list, check_text, parse_pair, with_names
from ..scores import rank_labels, softmax
from ..text_model import TextModel
from .task import TaskCall


def next_sentence(runtime: TextModel, pairs: Sequence[Pair | dict[str, str]], /) -> np.ndarray:
    """Return two logits for each pair (B, 2), float32: the second text follows the first, and it
    does not (Devlin et al. 2019, section 3.1). Their softmax is the probabilities.

    Args:
        pairs: `(text, text_pair)` or `{"text": ..., "text_pair": ...}`. They are not truncated.

    Raises:
        ValueError: if the export has no next sentence head, or a pair is a single text, has no
            tokens or has too many.
    """
    runtime.require(NEXT_SENTENCE)
    items = with_names(check_list(pairs, "pairs", "pairs"))
    rows = runtime.encode_texts([parse_pair(pair, name) for pair, name in items])
    # a pretraining head has the logits of tokens first
    return np.array(runtime.run_rows(rows, lambda row, outputs: [*outputs.values()][-1]))


def choose(
    runtime: TextModel, texts: Sequence[str], choices: Sequence[Sequence[str]], /
) -> list[np.ndarray]:
    """Return the logits of the choices of each text (C,), float32: how well a choice continues the
    text. Their softmax is the probabilities.

    Args:
        texts: strings. They are not truncated.
        choices: a list of possible continuations for each text.

    Raises:
        ValueError: if the export has no multiple choice head, the number of lists is not the number
            of texts, a list is empty, or a text or choice is blank or has too many tokens together.
    """
    runtime.require(CHOOSE)
    pairs = check_choices(texts, choices)
    rows = runtime.encode_texts([pair for group in pairs for pair in group])
    scores = np.array(runtime.run_rows(rows, lambda row, outputs: outputs["logits"][0]))
    return np.split(scores, np.cumsum([len(group) for group in pairs])[:-1])


def check_choices(texts: object, choices: object) -> list[list[Pair]]:
    lists = check_list(choices, "lists of strings", "choices")
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
                f"{name} has the choices {reprlib.repr(options)}, expected a list of at least "
                f"one string"
            )
        first = check_text(text, name)
        pairs.append(
            [
                (first, check_text(choice, f"choice {index} of {name}"))
                for index, choice in enumerate(options)
            ]
        )
    return pairs


PIPELINES = {
    "next-sentence": TaskCall(
        next_sentence,
        PAIR,
        lambda logits, row, options: rank_labels(["isNext", "notNext"], softmax(logits)),
    ),
    "multiple-choice": TaskCall(
        choose,
        CHOICES,
        lambda logits, row, options: rank_labels(row["choices"], softmax(logits)),
    ),
}
