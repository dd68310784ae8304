"""Translation of texts of any length, sentence by sentence."""

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import unescape
from typing import Any, NamedTuple

from ...engine.inputs import Generated, check_options, with_targets
from ...heads import TRANSLATE
from ...inference.logits import row_seed, row_seeds
from ...inference.options import Options, check_seeds, check_single
from ..alignments import Alignment, moved
from ..checks import check_texts
from ..languages import Choice
from ..markup import MarkedText, kept_line
from ..text_model import TextModel, check_row
from .alignment import Translation, align_sentences
from .segments import (
    Keep,
    Part,
    Segment,
    TextOptions,
    Translated,
    join_segment,
    join_sentences,
    keep_pattern,
    split_text,
)

MAX_TOKENS = 512  # maximum number of tokens of a translated sentence


def translate(
    runtime: TextModel,
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
            `vanilla_transformer_export.text.tasks.segments`. If False, each text is one sentence.
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
    runtime.require(TRANSLATE)
    text_options = TextOptions(
        split, copy_letterless, markup, keep, return_alignments, replace_unknowns
    )
    plan = make_plan(runtime, texts, text_options, src_lang, tgt_lang, options)
    check_seeds(seeds, len(texts), plan.options[0].seed)
    return plan.join(plan.generate(seeds))


def marked_lines(runtime: TextModel, texts: Sequence[str], keep: Keep) -> list[MarkedText]:
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
    are aligned if their line has marks. A line of marks only stays as it is."""
    copies = len(translated) // len(lines)
    segments = [
        Segment([Part(line.text, True, True, 0)] if line.text else [], line)
        for line in lines
        for _ in range(copies)
    ]
    return [
        join_segment(segment, iter([result]))
        for segment, result in zip(segments, translated, strict=True)
    ]


class Sentence(NamedTuple):
    """A part of a text that the model translates. `place` has the numbers of its text and of itself
    in the text. It is aligned if a mark begins or ends in it, or if alignments are returned."""

    part: Part
    place: tuple[int, int]
    is_aligned: bool


@dataclass(frozen=True)
class Plan:
    """The sentences of several texts.

    `segments` are those of each text, `languages` its source language, `None` for the default, and
    `options` its checked generation options. Texts with one target language share their options.
    """

    runtime: TextModel
    segments: list[list[Segment]]
    languages: Sequence[str | None]
    options: list[Options]
    text_options: TextOptions

    @property
    def parts(self) -> list[list[Part]]:
        """The parts of each text."""
        return [[part for parts, _ in segments for part in parts] for segments in self.segments]

    @cached_property
    def sentences(self) -> list[Sentence]:
        """The sentences to translate, of all texts in order."""
        sentences = []
        for text, segments in enumerate(self.segments):
            number = itertools.count()
            for parts, marked in segments:
                for part in parts:
                    if part.is_translated:
                        end = part.start + part.length
                        is_marked = marked is not None and marked.divides(part.start, end)
                        is_aligned = self.text_options.return_alignments or is_marked
                        sentences.append(Sentence(part, (text, next(number)), is_aligned))
        return sentences

    @property
    def texts(self) -> list[str]:
        """The text of each of `sentences`."""
        return [part.text for part, *_ in self.sentences]

    @cached_property
    def rows(self) -> list[list[int]]:
        """The token ids of each of `sentences`.

        Raises ValueError for a sentence with more tokens than the model has positions.
        """
        if not self.sentences:
            return []
        languages = [self.languages[text] for _, (text, _), _ in self.sentences]
        source = [name for name in languages if name is not None] or None
        rows, config = self.runtime.rows(self.texts, source), self.runtime.info.config
        for row, (part, (text, _), _) in zip(rows, self.sentences, strict=True):
            if not 0 < len(row) <= config["max_position_embeddings"]:
                # a name takes as long as a sentence
                check_row(row, f"text {text} of {len(self.segments)}, {part.text!r:.60}", config)
        return rows

    def generate(self, seeds: Sequence[int] | None = None) -> list[Generated]:
        """Return the result of each of `sentences`, with its alignment where it is needed.
        Sentences of similar length run together.

        A sentence that was cut at the limit causes a warning. `seeds` has a seed for each text,
        from which those of its sentences are derived, by default from the seed of the options.
        """
        if not self.rows:
            return []
        places = [sentence.place for sentence in self.sentences]
        if seeds is None:
            seeds = row_seeds(self.options[0].seed, len(self.segments))
        if seeds is not None:
            seeds = [row_seed(seeds[text], number) for text, number in places]
        results = self.runtime.generate_rows(
            self.rows,
            [self.options[text] for text, _ in places],
            seeds=seeds,
            are_aligned=[sentence.is_aligned for sentence in self.sentences],
            unknown_token=unknown_token(self.runtime, self.text_options.replace_unknowns),
        )
        for text, result in zip(self.texts, results, strict=True):
            if is_cut(result.tokens, self.options[0]):
                warn_of_cut(text, self.options[0].max_new_tokens)
        return results

    def join(self, results: Sequence[Generated]) -> list[Any]:
        """Return the translation of each text, from the results of its `sentences`. It is a text,
        or a `Translation` if alignments are returned."""
        parts = [part for part, *_ in self.sentences]
        unknown = unknown_token(self.runtime, self.text_options.replace_unknowns)
        rest = iter(decode_sentences(self.runtime, parts, self.rows, results, unknown))
        if not self.text_options.return_alignments:
            return [
                "".join(join_segment(segment, rest) for segment in segments)
                for segments in self.segments
            ]
        translations = []
        for [(parts, _)] in self.segments:  # no text has marks
            text, alignments = join_sentences(parts, rest, True)
            pairs = [pair for alignment in alignments for pair in alignment.alignments]
            translations.append(Translation(text, pairs))
        return translations


def make_plan(
    runtime: TextModel,
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
    targets = runtime.languages.target_options(tgt_lang, len(texts), options)
    languages = src_lang if isinstance(src_lang, list | tuple) else [src_lang] * len(texts)
    plain = map(unescape, texts) if text_options.markup else texts
    keep = False if text_options.return_alignments else text_options.keep
    kept = keep_pattern(runtime, plain, keep)
    segments = [
        split_text(runtime, text, text_options.in_language(runtime, name), kept)
        for text, name in zip(texts, languages, strict=True)
    ]
    all_options = with_targets(runtime.info, checked, targets)
    return Plan(runtime, segments, languages, all_options, text_options)


def sentence_options(runtime: TextModel, options: dict[str, Any]) -> Options:
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


# ----------------------------------------------------------------------------- from tokens to texts


def unknown_token(runtime: TextModel, replace_unknowns: bool) -> int | None:
    """Return the token whose words are replaced, or None if none are. Sequences without it need no
    alignment."""
    return runtime.tokenizer_settings.special_tokens["unk_token"] if replace_unknowns else None


def decode_sentences(
    runtime: TextModel,
    parts: Sequence[Part],
    rows: Sequence[Sequence[int]],
    results: Sequence[Generated],
    unknown: int | None,
) -> list[Translated]:
    """Return the translation of each of `parts`, whose token ids are `rows`: an `Alignment` if its
    result has one, else a text. `results` is what was generated after the start token.

    Words with the token `unknown` are replaced, see `align_sentences`.
    """
    sentences = zip(parts, rows, results, strict=True)
    with_alignment = [sentence for sentence in sentences if sentence[2].alignment is not None]
    texts = iter(runtime.decode([one.tokens for one in results if one.alignment is None]))
    if not with_alignment:
        return [*texts]
    aligned = align_sentences(runtime, with_alignment, unknown)
    return [next(texts) if result.alignment is None else next(aligned) for result in results]


def decode_texts(
    runtime: TextModel,
    texts: Sequence[str],
    rows: Sequence[Sequence[int]],
    results: Sequence[Generated],
    unknown: int | None,
) -> list[Translated]:
    """Return the translations of `texts`, whose token ids are `rows`, as `decode_sentences` does.

    `results` are N for each text. A language word at the start of a text is not aligned.
    """
    copies = range(len(results) // len(texts))
    prefixes = map(runtime.languages.word_end, texts)
    parts = [
        Part(text, True, True, 0, prefix) for text, prefix in zip(texts, prefixes) for _ in copies
    ]
    repeated = [row for row in rows for _ in copies]
    return [
        moved(result, part.prefix, 0) if isinstance(result, Alignment) else result
        for result, part in zip(decode_sentences(runtime, parts, repeated, results, unknown), parts)
    ]
