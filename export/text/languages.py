"""The source and target languages of a multilingual model, as recorded in the manifest."""

import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError, did_you_mean, nearest
from ..inference.export_info import MANIFEST, ExportInfo

LANGUAGE_WORD = re.compile(r">>[^\s<>]*<<")  # Marian's word for a language, at the start of a text

Choice = str | list[str] | None  # one language for all texts, or a list with one for each text


@dataclass(frozen=True)
class Languages:
    """The languages of a tokenizer. `tokens` are ids by name, `source` is the source language that
    tokenizer.json sets. `before` and `after` are the ids around a text, with `None` for the
    language. `target` is the generation option that selects the target language. Some models have
    `words` instead, which a text begins with. All fields are empty for a model without
    languages."""

    tokens: dict[str, int] = field(default_factory=dict)
    source: str | None = None
    before: list[int | None] = field(default_factory=list)
    after: list[int | None] = field(default_factory=list)
    target: str = ""
    words: list[str] = field(default_factory=list)

    def rows(self, rows: list[list[int]], src_lang: Choice) -> list[list[int]]:
        """Return the token ids `rows`, each with the special tokens of its source language before
        and after it.

        `src_lang` is the language of all rows, or a list with one for each row. Raises UsageError
        for None, a language that the model lacks, or a list of another length.
        """
        ids = self.ids("src_lang", src_lang, len(rows))
        return [
            [language if id is None else id for id in self.before]
            + row
            + [language if id is None else id for id in self.after]
            for row, language in zip(rows, ids)
        ]

    def ids(self, name: str, languages: Choice, count: int) -> list[int]:
        """Return the token id of the language of each of `count` texts.

        `languages` is one name for all, or a list with one for each. `name` is the argument in
        errors.

        Raises:
            UsageError: if the model has no languages, `languages` is None, a language is unknown,
                or the number of languages is not `count`.
        """
        if not self.tokens:
            hint = (
                f"instead begin each text with one of {some(self.words)}"
                if self.words
                else "the model has no language codes"
            )
            raise UsageError(f"{name} is {languages!r}, expected None: {hint}")
        names = [languages] * count if isinstance(languages, str) else languages
        if not isinstance(names, list | tuple) or not all(
            isinstance(language, str) for language in names
        ):
            raise UsageError(
                f"{name} is {languages!r}, expected the name of a language, or a list with one for "
                f"each text"
            )
        if len(names) != count:
            raise UsageError(
                f"{name} has {len(names)} languages, expected {count}, one for each text"
            )
        for language in names:
            if language not in self.tokens:
                close = nearest_language(language, self.tokens)
                hint = f"; did you mean {close!r}?" if close else ""
                raise UsageError(
                    f"{name} is {language!r}, which the model does not have: expected one of "
                    f"{some(self.tokens)}{hint}"
                )
        return [self.tokens[language] for language in names]

    def target_options(
        self, tgt_lang: Choice, count: int, options: dict[str, Any], default: int | None
    ) -> list[dict[str, Any]]:
        """Return the generation options that select the target language of each of `count` texts.

        Without `tgt_lang`, generation_config.json selects the language: `default` is its token id,
        or None. `options` are the other options of generation.

        Raises:
            UsageError: if a multilingual model has no target language, if both `tgt_lang` and
                `options` select one, if a language is unknown, or if there is another number of
                languages than texts.
        """
        if tgt_lang is None:
            if self.tokens and self.target not in options and default not in self.tokens.values():
                raise UsageError(
                    f"tgt_lang is None, expected one of {some(self.tokens)}: "
                    f"generation_config.json has no target language"
                )
            return [{}] * count
        ids = self.ids("tgt_lang", tgt_lang, count)
        if self.target in options:
            raise UsageError(
                f"tgt_lang is {tgt_lang!r} and {self.target} is {options[self.target]!r:.60}, "
                f"expected only one of them"
            )
        others = {"forced_bos_token_id": None} if self.target == "decoder_start_token_id" else {}
        return [{**others, self.target: id} for id in ids]

    def word_end(self, text: str) -> int:
        """Return where the language word at the start of `text` ends, 0 without one."""
        match = LANGUAGE_WORD.match(text) if self.words else None
        return match.end() if match else 0

    def check_words(self, texts: Iterable[str]) -> None:
        """Raise ValueError if a text begins with a language word, such as >>fra<<, that the model
        lacks."""
        for text in texts if self.words else ():
            match = LANGUAGE_WORD.match(text)
            if match and match[0] not in self.words:
                known = f"expected one of {some(self.words)}{did_you_mean(match[0], self.words)}"
                raise ValueError(
                    f"a text begins with {match[0]:.50}, which is not a language of the model: "
                    f"{known}"
                )


def read_languages(info: ExportInfo) -> Languages:
    """Return the languages from the manifest of `info`. Raises ValueError if they have unknown
    fields."""
    fields = info.manifest.get("languages") or {}
    try:
        return Languages(**fields)
    except TypeError as error:
        raise ValueError(
            f"{info.directory / MANIFEST} has languages {reprlib.repr(fields)}: {error}: "
            f"export again"
        ) from None


def some(names: Iterable[str]) -> str:
    return reprlib.repr(sorted(names))


def nearest_language(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is closest to `name`, or None. The same language with another
    script or region comes first, then names that begin with `name`, then similar spellings."""
    stem = name.partition("_")[0].lower()
    same = [language for language in known if language.partition("_")[0].lower() == stem]
    longer = [language for language in known if stem and language.lower().startswith(stem)]
    return next(iter(sorted(same) + sorted(longer)), None) or nearest(name, known)
