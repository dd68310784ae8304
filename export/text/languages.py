"""The languages of a model: names in its tokenizer, as recorded in the manifest, and the pairs that
it translates, in the codes that clients use."""

import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import UsageError, did_you_mean, nearest
from ..heads import TRANSLATE, has_task
from ..inference.export_info import CARD, MANIFEST, ExportInfo
from ..inference.options import Options, special_token
from ..shared.files import card_metadata
from ..shared.options import as_list
from .checks import is_strings
from .language_names import NAMES, shorten_codes

LANGUAGE_WORD = re.compile(r">>[^\s<>]*<<")  # Marian's word for a language, at the start of a text

Pair = tuple[str, str]  # the codes of a source and of a target

# aliases of LibreTranslate, for models without these codes
ALIASES = {"zh": "zh-hans", "zt": "zh-hant", "pb": "pt-br"}

Choice = str | list[str] | None  # one language for all texts, or a list with one for each text


@dataclass(frozen=True)
class Languages:
    """The languages of a tokenizer. `tokens` are ids by name, `source` is the source language that
    tokenizer.json sets. `before` and `after` are the ids around a text, with `None` for the
    language. `target` is the generation option that selects the target language, and `default` the
    id that it has in generation_config.json, or None. Some models have `words` instead, which a
    text begins with. All fields are empty for a model without languages."""

    tokens: dict[str, int] = field(default_factory=dict)
    source: str | None = None
    before: list[int | None] = field(default_factory=list)
    after: list[int | None] = field(default_factory=list)
    target: str = ""
    words: list[str] = field(default_factory=list)
    default: int | None = None

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
        if not is_strings(names):
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
        self, tgt_lang: Choice, count: int, options: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the generation options that select the target language of each of `count` texts.

        `tgt_lang` is one language for all texts, a list with one for each, or None for `default`.
        `options` are the other options of generation.

        Raises:
            UsageError: if a multilingual model has no target language, if both `tgt_lang` and
                `options` select one, if a language is unknown, or if there is another number of
                languages than texts.
        """
        if tgt_lang is None:
            is_known = self.target in options or self.default in self.tokens.values()
            if self.tokens and not is_known:
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

    def first_tokens(self, options: Options) -> list[int]:
        """Return [id] of the language token after the start token, if the model generates one
        there, else []."""
        is_first = self.target == "forced_bos_token_id"
        language = options.forced_bos_token_id if is_first else None
        return [] if language is None else [language]

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
    target = fields.get("target") or ""
    config = info.config if target == "decoder_start_token_id" else {}
    default = special_token(target, info.defaults, config) if target else None
    try:
        return Languages(**fields, default=default)
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


# ------------------------------------------------------------------------------------------- pairs


class Direction(NamedTuple):
    """A pair of language codes, and how to select it: the arguments `src_lang` and `tgt_lang`, or a
    `word` before the text."""

    source: str
    target: str
    src_lang: str | None = None
    tgt_lang: str | None = None
    word: str = ""

    def add_word(self, text: str) -> str:
        """Return `text` after the `word`, or unchanged if there is none."""
        return f"{self.word} {text}" if self.word else text


@dataclass(frozen=True)
class Directions:
    """The directions that a model translates. `pairs` are codes of source and target; without them
    the languages are unknown and all are accepted. `names` are the model's names of languages by
    code. If `has_words`, the names are words that precede a text and select the target."""

    pairs: Sequence[Pair]
    names: dict[str, str]
    has_words: bool

    def find(self, source: str, target: str) -> Direction | None:
        """Return the direction from `source` to `target`, codes or names of the model in any case.

        Return None if the model does not translate it. Without `pairs`, every pair is accepted.
        """
        if not self.pairs:
            return Direction(source, target)
        pair = self.codes.get(key(source)), self.codes.get(key(target))
        if pair not in self.known:
            return None
        source, target = pair
        if self.has_words:
            return Direction(source, target, word=self.names[target])
        return Direction(source, target, self.names.get(source), self.names.get(target))

    @cached_property
    def known(self) -> set[Pair]:
        return set(self.pairs)

    @cached_property
    def codes(self) -> dict[str, str]:
        """{text that a client may send, in lower case: code}. Texts are the code, the model's name,
        or an unambiguous part of the name."""
        codes = list(dict.fromkeys(code for pair in self.pairs for code in pair))
        by_name = {key(self.names[code]): code for code in codes if self.names.get(code)}
        stems = [name.partition("-")[0] for name in by_name]
        counts = Counter(stems)
        stem_codes = {
            stem: code for stem, code in zip(stems, by_name.values()) if counts[stem] == 1
        }
        by_key = stem_codes | by_name | {key(code): code for code in codes}
        return {alias: by_key[long] for alias, long in ALIASES.items() if long in by_key} | by_key

    @cached_property
    def targets(self) -> dict[str, set[str]]:
        """{language: its target languages}. The set is empty for languages that are targets
        only."""
        result: dict[str, set[str]] = {}
        for source, target in self.pairs:
            result.setdefault(source, set()).add(target)
            result.setdefault(target, set())
        return result

    @cached_property
    def sources(self) -> set[str]:
        return {source for source, _ in self.pairs}


def read_directions(
    info: ExportInfo, languages: Languages, pairs: Sequence[Pair] = ()
) -> Directions:
    """Return the directions that the export `info` with these `languages` translates, see
    `model_languages`."""
    names = names_by_code([*languages.tokens, *languages.words])
    return Directions(model_languages(info, languages, pairs), names, bool(languages.words))


def model_languages(
    info: ExportInfo, languages: Languages, pairs: Sequence[Pair] = ()
) -> list[Pair]:
    """Return the (source, target) pairs that an export translates, empty if they are unknown or it
    does not translate.

    `pairs` take precedence over the languages of the tokenizer, and these over the card. A card
    counts if the model's name has one direction and the metadata have both languages. Codes are
    those of ISO 639-1, with a script or region if the model has several, as in "zh-Hans". Other
    languages keep the model's names.

    Raises:
        UsageError: if the model does not have a language of `pairs`.
    """
    if not has_task(info.architecture, TRANSLATE):
        return []
    names = names_by_code([*languages.tokens, *languages.words])
    if pairs:
        codes = Directions([(code, code) for code in names], names, False).codes
        return list(
            dict.fromkeys(resolve_pair(pair, codes, bool(languages.words)) for pair in pairs)
        )
    if languages.tokens:
        return [(source, target) for source in names for target in names if source != target]
    card = card_metadata(info.directory / CARD)
    spoken, bases = ([*map(str, as_list(card.get(name)))] for name in ("language", "base_model"))
    if languages.words:
        sources = [code for code in spoken if code not in names]
        return [(source, target) for source in sources for target in names]
    parts = re.split("[^a-zA-Z]+", " ".join([*bases, info.directory.name]))
    candidates = {
        pair for pair in zip(parts, parts[1:]) if pair[0] != pair[1] and set(pair) <= set(spoken)
    }
    return list(candidates) if len(candidates) == 1 else []


def sentence_languages(info: ExportInfo, languages: Languages) -> dict[str | None, str]:
    """Return {src_lang: code of the language whose rules split sentences}.

    The key None is the model's default source language. Languages without a known code are missing.
    """
    codes: dict[str | None, str] = {
        name: code for code, name in names_by_code(languages.tokens).items()
    }
    sources = (
        {source for source, _ in model_languages(info, languages)}
        if not codes
        else {codes[languages.source]}
    )
    return codes | ({None: sources.pop()} if len(sources) == 1 else {})


def resolve_pair(pair: Pair, codes: dict[str, str], has_words: bool) -> Pair:
    """Return `pair` in the codes of the model.

    `codes` is {text that a client may send: code}; if it is empty, nothing is checked. If
    `has_words`, only the target is checked. Raises UsageError for a language that the model does
    not have.
    """
    source, target = (codes.get(key(code), code) for code in pair)
    for code in (target,) if has_words else (source, target):
        if codes and code not in codes.values():
            known = some(set(codes.values()))
            raise UsageError(
                f"languages {'-'.join(pair)}: the model has no language {code!r}, expected one "
                f"of {known}"
            )
    return source, target


def names_by_code(names: Iterable[str]) -> dict[str, str]:
    """Return {code: name} for the model's `names` of languages, such as eng_Latn, de_DE or >>fra<<.

    The code has two letters if the language has one name. If it has several, script or region
    follow. Unknown languages keep their name.
    """
    parts = {name: re.split("[_-]", name.strip("<>"), maxsplit=1) for name in names}
    short = shorten_codes(stem for stem, *_ in parts.values())
    stems = {name: short[stem] for name, (stem, *_) in parts.items()}
    groups: dict[str, list[str]] = {}
    for name, (_, *rest) in parts.items():
        is_only = list(stems.values()).count(stems[name]) == 1
        code = stems[name] if is_only else "-".join([stems[name], *rest])
        groups.setdefault(code if stems[name] in NAMES else name.strip("<>"), []).append(name)
    return {
        code if len(same) == 1 else name.strip("<>"): name
        for code, same in groups.items()
        for name in same
    }


def key(code: str) -> str:
    """Return `code` in lower case, with - for _ and without > and <, for comparisons."""
    return code.strip("<>").replace("_", "-").lower()


def language_name(code: str) -> str:
    """Return the English name of a language, such as "German" for de. Return `code` itself if its
    name is unknown."""
    stem, *rest = code.split("-", 1)
    return " ".join([NAMES[stem], *(f"({part})" for part in rest)]) if stem in NAMES else code
