"""Word alignments: which word of a source a word of its translation came from.

Weights of tokens become weights of words: the sum over the tokens of a source word, and the mean
over the tokens of a target word. A word is a run of letters and digits, or one other character; in
scripts without spaces it is a token.
"""

import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

Span = tuple[int, int]  # start and end of characters in a text

# scripts without spaces: Thai, Lao, Tibetan, Burmese, Khmer, Japanese and Chinese
NO_SPACES = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)


def words(text: str, tokens: Collection[Span]) -> list[Span]:
    """Return the spans of the words in `text`. `tokens` are the spans of its tokens, at which words
    of scripts without spaces are cut."""
    cuts = {place for span in tokens for place in span}
    spans = []
    start = 0
    for kind, run in groupby(text, character_kind):
        end = start + len(list(run))
        if kind == "mark":
            spans += [(place, place + 1) for place in range(start, end)]
        elif kind == "word":
            is_cut = NO_SPACES.search(text, start, end)
            places = sorted(cuts & {*range(start + 1, end)}) if is_cut else []
            spans += zip([start, *places], [*places, end])
        start = end
    return spans


def character_kind(character: str) -> str:
    """Return "word" for letters, digits, the marks on them and joiners, "space" for white space,
    and else "mark"."""
    if character.isalnum() or character == "_":
        return "word"
    if character.isspace():
        return "space"
    return "word" if unicodedata.category(character) in ("Mn", "Mc", "Cf") else "mark"


def shares(tokens: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Return which share of each token belongs to each word, (tokens, words).

    `tokens` and `spans` are the spans of tokens and of words. A token that reaches into several
    words belongs to all of them alike; one without a word to none.
    """
    starts, ends = np.array(tokens, np.int64).reshape(-1, 2).T[:, :, None]
    first, last = np.array(spans, np.int64).reshape(-1, 2).T
    overlaps = ((starts < last) & (first < ends)).astype(np.float32)
    return overlaps / np.maximum(overlaps.sum(axis=1, keepdims=True), 1)


def word_weights(weights: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the weights of words (..., T, S) from those of tokens. `source` and `target` are the
    `shares` of the tokens in words."""
    means = target / np.maximum(target.sum(axis=0), 1e-6)  # a word without tokens has weights 0
    return means.T @ weights @ source


def mutual_best(weights: np.ndarray) -> list[tuple[int, int]]:
    """Return (source word, target word) where each is the best of the other by the `weights` (T, S)
    of words. Rows are not normalized: a word that mostly attends to the end token has no partner.
    """
    if not weights.size:
        return []
    sources, targets = weights.argmax(axis=1), weights.argmax(axis=0)
    return [(int(source), word) for word, source in enumerate(sources) if targets[source] == word]


@dataclass(frozen=True)
class Alignment:
    """A translation whose words are aligned with those of its source.

    Args:
        text: the translation.
        source, target: the spans of the words in the source and in `text`: the start and the end of
            their characters.
        weights: how much each target word attends to each source word, (T, S). Those of several
            heads are (..., T, S), without links.
    """

    text: str
    source: list[Span]
    target: list[Span]
    weights: np.ndarray

    @property
    def links(self) -> list[tuple[int, int]]:
        """Numbers (source word, target word) of the words that belong together, in the order of the
        translation: each is the best of the other."""
        return mutual_best(self.weights)

    @property
    def alignments(self) -> list[tuple[Span, Span]]:
        """Spans (in the source, in the translation) of the words that belong together."""
        return [(self.source[source], self.target[target]) for source, target in self.links]


def align_words(
    texts: tuple[str, str], tokens: tuple[Sequence[Span], Sequence[Span]], weights: np.ndarray
) -> Alignment:
    """Return the alignment of a source and its translation, `texts`, from the `weights` (..., T, S)
    of their tokens, whose spans are `tokens`."""
    source, target = (words(text, spans) for text, spans in zip(texts, tokens))
    of_source, of_target = shares(tokens[0], source), shares(tokens[1], target)
    return Alignment(texts[1], source, target, word_weights(weights, of_source, of_target))
