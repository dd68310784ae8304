"""Texts of any length, translated sentence by sentence."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import UsageError
from ...heads import TRANSLATE
from ...inference import options as option_fields
from ...inference.inputs import batches
from ...inference.logits import derived_seed
from ...inference.options import as_list, special_token
from ...requests import check_options
from ..languages import LANGUAGE_WORD, Choice
from .rows import check_row, require, single_texts
from .sentences import DEFAULT_LANGUAGE, WIDE_ENDS, sentences_and_spaces

if TYPE_CHECKING:
    from ...text_runtime import TextRuntime

BATCH_SIZE = 32  # sentences that run together
MAX_TOKENS = 512  # maximum of one sentence's translation


def translate(
    runtime: "TextRuntime",
    texts: Sequence[str],
    /,
    split: bool = True,
    src_lang: Choice = None,
    tgt_lang: Choice = None,
    copy_letterless: bool = True,
    seeds: Sequence[int] | None = None,
    **options: Any,
) -> list[str]:
    """Return the translation of each text, of any length. Sentences are translated one by one and
    joined by the text between them, so line breaks and paragraphs stay. A word for the language,
    such as `>>deu<<` at the start of a text, holds for all of its sentences.

    A translation that reaches the most tokens is cut, with a warning. For a sentence that is 512,
    or the model's number of positions if that is less, where neither `options` nor the export set
    another.

    Args:
        texts: strings.
        split: by the rules of `vanilla_transformer_export.text.tasks.sentences`, in the language
            of the text; without, each text is one sentence.
        src_lang, tgt_lang: as `generate`: one for all, or a list of one for each of `texts`.
        copy_letterless: copy sentences without a letter, such as `12:30`, `***` or an emoji,
            instead of translating them.
        seeds: of sampling, one for each of `texts` in place of the option `seed`. Each sentence has
            its own, derived from that of its text.
        options: as `Runtime.generate`, but one translation for each text.

    Raises:
        UsageError: for options that do not go with one translation of each text, for another number
            of `seeds` than of texts, and as `generate`.
        ValueError: for an export that is no encoder-decoder, a text that is empty, a sentence of
            more tokens than the model has positions, and as `generate`.
    """
    options = check_single(option_fields.check(options))
    plan = make_plan(runtime, texts, Splitting(split, copy_letterless), src_lang, tgt_lang, options)
    return plan.join(translate_plan(runtime, plan, options, sentence_seeds(plan, seeds)))


class Splitting(NamedTuple):
    """The options of `translate` that decide which parts of a text the model translates.

    `language` is the code of the language whose abbreviations end no sentence, by default that of
    the text.
    """

    split: bool = True
    copy_letterless: bool = True
    language: str | None = None

    def check(self) -> None:
        """Raise UsageError if a value is not a boolean."""
        for name, value in {"split": self.split, "copy_letterless": self.copy_letterless}.items():
            if not isinstance(value, bool):
                raise UsageError(f"{name} must be True or False, got {value!r:.60}")

    def in_language(self, runtime: "TextRuntime", src_lang: str | None) -> "Splitting":
        """Return these options with the language of a text in `src_lang`, unless a language is
        set."""
        return self._replace(language=self.language or runtime.sentence_languages.get(src_lang))


class Part(NamedTuple):
    """A sentence, or the white space between two sentences. A copied sentence is not translated."""

    text: str
    is_sentence: bool
    is_translated: bool


@dataclass(frozen=True)
class Plan:
    """The generation inputs of several texts. `parts` are the parts of each text; `sentences` are
    translated in order. `rows` holds the tokens of each sentence, `targets` the options of its
    target language. `limit` is the maximum number of new tokens."""

    parts: list[list[Part]]
    sentences: list[str]
    rows: list[list[int]]
    targets: list[dict[str, Any]]
    limit: int

    def join(self, translated: Iterable[str]) -> list[str]:
        """Return the translation of each text, from those of all sentences."""
        rest = iter(translated)
        return [
            join_parts(
                [
                    (next(rest) if part.is_translated else part.text, part.is_sentence)
                    for part in parts
                ]
            )
            for parts in self.parts
        ]


def make_plan(
    runtime: "TextRuntime",
    texts: Sequence[str],
    splitting: Splitting,
    src_lang: Choice,
    tgt_lang: Choice,
    options: dict[str, Any],
) -> Plan:
    """Return the plan to translate `texts` with `options` that have been checked. Raises as
    `translate`."""
    require(runtime, TRANSLATE)
    splitting.check()
    texts = single_texts(texts)
    targets = check_arguments(runtime, texts, src_lang, tgt_lang, options)
    languages = src_lang if isinstance(src_lang, list | tuple) else [src_lang] * len(texts)
    parts = [
        split_text(runtime, text, splitting.in_language(runtime, name))
        for text, name in zip(texts, languages)
    ]
    pairs = [
        (text, part.text)
        for text, text_parts in enumerate(parts)
        for part in text_parts
        if part.is_translated
    ]
    sentences = [part for _, part in pairs]
    places = [text for text, _ in pairs]
    rows = runtime.rows(sentences, repeat_language(src_lang, places)) if sentences else []
    for row, (text, part) in zip(rows, pairs):
        check_row(row, f"text {text} of {len(texts)}, {part!r:.60}", runtime.info.config)
    return Plan(
        parts,
        sentences,
        rows,
        [targets[place] for place in places],
        max_new_tokens(runtime, options),
    )


def check_arguments(
    runtime: "TextRuntime",
    texts: list[str],
    src_lang: Choice,
    tgt_lang: Choice,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return the options of the target language of each text.

    Raises:
        UsageError, ValueError: as `translate`, also if every sentence is copied.
    """
    check_options(runtime.info, options)
    runtime.languages.check_words(texts)
    if src_lang is not None:
        runtime.languages.ids("src_lang", src_lang, len(texts))
    return runtime.target_options(tgt_lang, len(texts), options)


def check_single(options: dict[str, Any]) -> dict[str, Any]:
    count = options.get("num_return_sequences")
    if count not in (None, 1):
        raise UsageError(
            f"num_return_sequences is {count}, expected 1: translate gives one translation of "
            f"each text"
        )
    return {**options, "num_return_sequences": 1}


def repeat_language(language: Choice, places: list[int]) -> Choice:
    """Return the language of each sentence; `places` are the indices of the sentences' texts."""
    return (
        language
        if language is None or isinstance(language, str)
        else [language[place] for place in places]
    )


def split_text(runtime: "TextRuntime", text: str, splitting: Splitting) -> list[Part]:
    """Return the sentences of `text` and the white space between them. Translated sentences begin
    with the language's word."""
    word = LANGUAGE_WORD.match(text) if runtime.languages.words else None
    rest = text[word.end() :].lstrip() if word else text
    if not (splitting.split and rest):
        return [sentence_part(rest, text[: len(text) - len(rest)], splitting)]
    prefix = f"{word[0]} " if word else ""
    return [
        sentence_part(part, prefix, splitting) if is_sentence else Part(part, False, False)
        for part, is_sentence in sentences_and_spaces(rest, splitting.language or DEFAULT_LANGUAGE)
    ]


def sentence_part(sentence: str, prefix: str, splitting: Splitting) -> Part:
    """Return the part for `sentence`. A translated sentence begins with `prefix`, a copied one does
    not."""
    is_translated = not splitting.copy_letterless or has_letters(sentence)
    return Part(prefix + sentence if is_translated else sentence, True, is_translated)


def has_letters(text: str) -> bool:
    """Return whether `text` contains a letter of any script."""
    return any(map(str.isalpha, text))


def sentence_seeds(plan: Plan, seeds: Sequence[int] | None) -> list[int] | None:
    """Return the seed of each sentence, derived from that of its text and its number there."""
    if seeds is None:
        return None
    option_fields.check_seeds(seeds, len(plan.parts))
    return [
        derived_seed(seed, number)
        for seed, parts in zip(seeds, plan.parts)
        for number in range(sum(part.is_translated for part in parts))
    ]


def translate_plan(
    runtime: "TextRuntime",
    plan: Plan,
    options: dict[str, Any],
    seeds: Sequence[int] | None = None,
) -> list[str]:
    """Return the translation of each sentence. Sentences of similar length run together."""
    limit = plan.limit
    results = [""] * len(plan.rows)
    size = runtime.runtime.rows_together(
        len(plan.rows), BATCH_SIZE, {**options, "max_new_tokens": limit}
    )
    for indices in batches(plan.rows, size):
        rows = [plan.rows[place] for place in indices]
        languages = [plan.targets[place] for place in indices]
        arguments = {**options, "max_new_tokens": limit}
        if seeds is not None:
            arguments["seeds"] = [seeds[place] for place in indices]
        tokens, _ = runtime.generate_tokens(rows, [[]] * len(rows), languages, **arguments)
        for place, text, row in zip(indices, runtime.decode(tokens), tokens, strict=True):
            results[place] = text
            if is_cut(runtime, row, limit, options):
                seen = (
                    f"the translation of {plan.sentences[place]!r:.60} was cut after {limit} tokens"
                )
                warnings.warn(
                    f"{seen}, expected an end token: give a larger max_new_tokens",
                    UserWarning,
                    stacklevel=3,
                )
    return results


def max_new_tokens(runtime: "TextRuntime", options: dict[str, Any]) -> int:
    """Return the maximum number of new tokens of a sentence."""
    settings = {**runtime.info.defaults, **options}
    if settings.get("max_new_tokens") is not None:
        return settings["max_new_tokens"]
    longest = settings.get("max_length")
    return (
        min(MAX_TOKENS, runtime.info.config["max_position_embeddings"])
        if longest is None
        else longest - 1
    )


def is_cut(runtime: "TextRuntime", tokens: list[int], limit: int, options: dict[str, Any]) -> bool:
    """Return True if the model reached the limit before it generated an end token."""
    ends = as_list(
        special_token("eos_token_id", options, runtime.info.defaults, runtime.info.config)
    )
    is_forced = special_token("forced_eos_token_id", options, runtime.info.defaults, {}) is not None
    free = tokens[: limit - 1] if is_forced else tokens
    return len(tokens) >= limit and not set(free) & set(ends)


def join_parts(parts: list[tuple[str, bool]]) -> str:
    """Return the text of `parts`. A space separates two sentences without one, unless the first
    ends as in Chinese."""
    text = ""
    is_open = False  # a sentence came last
    for part, is_sentence in parts:
        if is_sentence and is_open and text and text[-1] not in WIDE_ENDS:
            text += " "
        text += part
        is_open = is_sentence or (is_open and not part)
    return text
