"""The parts of a text: sentences and marks that are translated, and what stands between them."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...errors import UsageError
from ...inference.export_info import ExportInfo
from ..alignments import Alignment, diagonal_alignment, moved
from ..checks import check_choice, check_flags
from ..markup import MarkedText, kept_texts
from ..markup_html import html_texts
from ..markup_places import with_marks
from ..placeholders import Keep
from ..text_model import Translator
from .alignment import Aligning, Translated, plain_text
from .sentences import DEFAULT_LANGUAGE, WIDE_ENDS, has_letters, sentences_and_spaces

HTML = "html"


class TextOptions(NamedTuple):
    """The options of `translate` that decide which parts of a text the model translates, and what
    is aligned.

    `language` is the code of the language whose abbreviations are known, by default the language of
    the text.
    """

    split: bool = True
    copy_letterless: bool = True
    language: str | None = None
    markup: str | None = None
    keep: Keep = None
    aligning: Aligning = Aligning()

    def check(self, info: ExportInfo) -> None:
        """Raise UsageError for a value of another type, for an unknown `markup`, and for marks with
        alignments, and ValueError if an export cannot align words."""
        self.aligning.check(info)
        if self.aligning.return_alignments:
            check_unmarked(markup=self.markup, keep=self.keep)
        check_flags(split=self.split, copy_letterless=self.copy_letterless)
        check_choice("markup", self.markup, (None, HTML))

    def in_language(self, runtime: Translator, src_lang: str | None) -> "TextOptions":
        """Return these options with the language code of `src_lang`, unless a language is set.

        `src_lang` is a name of the model, None for its default source language.
        """
        return self._replace(language=self.language or runtime.sentence_languages.get(src_lang))


def check_unmarked(**options: Any) -> None:
    """Raise UsageError if one of `options` is set with alignments, whose spans do not count
    marks."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise UsageError(
                f"{name} is {value!r:.60} with alignments, expected only one of them", name
            )


class Part(NamedTuple):
    """A sentence, or the white space between two sentences. A sentence is translated or copied.

    The first `prefix` characters of `text` are not of the sentence, but a language word. `start` is
    where the part begins in its text.
    """

    text: str
    is_sentence: bool
    is_translated: bool
    start: int
    prefix: int = 0

    @property
    def length(self) -> int:
        """Number of characters without the language word."""
        return len(self.text) - self.prefix


class Segment(NamedTuple):
    """The parts of a text, or of a marked text in it. The places of `parts` are in `marked`."""

    parts: list[Part]
    marked: MarkedText | None = None


def split_text(
    runtime: Translator, text: str, text_options: TextOptions, kept: re.Pattern | None = None
) -> list[Segment]:
    """Return the segments of `text`, those of plain text or the texts between its marks. A language
    word at the start of the text, such as >>de<<, is repeated before each sentence that is
    translated.

    `text_options` say whether to split, what is copied, the language, and the markup.
    Matches of `kept` stay unchanged.
    """
    word = text[: runtime.languages.word_end(text)]
    rest = text[len(word) :].lstrip() if word else text
    start = len(text) - len(rest)
    prefix = f"{word} " if word and text_options.split and rest else text[:start]
    if text_options.markup is not None:
        texts = html_texts(rest, runtime.aligns_markup, kept)
    elif kept is not None and kept.search(rest):
        texts = kept_texts(rest, kept, text_options.split)
    else:
        return [Segment(split_sentences(rest, text_options, prefix, start))]
    return [
        Segment([Part(text, False, False, 0)])
        if isinstance(text, str)
        else Segment(split_sentences(text.text, text_options, prefix), text)
        for text in texts
    ]


def split_sentences(
    text: str, text_options: TextOptions, prefix: str, start: int = 0
) -> list[Part]:
    """Return the sentences of `text` and the white space between them.

    `text_options` say whether to split, what is copied, and the language. `prefix`, such as a
    language word, is repeated before each sentence that is translated. `start` is where `text`
    begins in the places of the parts.
    """
    if not (text_options.split and text):
        return [sentence_part(text, start, prefix, text_options)]
    parts = []
    for part, is_sentence in sentences_and_spaces(text, text_options.language or DEFAULT_LANGUAGE):
        parts.append(
            sentence_part(part, start, prefix, text_options)
            if is_sentence
            else Part(part, False, False, start)
        )
        start += len(part)
    return parts


def sentence_part(sentence: str, start: int, prefix: str, text_options: TextOptions) -> Part:
    """Return the part of a plan for `sentence`, which begins at `start` of its text. A sentence
    without letters is copied if `text_options` say so, else it is translated, with `prefix`, such
    as a language word, before it.
    """
    if text_options.copy_letterless and not has_letters(sentence):
        return Part(sentence, True, False, start)
    return Part(prefix + sentence, True, True, start, len(prefix))


def join_segment(segment: Segment, translated: Iterator[Translated]) -> str:
    """Return the translation of `segment`, whose sentences are the next of `translated`."""
    parts, marked = segment
    if marked is None:
        return join_sentences(parts, translated, False)[0]
    return with_marks(marked, *join_sentences(parts, translated, bool(marked.marks)))


def join_sentences(
    parts: Sequence[Part], translated: Iterator[Translated], is_aligned: bool
) -> tuple[str, list[Alignment]]:
    """Return the joined translation of `parts`, and the alignment of each sentence if `is_aligned`.
    Sentences that have none are aligned in the order of their words.

    The sentences that are translated are the next of `translated`.
    """
    results = [next(translated) if part.is_translated else part.text for part in parts]
    texts = [(plain_text(result), part.is_sentence) for result, part in zip(results, parts)]
    if not is_aligned:
        return join_parts(texts), []
    joined, alignments = "", []
    for part, result, spaced in zip(parts, results, spaced_parts(texts)):
        joined += spaced
        if part.is_sentence:
            if isinstance(result, str):
                result = diagonal_alignment(part.text[part.prefix :], result)
            alignments.append(moved(result, part.start, len(joined) - len(result.text)))
    return joined, alignments


def join_parts(parts: list[tuple[str, bool]]) -> str:
    """Return the joined text of `parts`, each a text and True if it is a sentence."""
    return "".join(spaced_parts(parts))


def spaced_parts(parts: list[tuple[str, bool]]) -> Iterator[str]:
    """Yield the text of each of `parts`, a text and True if it is a sentence, with a space before
    it where one is needed.

    A space separates two sentences without white space between them, except after a full stop of
    Chinese or Japanese.
    """
    last = ""  # character before the part
    is_open = False  # a sentence came last
    for part, is_sentence in parts:
        needs_space = is_sentence and is_open and last and last not in WIDE_ENDS
        yield f" {part}" if needs_space else part
        last = part[-1:] or (" " if needs_space else last)
        is_open = is_sentence or (is_open and not part)
