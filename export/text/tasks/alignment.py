"""Word alignments of generated texts: which words of a source each word came from."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ...engine.inputs import start_tokens
from ...inference.options import Options
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
        tokens: those that were generated, after the start token.
        start: the start token.
        prefix: number of characters of `text` before the sentence, such as a language word.
    """

    text: str
    row: list[int]
    tokens: list[int]
    start: int
    prefix: int = 0


def start_token(runtime: Translator, options: Options) -> int:
    """Return the start token of `options`. Raises ValueError if there is none."""
    return int(start_tokens(runtime.info, 1, None, options)[0, 0])


def align_sentences(runtime: Translator, sentences: Sequence[Sentence]) -> list[Alignment]:
    """Return the alignment of each sentence with its translation. Spans in the source begin after
    its prefix.

    Encoder and alignment graph run, see `Runtime.alignments`, which raises ValueError.
    """
    if not sentences:
        return []
    rows = [sentence.row for sentence in sentences]
    targets = [[sentence.start, *sentence.tokens] for sentence in sentences]
    weights = runtime.runtime.alignments(rows, targets)
    encodings = runtime.encodings([sentence.text for sentence in sentences], special_tokens=False)
    results = []
    for sentence, encoding, of_tokens in zip(sentences, encodings, weights, strict=True):
        before = sentence.prefix
        spans = [
            (max(start - before, 0), max(end - before, 0))
            for start, end in source_spans(sentence.row, encoding)
        ]
        text, places = target_spans(sentence.tokens, runtime.detokenizer(), runtime.special_ids)
        texts = sentence.text[before:], text
        results.append(align_words(texts, (spans, places), of_tokens))
    return results


def aligned_texts(
    runtime: Translator,
    texts: Sequence[str],
    rows: list[list[int]],
    tokens: list[list[int]],
    starts: Sequence[int],
) -> list[Translation]:
    """Return the translation of each of `texts`, whose token ids are `rows`, with its alignments.

    `tokens` are those that were generated, N rows for each text, and `starts` the start token of
    each text. A language word at the start of a text is not aligned.
    """
    copies = len(tokens) // len(texts)
    prefixes = [runtime.languages.word_end(text) for text in texts]
    columns = zip(texts, rows, starts, prefixes, strict=True)
    sentences = [
        Sentence(text, row, tokens[number * copies + copy], start, prefix)
        for number, (text, row, start, prefix) in enumerate(columns)
        for copy in range(copies)
    ]
    alignments = align_sentences(runtime, sentences)
    return [
        Translation(text, shifted(alignment, sentence.prefix, 0).spans)
        for text, sentence, alignment in zip(runtime.decode(tokens), sentences, alignments)
    ]


def moses_pairs(source: str, target: str, pairs: Sequence[tuple[Span, Span]]) -> str:
    """Return `pairs` of spans as pairs of numbers of white-space-separated words, such as
    "0-0 1-2"."""
    numbers = [word_numbers(text) for text in (source, target)]
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
