"""Word alignments of generated texts: which words of a source each word came from."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ...engine.inputs import Generated
from ..alignments import Alignment, Span, align_words, shifted
from ..text_model import Translator
from ..token_spans import source_spans, target_spans


class Translation(NamedTuple):
    """A translation, and the words that belong together: `alignments` has the span of a word in the
    source and that of a word in the translation, in the order of the translation. A span is the
    start and the end of its characters."""

    text: str
    alignments: list[tuple[Span, Span]]


class Sentence(NamedTuple):
    """A sentence that the model translated.

    Args:
        text: what the tokenizer read.
        row: its token ids.
        result: what was generated after the start token, with its alignment.
        prefix: number of characters of `text` before the sentence, such as a language word.
    """

    text: str
    row: list[int]
    result: Generated
    prefix: int = 0


def align_sentences(runtime: Translator, sentences: Sequence[Sentence]) -> list[Alignment]:
    """Return the alignment of each sentence with its translation. Spans in the source begin after
    its prefix."""
    encodings = runtime.encodings([sentence.text for sentence in sentences], special_tokens=False)
    results = []
    for sentence, encoding in zip(sentences, encodings, strict=True):
        tokens, weights = sentence.result.tokens, sentence.result.alignment
        assert weights is not None  # it was asked for
        before = sentence.prefix
        spans = [
            (max(start - before, 0), max(end - before, 0))
            for start, end in source_spans(sentence.row, encoding)
        ]
        text, places = target_spans(tokens, runtime.detokenizer(), runtime.special_ids)
        texts = sentence.text[before:], text
        results.append(align_words(texts, (spans, places), weights))
    return results


def aligned_texts(
    runtime: Translator,
    texts: Sequence[str],
    rows: list[list[int]],
    results: list[Generated],
) -> list[Alignment]:
    """Return the translation of each of `texts`, whose token ids are `rows`, with its alignment.

    `results` are N for each text. A language word at the start of a text is not aligned.
    """
    copies = len(results) // len(texts)
    sentences = [
        Sentence(text, row, results[number * copies + copy], runtime.languages.word_end(text))
        for number, (text, row) in enumerate(zip(texts, rows, strict=True))
        for copy in range(copies)
    ]
    aligned = align_sentences(runtime, sentences)
    return [
        shifted(alignment, before, 0)
        for alignment, (*_, before) in zip(aligned, sentences, strict=True)
    ]


def moses_pairs(source: str, translation: Alignment | Translation) -> str:
    """Return the alignments of a translation of `source` as pairs of numbers of
    white-space-separated words, such as "0-0 1-2"."""
    numbers = [word_numbers(text) for text in (source, translation.text)]
    pairs = translation.alignments
    links = {(numbers[0][one[0]], numbers[1][other[0]]) for one, other in pairs}
    return " ".join(f"{one}-{other}" for one, other in sorted(links))


def word_numbers(text: str) -> list[int]:
    """Return, for each character of `text`, the number of the white-space-separated word that it is
    in."""
    begins = [
        not character.isspace() and (place == 0 or text[place - 1].isspace())
        for place, character in enumerate(text)
    ]
    return [count - 1 for count in accumulate(begins)]
