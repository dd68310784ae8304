"""The language pairs of a model: the codes that clients use and the names that the model uses."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import UsageError
from ..heads import TRANSLATE, has_task
from ..inference.export_info import CARD, ExportInfo
from .language_names import NAMES, shorten_codes
from .languages import Languages, some
from .text_model import Translator

Pair = tuple[str, str]  # the codes of a source and of a target

FRONT_MATTER = re.compile(r"^---\n(.*?)^---$", re.DOTALL | re.MULTILINE)
# aliases of LibreTranslate, for models without these codes
ALIASES = {"zh": "zh-hans", "zt": "zh-hant", "pb": "pt-br"}


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
    card = front_matter(info)
    spoken = read_list(card, "language")
    if languages.words:
        sources = [code for code in spoken if code not in names]
        return [(source, target) for source in sources for target in names]
    parts = re.split(
        r"[^a-zA-Z]+",
        " ".join([*read_list(card, "base_model"), info.directory.name]),
    )
    candidates = {
        pair for pair in zip(parts, parts[1:]) if pair[0] != pair[1] and set(pair) <= set(spoken)
    }
    return list(candidates) if len(candidates) == 1 else []


def sentence_languages(runtime: Translator) -> dict[str | None, str]:
    """Return {src_lang: code of the language whose rules split sentences}.

    The key None is the model's default source language. Languages without a known code are missing.
    """
    codes: dict[str | None, str] = {
        name: code for code, name in names_by_code(runtime.languages.tokens).items()
    }
    sources = (
        {source for source, _ in model_languages(runtime.info, runtime.languages)}
        if not codes
        else {codes[runtime.languages.source]}
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


def front_matter(info: ExportInfo) -> str:
    """Return the YAML metadata at the top of README.md in an export, or an empty string without
    any."""
    try:
        match = FRONT_MATTER.match(
            (info.directory / CARD).read_text(encoding="utf-8", errors="replace")
        )
    except OSError:
        return ""
    return match[1] if match else ""


def read_list(front_matter: str, name: str) -> list[str]:
    """Return the strings of the field `name` in the YAML text `front_matter`; an empty list without
    the field.

    The field may be one value, a list `[one, two]`, or lines that begin with `- `. Values have no
    spaces, and each line ends with a line feed.
    """
    match = re.search(rf"^{name}:(.*\n(?:[ \t]*- .*\n)*)", front_matter, re.MULTILINE)
    return re.findall(r"[^\s\[\],\"'-][^\s\[\],\"']*", match[1]) if match else []
