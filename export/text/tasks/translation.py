"""Translation of texts of any length, sentence by sentence."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...engine.inputs import Generated, check_options, with_targets
from ...heads import TRANSLATE
from ...inference.logits import row_seed, row_seeds
from ...inference.options import Options, check_seeds, check_single
from ..alignments import Alignment
from ..checks import check_flags, check_texts
from ..languages import Choice
from ..text_model import Translator
from .alignment import (
    Sentence,
    Translation,
    align_sentences,
    copied_words,
    shifted,
)
from .rows import check_row, require
from .sentences import DEFAULT_LANGUAGE, WIDE_ENDS, sentences_and_spaces

MAX_TOKENS = 512  # maximum number of tokens of a translated sentence


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
        options: options of `Runtime.generate`, except for several translations per text.

    Raises:
        UsageError: if an option or a language is invalid, the number of `seeds` is not the
            number of texts, or `seed` is set too.
        ValueError: if the export is not an encoder-decoder, a text is blank or begins with an
            unknown language word, or a sentence has more tokens than the model has positions. With
            `return_alignments` also for an export without an alignment graph.
    """
    check_flags(return_alignments=return_alignments)
    options = check_single(options, "translate returns")
    if return_alignments:
        runtime.info.check_alignment()
    plan = make_plan(runtime, texts, Splitting(split, copy_letterless), src_lang, tgt_lang, options)
    check_seeds(seeds, len(texts), plan.options[0].seed)
    rows = tokenize(runtime, plan)
    results = translate_rows(runtime, plan, rows, seeds, return_alignments) if rows else []
    sentences = runtime.decode([result.tokens for result in results])
    if not return_alignments:
        return plan.join(sentences)
    return plan.join_aligned(sentences, align_plan(runtime, plan, rows, results))


class Splitting(NamedTuple):
    """The options of `translate` that decide which parts of a text the model translates.

    `language` is the code of the language whose abbreviations are known, by default the language of
    the text.
    """

    split: bool = True
    copy_letterless: bool = True
    language: str | None = None

    def check(self) -> None:
        """Raise UsageError if a value is not a boolean."""
        check_flags(split=self.split, copy_letterless=self.copy_letterless)

    def in_language(self, runtime: Translator, src_lang: str | None) -> "Splitting":
        """Return these options with the language code of `src_lang`, unless a language is set.

        `src_lang` is a name of the model, None for its default source language.
        """
        return self._replace(language=self.language or runtime.sentence_languages.get(src_lang))


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


@dataclass(frozen=True)
class Plan:
    """The sentences of several texts.

    `parts` are the parts of each text, `languages` its source language, `None` for the default, and
    `options` its checked generation options. Texts with one target language share their options.
    """

    parts: list[list[Part]]
    languages: Sequence[str | None]
    options: list[Options]

    @property
    def sentences(self) -> list[str]:
        """The sentences to translate, of all texts in order."""
        return [part.text for parts in self.parts for part in parts if part.is_translated]

    @property
    def places(self) -> list[tuple[int, int]]:
        """The numbers of the text and of its sentence, for each of `sentences`."""
        counts = [sum(part.is_translated for part in parts) for parts in self.parts]
        return [(text, number) for text, count in enumerate(counts) for number in range(count)]

    def join(self, translated: Iterable[str]) -> list[str]:
        """Return the translation of each text. `translated` has the translations of `sentences`, in
        order."""
        return [join_parts(parts) for parts in self.translated_parts(translated)]

    def translated_parts(self, translated: Iterable[str]) -> list[list[tuple[str, bool]]]:
        """Return the parts of each translation, each a text and True if it is a sentence."""
        rest = iter(translated)
        return [
            [(next(rest) if part.is_translated else part.text, part.is_sentence) for part in parts]
            for parts in self.parts
        ]

    def join_aligned(
        self, translated: Iterable[str], alignments: Iterable[Alignment]
    ) -> list[Translation]:
        """Return the translation of each text with its alignments. `translated` and `alignments`
        are those of `sentences`, in order."""
        rest = iter(alignments)
        results = []
        for parts, texts in zip(self.parts, self.translated_parts(translated), strict=True):
            pairs, joined = [], ""
            for part, (text, _), spaced in zip(parts, texts, spaced_parts(texts)):
                joined += spaced
                start = len(joined) - len(text)
                spans = next(rest).alignments if part.is_translated else copied_words(text)
                pairs += shifted(spans, part.start, start)
            results.append(Translation(joined, pairs))
        return results


def make_plan(
    runtime: Translator,
    texts: Sequence[str],
    splitting: Splitting,
    src_lang: Choice,
    tgt_lang: Choice,
    options: dict[str, Any],
) -> Plan:
    """Return the plan to translate `texts`: how they are split, and what is generated or copied.
    `src_lang` and `tgt_lang` are one language for all texts, or a list with one for each. `options`
    are generation options by name.

    Raises:
        UsageError: for an unknown language, and for an option or a value of `splitting` that is
            wrong, even if every sentence is copied.
        ValueError: if the export is not an encoder-decoder, or a text is blank or begins with an
            unknown language word.
    """
    require(runtime, TRANSLATE)
    splitting.check()
    checked = sentence_options(runtime, options)
    texts = check_texts(texts)
    runtime.languages.check_words(texts)
    if src_lang is not None:
        runtime.languages.ids("src_lang", src_lang, len(texts))
    targets = runtime.target_options(tgt_lang, len(texts), options)
    languages = src_lang if isinstance(src_lang, list | tuple) else [src_lang] * len(texts)
    parts = [
        split_text(runtime, text, splitting.in_language(runtime, name))
        for text, name in zip(texts, languages, strict=True)
    ]
    return Plan(parts, languages, with_targets(runtime.info, checked, targets))


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
    for row, sentence, (text, _) in zip(rows, sentences, places, strict=True):
        check_row(row, f"text {text} of {count}, {sentence!r:.60}", runtime.info.config)
    return rows


def split_text(runtime: Translator, text: str, splitting: Splitting) -> list[Part]:
    """Return the sentences of `text` and the white space between them. A language word at the start
    of the text, such as >>de<<, is repeated before each sentence that is translated.

    `splitting` has the options: whether to split, what is copied, and the language.
    """
    word = text[: runtime.languages.word_end(text)]
    rest = text[len(word) :].lstrip() if word else text
    start = len(text) - len(rest)
    if not (splitting.split and rest):
        return [sentence_part(rest, start, text[:start], splitting)]
    prefix = f"{word} " if word else ""
    parts = []
    for part, is_sentence in sentences_and_spaces(rest, splitting.language or DEFAULT_LANGUAGE):
        parts.append(
            sentence_part(part, start, prefix, splitting)
            if is_sentence
            else Part(part, False, False, start)
        )
        start += len(part)
    return parts


def sentence_part(sentence: str, start: int, prefix: str, splitting: Splitting) -> Part:
    """Return the part of a plan for `sentence`, which begins at `start` of its text. A sentence
    without letters is copied if `splitting` says so, else it is translated, with `prefix`, such as
    a language word, before it.
    """
    if splitting.copy_letterless and not has_letters(sentence):
        return Part(sentence, True, False, start)
    return Part(prefix + sentence, True, True, start, len(prefix))


def has_letters(text: str) -> bool:
    """Return True if `text` has a letter of any script."""
    return any(map(str.isalpha, text))


def translate_rows(
    runtime: Translator,
    plan: Plan,
    rows: list[list[int]],
    seeds: Sequence[int] | None = None,
    is_aligned: bool = False,
) -> list[Generated]:
    """Return the result of each sentence of `plan`, whose token ids are `rows`, with its alignment
    if that `is_aligned`. Sentences of similar length run together.

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
        rows, [[]] * len(rows), options, seeds=seeds, is_aligned=is_aligned
    )
    for sentence, result in zip(sentences, results, strict=True):
        if is_cut(result.tokens, plan.options[0]):
            warn_of_cut(sentence, plan.options[0].max_new_tokens)
    return results


def align_plan(
    runtime: Translator, plan: Plan, rows: list[list[int]], results: list[Generated]
) -> list[Alignment]:
    """Return the alignment of each sentence of `plan`, whose token ids are `rows`, with its
    translation in `results`."""
    prefixes = [part.prefix for parts in plan.parts for part in parts if part.is_translated]
    columns = zip(plan.sentences, rows, results, prefixes, strict=True)
    return align_sentences(runtime, [Sentence(*column) for column in columns])


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
