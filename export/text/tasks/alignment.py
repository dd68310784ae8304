"""Word alignments of generated texts: which words of a source each word came from."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ...engine.inputs import Generated
from ..alignments import (
    Alignment,
    Span,
    align_words,
    source_spans,
    target_spans,
    with_source_words,
)
from ..text_model import TextModel
from .segments import Part
from .task import JsonObject

WEIGHT_DIGITS = 4  # after the point, of weights in JSON


class Translation(NamedTuple):
    """A translation, and the words that belong together: `alignments` has the span of a word in the
    source and that of a word in the translation, in the order of the translation. A span is the
    start and the end of its characters."""

    text: str
    alignments: list[tuple[Span, Span]]

    def without_prefix(self, length: int) -> "Translation":
        """Return this translation with spans in a source that lacks its first `length`
        characters."""
        pairs = [
            ((start - length, end - length), target) for (start, end), target in self.alignments
        ]
        return self._replace(alignments=pairs)


def align_sentences(
    runtime: TextModel,
    sentences: Sequence[tuple[Part, Sequence[int], Generated]],
    unknown: int | None = None,
) -> Iterator[Alignment]:
    """Yield the alignment of each sentence with its translation. Spans in the source begin after
    its prefix.

    A sentence has its part of the text, its token ids, and its result with an alignment. The words
    of a translation with the token `unknown` become the source words that they are aligned with.
    """
    hidden = runtime.special_ids - {unknown}
    encodings = runtime.encodings([part.text for part, *_ in sentences], special_tokens=False)
    for (part, row, result), encoding in zip(sentences, encodings, strict=True):
        assert result.alignment is not None  # it was asked for
        spans = [
            (max(start - part.prefix, 0), max(end - part.prefix, 0))
            for start, end in source_spans(row, encoding)
        ]
        text, places = target_spans(result.tokens, runtime.detokenizer(hidden), hidden)
        source, weights = part.text[part.prefix :], result.alignment
        numbers = [number for number, token in enumerate(result.tokens) if token == unknown]
        if numbers:
            text, places = with_source_words((source, text), (spans, places), weights, numbers)
        yield align_words((source, text), (spans, places), weights)


def moses_pairs(source: str, translation: Alignment | Translation) -> str:
    """Return the alignments of a translation of `source` as pairs of numbers of
    white-space-separated words, such as "0-0 1-2"."""
    numbers = [word_numbers(text) for text in (source, translation.text)]
    pairs = translation.alignments
    links = {(numbers[0][one[0]], numbers[1][other[0]]) for one, other in pairs}
    return " ".join(f"{one}-{other}" for one, other in sorted(links))


def soft_alignment(source: str, translation: Alignment) -> JsonObject:
    """Return the words of `source` and of its `translation` with their spans, as JSON, and the
    `weights` of each target word for all source words."""

    def with_spans(text: str, spans: list[Span]) -> list[JsonObject]:
        return [{"word": text[start:end], "start": start, "end": end} for start, end in spans]

    return {
        "source": with_spans(source, translation.source),
        "target": with_spans(translation.text, translation.target),
        "weights": translation.weights.astype(float).round(WEIGHT_DIGITS).tolist(),
    }


# functions of a source and its translation that return what `generate --alignments` writes
ALIGNMENTS = {"moses": moses_pairs, "json": soft_alignment}


def word_numbers(text: str) -> list[int]:
    """Return, for each character of `text`, the number of the white-space-separated word that it is
    in."""
    begins = [
        not character.isspace() and (place == 0 or text[place - 1].isspace())
        for place, character in enumerate(text)
    ]
    return [count - 1 for count in accumulate(begins)]
