"""Word alignments of generated texts: which words of a source each word came from."""

from collections.abc import Sequence
from itertools import accumulate, compress
from typing import Any, NamedTuple

from ...engine.inputs import Generated
from ...inference.export_info import ExportInfo
from ..alignments import Alignment, Span, align_words, moved, with_source_words
from ..checks import check_flags
from ..text_model import Translator
from ..token_spans import source_spans, target_spans

WEIGHT_DIGITS = 4  # after the point, of weights in JSON


class Aligning(NamedTuple):
    """The uses of alignments in a call: to return them, and to replace unknown words."""

    return_alignments: bool = False
    replace_unknowns: bool = False

    def check(self, info: ExportInfo) -> None:
        """Raise UsageError if a value is not a boolean, and ValueError if an export cannot align
        words."""
        check_flags(**self._asdict())
        if any(self):
            info.check_alignment()


def unknown_token(runtime: Translator, replace_unknowns: bool) -> int | None:
    """Return the token whose words are replaced, or None if none are. Sequences without it need no
    alignment."""
    return runtime.tokenizer_settings.special_tokens["unk_token"] if replace_unknowns else None


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


Translated = str | Alignment  # a translation, with its alignment if there is a use for it


def plain_text(translated: Translated) -> str:
    return translated if isinstance(translated, str) else translated.text


class Sentence(NamedTuple):
    """A sentence that the model translated.

    Args:
        text: what the tokenizer read.
        row: its token ids.
        result: what was generated after the start token, with its alignment.
        prefix: number of characters of `text` before the sentence, such as a language word.
    """

    text: str
    row: Sequence[int]
    result: Generated
    prefix: int = 0


def align_sentences(
    runtime: Translator, sentences: Sequence[Sentence], replace_unknowns: bool = False
) -> list[Alignment]:
    """Return the alignment of each sentence with its translation. Spans in the source begin after
    its prefix.

    With `replace_unknowns` the words of a translation with the unknown token become the source
    words that they are aligned with.
    """
    unknown = unknown_token(runtime, replace_unknowns)
    hidden = runtime.special_ids - {unknown}
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
        text, places = target_spans(tokens, runtime.detokenizer(hidden), hidden)
        texts, of_tokens = (sentence.text[before:], text), (spans, places)
        numbers = [number for number, token in enumerate(tokens) if token == unknown]
        if numbers:
            texts, of_tokens = with_source_words(texts, of_tokens, weights, numbers)
        results.append(align_words(texts, of_tokens, weights))
    return results


def decode_sentences(
    runtime: Translator, sentences: Sequence[Sentence], replace_unknowns: bool = False
) -> list[Translated]:
    """Return the translation of each sentence: an `Alignment` if its result has one, else a text.
    For `replace_unknowns` see `align_sentences`."""
    are_aligned = [sentence.result.alignment is not None for sentence in sentences]
    aligned = iter(align_sentences(runtime, [*compress(sentences, are_aligned)], replace_unknowns))
    plain = [one.result.tokens for one in sentences if one.result.alignment is None]
    texts = iter(runtime.decode(plain))
    return [next(aligned) if has else next(texts) for has in are_aligned]


def decode_texts(
    runtime: Translator,
    texts: Sequence[str],
    rows: Sequence[Sequence[int]],
    results: Sequence[Generated],
    replace_unknowns: bool = False,
) -> list[Translated]:
    """Return the translations of `texts`, whose token ids are `rows`, as `decode_sentences` does.

    `results` are N for each text. A language word at the start of a text is not aligned.
    """
    copies = len(results) // len(texts)
    sentences = [
        Sentence(text, row, results[number * copies + copy], runtime.languages.word_end(text))
        for number, (text, row) in enumerate(zip(texts, rows, strict=True))
        for copy in range(copies)
    ]
    return [
        moved(result, prefix, 0) if isinstance(result, Alignment) else result
        for result, (*_, prefix) in zip(
            decode_sentences(runtime, sentences, replace_unknowns), sentences, strict=True
        )
    ]


def moses_pairs(source: str, translation: Alignment | Translation) -> str:
    """Return the alignments of a translation of `source` as pairs of numbers of
    white-space-separated words, such as "0-0 1-2"."""
    numbers = [word_numbers(text) for text in (source, translation.text)]
    pairs = translation.alignments
    links = {(numbers[0][one[0]], numbers[1][other[0]]) for one, other in pairs}
    return " ".join(f"{one}-{other}" for one, other in sorted(links))


def soft_alignment(source: str, translation: Alignment) -> dict[str, Any]:
    """Return the words of `source` and of its `translation` with their spans, as JSON, and the
    `weights` of each target word for all source words."""

    def with_spans(text: str, spans: list[Span]) -> list[dict[str, Any]]:
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
