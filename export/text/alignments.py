"""Word alignments: which word of a source a word of its translation came from.

Weights of tokens become weights of words: the sum over the tokens of a source word, and the mean
over the tokens of a target word. A word is a run of letters and digits, or one other character,
which Moses may have escaped, as &apos;. In scripts without spaces it is a token.
"""

import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tokenizers import Encoding

from .detokenizer import CleaningDetokenizer, Detokenizer

Span = tuple[int, int]  # start and end of characters in a text

# scripts without spaces: Thai, Lao, Tibetan, Burmese, Khmer, Japanese and Chinese
NO_SPACES = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)


# words without the marks on their letters, and other characters; Moses escapes some of these
RUNS = re.compile(r"&(?:amp|apos|gt|lt|quot|#91|#93|#124);|\w+|[^\w\s]")


def words(text: str, tokens: Collection[Span]) -> list[Span]:
    """Return the spans of the words in `text`. `tokens` are the spans of its tokens, at which words
    of scripts without spaces are cut."""
    spans: list[Span] = []
    is_open = False  # the last span is that of a word, which may go on
    for match in RUNS.finditer(text):
        start, end = match.span()
        is_word = is_of_word(text[start])
        if is_word and is_open and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
        is_open = is_word
    if not NO_SPACES.search(text):
        return spans
    cuts = {place for span in tokens for place in span}
    return [piece for span in spans for piece in cut_span(text, span, cuts)]


def is_of_word(character: str) -> bool:
    """Return True for letters, digits, the marks on them and joiners."""
    return (
        character.isalnum()
        or character == "_"
        or unicodedata.category(character) in ("Mn", "Mc", "Cf")
    )


def cut_span(text: str, span: Span, cuts: set[int]) -> list[Span]:
    """Return the pieces of a word, which is cut at `cuts` if it is of a script without spaces."""
    if not NO_SPACES.search(text, *span):
        return [span]
    start, end = span
    places = sorted(cuts & {*range(start + 1, end)})
    return [*zip([start, *places], [*places, end])]


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


def with_source_words(
    texts: tuple[str, str],
    tokens: tuple[list[Span], list[Span]],
    weights: np.ndarray,
    unknown: Sequence[int],
) -> tuple[str, list[Span]]:
    """Return a translation with source words for unknown ones, and the spans of its tokens. `texts`
    are its source and itself, and `tokens` the spans of their tokens.

    A word of the translation with an unknown token becomes the source word to which it attends most
    by the `weights` (T, S) of tokens. `unknown` are the numbers of the unknown tokens. Those side
    by side are parts of one word.
    """
    source, target = texts
    unknowns = whole_words(target, [tokens[1][number] for number in unknown])
    known = words(source, tokens[0])
    of_words = word_weights(weights, shares(tokens[0], known), shares(tokens[1], unknowns))
    best = [(0, 0)] * len(unknowns)  # of a source without words
    if known:
        best = [known[number] for number in of_words.argmax(axis=1)]
    text, places = with_replaced(target, unknowns, [source[start:end] for start, end in best])
    return text, [(places[start][0], places[end][1]) for start, end in tokens[1]]


def with_replaced(
    text: str, spans: Sequence[Span], replacements: Sequence[str]
) -> tuple[str, list[Span]]:
    """Return `text` with `replacements` for its `spans`, and the new places for each old one.

    They are those of a token that begins there and of one that ends there. Tokens inside a span
    cover its replacement."""
    result, last = "", 0
    places: list[Span] = []
    for (start, end), new in [*zip(spans, replacements), ((len(text), len(text)), "")]:
        before = len(result)
        result += text[last:start]
        places += [(place, place) for place in range(before, len(result) + 1)]
        inside = len(result), len(result) + len(new)
        places += [inside] * (end - start - 1)
        result += new
        last = end
    return result, places


def whole_words(text: str, spans: Sequence[Span]) -> list[Span]:
    """Return `spans` in `text`, in order, with the letters that touch them. White space around them
    is left out. Those that touch become one."""
    wholes: list[Span] = []
    for start, end in spans:
        start += len(text[start:end]) - len(text[start:end].lstrip())
        end = start + len(text[start:end].rstrip())
        while start > 0 and is_of_word(text[start - 1]):
            start -= 1
        while end < len(text) and is_of_word(text[end]):
            end += 1
        if wholes and start <= wholes[-1][1]:
            start = wholes.pop()[0]
        if start < end:
            wholes.append((start, end))
    return wholes


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


def diagonal_alignment(source: str, target: str) -> Alignment:
    """Return the alignment of words in their order: of a text that was copied, each with itself."""
    spans = words(source, ()), words(target, ())
    weights = np.zeros((len(spans[1]), len(spans[0])), np.float32)
    if weights.size:
        places = np.rint(np.linspace(0, len(spans[0]) - 1, len(spans[1]))).astype(int)
        weights[range(len(spans[1])), places] = 1
    return Alignment(target, *spans, weights)


def moved(alignment: Alignment, source: int, target: int) -> Alignment:
    """Return `alignment` with spans in texts that begin `source` and `target` characters before."""
    spans = ((alignment.source, source), (alignment.target, target))
    source_spans, target_spans = (
        [(start + by, end + by) for start, end in group] for group, by in spans
    )
    return replace(alignment, source=source_spans, target=target_spans)


# --------------------------------------------------------------------------------- spans of tokens


def source_spans(row: Sequence[int], encoding: Encoding) -> list[Span]:
    """Return the span in a text of each token of `row`, (0, 0) for tokens that are no text.

    `encoding` is that of the text without special tokens. `row` has its tokens, with special tokens
    or languages around them.
    """
    ids = encoding.ids
    starts = range(len(row) - len(ids) + 1)
    before = next((start for start in starts if [*row[start : start + len(ids)]] == ids), 0)
    spans = [(0, 0)] * before + list(encoding.offsets)
    return spans[: len(row)] + [(0, 0)] * (len(row) - len(spans))


def target_spans(
    tokens: Sequence[int],
    detokenizer: Detokenizer | CleaningDetokenizer,
    special_ids: Collection[int],
) -> tuple[str, list[Span]]:
    """Return the text of generated `tokens`, and the span of each in it.

    A special token has an empty span. Tokens whose text comes with that of a later one, such as
    parts of a character, have the span of that one. `detokenizer` is a new one.
    """
    text = ""
    spans: list[Span] = []
    waiting: list[int] = []  # numbers of tokens without their text yet
    for token in [*tokens, None]:
        piece = detokenizer.end() if token is None else detokenizer.add(token)
        span = len(text), len(text) + len(piece)
        text += piece
        if token is not None:
            waiting += [] if token in special_ids else [len(spans)]
            spans.append((span[0], span[0]))
        if piece:
            for number in waiting:
                spans[number] = span
            waiting = []
    return text, spans
