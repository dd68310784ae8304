"""Translation of texts of any length, sentence by sentence."""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any, NamedTuple

from ...engine.inputs import Generated, check_options, with_targets
from ...errors import UsageError
from ...heads import TRANSLATE
from ...inference.export_info import ExportInfo
from ...inference.logits import row_seed, row_seeds
from ...inference.options import Options, check_seeds, check_single
from ..alignments import Alignment, diagonal_alignment, moved
from ..checks import check_choice, check_flags, check_texts
from ..languages import Choice
from ..markup import MarkedText, kept_line, kept_texts
from ..markup_html import html_texts
from ..markup_places import with_marks
from ..placeholders import Keep, keep_pattern
from ..text_model import Translator
from .alignment import (
    Aligning,
    Sentence,
    Translated,
    Translation,
    decode_sentences,
    plain_text,
    unknown_token,
)
from .rows import check_row, require
from .sentences import DEFAULT_LANGUAGE, WIDE_ENDS, has_letters, sentences_and_spaces

MAX_TOKENS = 512  # maximum number of tokens of a translated sentence
HTML = "html"


def translate(
    runtime: Translator,
    texts: Sequence[str],
    /,
    split: bool = True,
    src_lang: Choice = None,
    tgt_lang: Choice = None,
    copy_letterless: bool = True,
    seeds: Sequence[int] | None = None,
    return_alignments: bool = False,
    markup: str | None = None,
    keep: Keep = None,
    replace_unknowns: bool = False,
    **options: Any,
) -> list[Any]:
    """Return the translation of each text, of any length. Sentences are translated separately and
    joined with the text between them, so line breaks and paragraphs stay. A language word at the
    start of a text, such as `>>deu<<`, applies to all of its sentences.

    A translated sentence has at most `max_new_tokens` tokens, or 512 if neither `options` nor the
    export set a limit, or as many as the model has positions. Longer ones are truncated, with a
    warning.

    Args:
        texts: strings.
        split: split texts into sentences by the rules of
            `vanilla_transformer_export.text.tasks.sentences`. If False, each text is one sentence.
        src_lang, tgt_lang: one language for all texts, or a list with one for each text.
        copy_letterless: copy sentences without letters, such as `12:30`, `***` or an emoji, instead
            of translating them.
        seeds: seeds of sampling, one for each text; by default derived from the option `seed`. The
            seed of a sentence is derived from that of its text.
        return_alignments: return a `Translation` for each text, with its text and its alignments:
            pairs of the span of a word in the source and that of a word in the translation. A span
            is the start and the end of its characters.
        markup: "html" for texts in HTML. Sentences continue over tags such as `<b>` and `<a>`,
            which go around the words that their words became. Tags and what is not text stay
            unchanged. Each text between two tags is a sentence, with a warning, if the export has
            no alignment graph.
        keep: what stays unchanged in the texts: a list of strings, a regular expression, or True
            for `{name}`, `%s`, `<0>` and addresses. Emoji that the vocabulary of the model lacks
            are kept too if the export has an alignment graph. False keeps nothing.
        replace_unknowns: replace each word with the unknown token by the word of the source that it
            is aligned with.
        options: options of `Runtime.generate`, except for several translations per text.

    Raises:
        UsageError: if an option or a language is invalid, the number of `seeds` is not the
            number of texts, or `seed` is set too. Also for `return_alignments` with `markup` or
            `keep`.
        ValueError: if the export is not an encoder-decoder, a text is blank or begins with an
            unknown language word, or a sentence has more tokens than the model has positions. With
            `return_alignments`, `keep` or `replace_unknowns` also for an export without an
            alignment graph.
    """
    options = check_single(options, "translate returns")
    require(runtime, TRANSLATE)
    aligning = Aligning(return_alignments, replace_unknowns)
    text_options = TextOptions(split, copy_letterless, None, markup, keep, aligning)
    plan = make_plan(runtime, texts, text_options, src_lang, tgt_lang, options)
    check_seeds(seeds, len(texts), plan.options[0].seed)
    rows = tokenize(runtime, plan)
    results = translate_rows(runtime, plan, rows, seeds) if rows else []
    return join_results(runtime, plan, rows, results)


def join_results(
    runtime: Translator,
    plan: "Plan",
    rows: Sequence[Sequence[int]],
    results: Sequence[Generated],
) -> list[Any]:
    """Return the translation of each text of `plan`, from the token ids `rows` of its sentences and
    their `results`. It is a text, or a `Translation` if the plan returns alignments."""
    columns = zip(plan.sentences, rows, results, plan.prefixes, strict=True)
    sentences = [Sentence(*column) for column in columns]
    translated = decode_sentences(runtime, sentences, plan.aligning.replace_unknowns)
    join = plan.join_aligned if plan.aligning.return_alignments else plan.join
    return join(translated)


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


def marked_lines(runtime: Translator, texts: Sequence[str], keep: Keep) -> list[MarkedText]:
    """Return each of `texts` with what `keep` keeps as marks. None and False keep nothing.

    Raises UsageError and ValueError as `keep_pattern` does.
    """
    texts = check_texts(texts)
    if keep is None or keep is False:
        return [MarkedText(text, [], text) for text in texts]
    kept = keep_pattern(runtime, texts, keep)
    return [kept_line(text, kept) for text in texts]


def join_lines(lines: Sequence[MarkedText], translated: Sequence[Translated]) -> list[str]:
    """Return `translated`, N translations of each of `lines`, with the marks of the lines. They
    are aligned if their line has marks."""
    copies = len(translated) // len(lines)
    of_each = [line for line in lines for _ in range(copies)]
    return [
        with_marks(line, plain_text(result), [result] if isinstance(result, Alignment) else [])
        if line.text
        else line.raw
        for line, result in zip(of_each, translated, strict=True)
    ]


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


@dataclass(frozen=True)
class Plan:
    """The sentences of several texts.

    `segments` are those of each text, `languages` its source language, `None` for the default, and
    `options` its checked generation options. Texts with one target language share their options.
    `aligning` says what alignments are used for, besides marks.
    """

    segments: list[list[Segment]]
    languages: Sequence[str | None]
    options: list[Options]
    aligning: Aligning

    @property
    def parts(self) -> list[list[Part]]:
        """The parts of each text."""
        return [[part for parts, _ in segments for part in parts] for segments in self.segments]

    @property
    def sentences(self) -> list[str]:
        """The sentences to translate, of all texts in order."""
        return [part.text for parts in self.parts for part in parts if part.is_translated]

    @property
    def prefixes(self) -> list[int]:
        """The number of characters before each of `sentences`, those of a language word."""
        return [part.prefix for parts in self.parts for part in parts if part.is_translated]

    @property
    def places(self) -> list[tuple[int, int]]:
        """The numbers of the text and of its sentence, for each of `sentences`."""
        counts = [sum(part.is_translated for part in parts) for parts in self.parts]
        return [(text, number) for text, count in enumerate(counts) for number in range(count)]

    @property
    def are_aligned(self) -> list[bool]:
        """True for each of `sentences` whose alignment is needed: a mark begins or ends in it, or
        those of all are returned."""
        return [
            self.aligning.return_alignments
            or (marked is not None and marked.divides(part.start, part.start + part.length))
            for segments in self.segments
            for parts, marked in segments
            for part in parts
            if part.is_translated
        ]

    def join(self, translated: Iterable[Translated]) -> list[str]:
        """Return the translation of each text. `translated` has the translations of `sentences`, in
        order: an `Alignment` for those that marks divide."""
        rest = iter(translated)
        return [
            "".join(join_segment(segment, rest) for segment in segments)
            for segments in self.segments
        ]

    def join_aligned(self, translated: Iterable[Translated]) -> list[Translation]:
        """Return the translation of each text with its alignments. `translated` has those of
        `sentences`, in order. No text has marks."""
        rest = iter(translated)
        results = []
        for [(parts, _)] in self.segments:
            text, alignments = join_sentences(parts, rest)
            pairs = [pair for alignment in alignments for pair in alignment.alignments]
            results.append(Translation(text, pairs))
        return results


def join_segment(segment: Segment, translated: Iterator[Translated]) -> str:
    """Return the translation of `segment`, whose sentences are the next of `translated`."""
    parts, marked = segment
    if marked is not None and marked.marks:
        return with_marks(marked, *join_sentences(parts, translated))
    texts = translated_parts(parts, translated)
    joined = join_parts([(plain_text(text), part.is_sentence) for text, part in zip(texts, parts)])
    return joined if marked is None else with_marks(marked, joined, [])


def translated_parts(
    parts: Sequence[Part], translated: Iterator[Translated]
) -> Iterator[Translated]:
    """Return the translation of each of `parts`. Those of sentences are the next of
    `translated`."""
    return (next(translated) if part.is_translated else part.text for part in parts)


def join_sentences(
    parts: Sequence[Part], translated: Iterator[Translated]
) -> tuple[str, list[Alignment]]:
    """Return the joined translation of `parts`, and the alignment of each sentence. Sentences that
    have none are aligned in the order of their words.

    The sentences that are translated are the next of `translated`.
    """
    results = [*translated_parts(parts, translated)]
    texts = [(plain_text(result), part.is_sentence) for result, part in zip(results, parts)]
    joined = ""
    alignments = []
    for part, result, spaced in zip(parts, results, spaced_parts(texts)):
        joined += spaced
        if part.is_sentence:
            if isinstance(result, str):
                result = diagonal_alignment(part.text[part.prefix :], result)
            alignments.append(moved(result, part.start, len(joined) - len(result.text)))
    return joined, alignments


def make_plan(
    runtime: Translator,
    texts: Sequence[str],
    text_options: TextOptions,
    src_lang: Choice,
    tgt_lang: Choice,
    options: dict[str, Any],
) -> Plan:
    """Return the plan to translate `texts`: how they are split, and what is generated or copied.
    The export is an encoder-decoder.
    `src_lang` and `tgt_lang` are one language for all texts, or a list with one for each. `options`
    are generation options by name.

    Raises:
        UsageError: for an unknown language, and for an option or a value of `text_options` that is
            wrong, even if every sentence is copied.
        ValueError: if a text is blank or begins with an unknown language word, or the export cannot
            align words.
    """
    text_options.check(runtime.info)
    checked = sentence_options(runtime, options)
    texts = check_texts(texts)
    runtime.languages.check_words(texts)
    if src_lang is not None:
        runtime.languages.ids("src_lang", src_lang, len(texts))
    targets = runtime.target_options(tgt_lang, len(texts), options)
    languages = src_lang if isinstance(src_lang, list | tuple) else [src_lang] * len(texts)
    plain = map(unescape, texts) if text_options.markup else texts
    keep = False if text_options.aligning.return_alignments else text_options.keep
    kept = keep_pattern(runtime, plain, keep)
    segments = [
        split_text(runtime, text, text_options.in_language(runtime, name), kept)
        for text, name in zip(texts, languages, strict=True)
    ]
    all_options = with_targets(runtime.info, checked, targets)
    return Plan(segments, languages, all_options, text_options.aligning)


def sentence_options(runtime: Translator, options: dict[str, Any]) -> Options:
    """Return the checked generation options of a sentence.

    If neither `options` nor the export set the maximum number of new tokens, it is 512, or the
    number of the model's positions if that is less. Raises UsageError or ValueError as
    `check_options` does.
    """
    settings = {**runtime.info.defaults, **options}
    if all(settings.get(name) is None for name in ("max_new_tokens", "max_length")):
        limit = min(MAX_TOKENS, runtime.info.config["max_position_embeddings"])
        options = {**options, "max_new_tokens": limit}
    return check_options(runtime.info, options).for_prompt(1)  # the start token


def tokenize(runtime: Translator, plan: Plan) -> list[list[int]]:
    """Return the token ids of each sentence of `plan` to translate.

    Raises ValueError for a sentence with more tokens than the model has positions.
    """
    sentences, places, count = plan.sentences, plan.places, len(plan.parts)
    if not sentences:
        return []
    languages = [plan.languages[text] for text, _ in places]
    rows = runtime.rows(sentences, [name for name in languages if name is not None] or None)
    limit = runtime.info.config["max_position_embeddings"]
    for row, sentence, (text, _) in zip(rows, sentences, places, strict=True):
        if not 0 < len(row) <= limit:  # a name takes as long as a sentence
            check_row(row, f"text {text} of {count}, {sentence!r:.60}", runtime.info.config)
    return rows


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


def translate_rows(
    runtime: Translator,
    plan: Plan,
    rows: list[list[int]],
    seeds: Sequence[int] | None = None,
) -> list[Generated]:
    """Return the result of each sentence of `plan`, whose token ids are `rows`, with its alignment
    where it is needed. Sentences of similar length run together.

    A sentence that was cut at the limit causes a warning. `seeds` has a seed for each text, from
    which those of its sentences are derived, by default from the seed of the options.
    """
    sentences, places = plan.sentences, plan.places
    if seeds is None:
        seeds = row_seeds(plan.options[0].seed, len(plan.parts))
    if seeds is not None:
        seeds = [row_seed(seeds[text], number) for text, number in places]
    options = [plan.options[text] for text, _ in places]
    results = runtime.generate_rows(
        rows,
        [[]] * len(rows),
        options,
        seeds=seeds,
        are_aligned=plan.are_aligned,
        unknown_token=unknown_token(runtime, plan.aligning.replace_unknowns),
    )
    for sentence, result in zip(sentences, results, strict=True):
        if is_cut(result.tokens, plan.options[0]):
            warn_of_cut(sentence, plan.options[0].max_new_tokens)
    return results


def warn_of_cut(sentence: str, limit: int) -> None:
    """Warn that the translation of `sentence` ends after `limit` tokens."""
    seen = f"the translation of {sentence!r:.60} was cut after {limit} tokens"
    warnings.warn(
        f"{seen}, expected an end token: use a larger max_new_tokens", UserWarning, stacklevel=4
    )


def is_cut(tokens: list[int], options: Options) -> bool:
    """Return True if the model generated `max_new_tokens` tokens, the row `tokens`, without an end
    token of its own. An end token that is forced at the limit does not count."""
    limit = options.max_new_tokens
    is_forced = options.forced_eos_token_id is not None
    free = tokens[: limit - 1] if is_forced else tokens
    return len(tokens) >= limit and not set(free) & set(options.eos_token_ids)


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
