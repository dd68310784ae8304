"""The parts of a text: sentences and marks that are translated, what stands between them, and what
a translation keeps, such as `{name}`, `%s` and addresses."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import sentencex

from ...errors import UsageError
from ...inference.export_info import ExportInfo
from ...specs.alignment import ROLE as ALIGNMENT
from ..alignments import Alignment, diagonal_alignment, moved
from ..checks import check_choice, check_flags, has_letters, is_strings
from ..markup import MarkedText, kept_texts
from ..markup_html import html_texts
from ..markup_places import with_marks
from ..text_model import TextModel

HTML = "html"
Keep = bool | str | Sequence[str] | None
Piece = tuple[str, bool]  # a part of a text, and True if it is a sentence
Translated = str | Alignment  # a translation, with its alignment if there is a use for it


class TextOptions(NamedTuple):
    """The options of `translate` that decide which parts of a text the model translates, and what
    alignments are used for.

    `language` is the code of the language whose abbreviations are known, by default the language of
    the text.
    """

    split: bool = True
    copy_letterless: bool = True
    markup: str | None = None
    keep: Keep = None
    return_alignments: bool = False
    replace_unknowns: bool = False
    language: str | None = None

    def check(self, info: ExportInfo) -> None:
        """Raise UsageError for a value of another type, for an unknown `markup`, and for marks with
        alignments, and ValueError if an export cannot align words."""
        uses = {"return_alignments": self.return_alignments}
        check_aligning(info, **uses, replace_unknowns=self.replace_unknowns)
        if self.return_alignments:
            check_unmarked(markup=self.markup, keep=self.keep)
        check_flags(split=self.split, copy_letterless=self.copy_letterless)
        check_choice("markup", self.markup, (None, HTML))

    def in_language(self, runtime: TextModel, src_lang: str | None) -> "TextOptions":
        """Return these options with the language code of `src_lang`, unless a language is set.

        `src_lang` is a name of the model, None for its default source language.
        """
        return self._replace(language=self.language or runtime.sentence_languages.get(src_lang))


def check_aligning(info: ExportInfo, **uses: bool) -> None:
    """Raise UsageError if one of `uses` of alignments, options by name, is not a boolean.

    Raise ValueError if one is set for an export that cannot align words.
    """
    check_flags(**uses)
    if any(uses.values()):
        info.check_alignment()


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
    runtime: TextModel, text: str, text_options: TextOptions, kept: re.Pattern | None = None
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
    """Return the sentences of `text` and the white space between them, or `text` as one sentence.

    `text_options` say whether to split, the language, and whether a sentence without letters is
    copied. `prefix`, such as a language word, is repeated before each sentence that is translated.
    `start` is where `text` begins in the places of the parts.
    """
    pieces: Iterable[Piece] = [(text, True)]
    if text_options.split and text:
        pieces = sentences_and_spaces(text, text_options.language or DEFAULT_LANGUAGE)
    parts = []
    for piece, is_sentence in pieces:
        is_copied = text_options.copy_letterless and not has_letters(piece)
        is_translated = is_sentence and not is_copied
        before = prefix if is_translated else ""
        parts.append(Part(before + piece, is_sentence, is_translated, start, len(before)))
        start += len(piece)
    return parts


def plain_text(translated: Translated) -> str:
    return translated if isinstance(translated, str) else translated.text


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


def join_parts(parts: list[Piece]) -> str:
    """Return the joined text of `parts`, each a text and True if it is a sentence."""
    return "".join(spaced_parts(parts))


def spaced_parts(parts: list[Piece]) -> Iterator[str]:
    """Yield the text of each of `parts`, a text and True if it is a sentence, with a space before
    it where one is needed.

    A space separates two sentences without white space between them, except after a full stop of
    Chinese or Japanese. A sentence may be empty, as a model may translate it to nothing.
    """
    last = ""  # character before the part
    is_open = False  # a sentence came last
    for part, is_sentence in parts:
        needs_space = part and is_sentence and is_open and last and last not in WIDE_ENDS
        yield f" {part}" if needs_space else part
        last = part[-1:] or last
        is_open = is_sentence or (is_open and not part)


# ---------------------------------------------------------------------------- sentence boundaries

# includes marks of Armenian, Arabic, Urdu, Hindi, Amharic, Khmer and Burmese
ENDS = ".!?…‼⁇⁈⁉։؟۔।॥።፧៕။"
WIDE_ENDS = "。！？｡"
CLOSING = "\"'”’»›)]}」』）】》〉"
# Abbreviations of several languages, without the last full stop. They precede a name or a number,
# or occur within a sentence.
ABBREVIATIONS = re.findall(
    r"\S+",
    "mr mrs ms dr prof st sr jr rev hon gen col capt lt sgt no nos vs cf fig figs vol vols pp ed "
    "eds dept approx e.g i.e u.s"
    " u.k hr fr nr bspw bzw ca evtl ggf abb hrsg tel z.b d.h u.a mme mlle sra srta",
)
# A run of marks is matched from its start only. Otherwise a megabyte of marks would take hours. The
# pattern begins with the marks, because `re` finds the first of some characters quickly.
END, CLOSE = f"[{re.escape(ENDS)}]", f"[{re.escape(CLOSING)}]"
BOUNDARY = re.compile(
    rf"[{re.escape(ENDS)}{WIDE_ENDS}]"
    rf"(?:(?<={END})(?<!{END}{END}){END}*+{CLOSE}*+(?=\s)"
    rf"|(?<=[{WIDE_ENDS}])[{WIDE_ENDS}]*{CLOSE}*)"
    r"(?P<space>\s*)(?=\S)"
)
WORD_BEFORE = re.compile(r"[^\s\"'“‘„«‹(\[{]*$")
# characters to look back for an abbreviation: longer words are not abbreviations
LONGEST_WORD = max(map(len, ABBREVIATIONS)) + 1
# White space within a line besides the space. sentencex fails on that of several bytes after a
# letter and a full stop, so it gets spaces. `str.replace` is faster here than a regular expression.
WHITE_SPACE = "\t\x1f\xa0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
DEFAULT_LANGUAGE = "en"


def sentences_and_spaces(text: str, language: str = DEFAULT_LANGUAGE) -> Iterator[Piece]:
    """Yield the parts of `text` in order, each with True for a sentence or False for white space.

    Sentences end by the abbreviations and rules that sentencex has for a language, and by rules for
    every language:

    1. A line break ends a sentence.
    2. A sentence ends at a mark of `ENDS`, with the closing quotes or brackets behind it, before
       white space and anything but a lower-case letter. A mark of `WIDE_ENDS`, of Chinese and
       Japanese, needs no white space.
    3. A full stop after a single letter ("J. Smith", "z. B."), after a number of one or two digits
       ("am 3. Mai", "1. The first") or after one of `ABBREVIATIONS` does not end a sentence.
    4. Nor does a full stop where sentencex sees no boundary: it knows the abbreviations of the
       text's language.

    Joined, the parts are `text`; white space may be empty. `language` is a code of ISO 639-1, also
    with script or region after a hyphen, as in de-AT. Other languages, and codes with an
    underscore, are split like English.
    """
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        start = line.index(stripped)
        yield line[:start], False
        yield from sentences_of_line(stripped, language)
        yield line[start + len(stripped) :], False


def sentences_of_line(line: str, language: str) -> Iterator[Piece]:
    """Yield the parts of a line in order, each with True for a sentence or False for white space.

    The line has no white space around it. `language` is a code of ISO 639-1, also with script or
    region after a hyphen, as in de-AT.
    """
    spaced = line
    for character in WHITE_SPACE:
        spaced = spaced.replace(character, " ")
    sentences = sentencex.segment(language.partition("-")[0], spaced) if ". " in spaced else []
    boundaries = set(accumulate(map(len, sentences)))
    start = 0
    for match in BOUNDARY.finditer(line):
        if is_end(line, start, match, boundaries):
            yield line[start : match.start("space")], True
            yield match["space"], False
            start = match.end()
    yield line[start:], bool(line)


def is_end(line: str, start: int, match: re.Match, boundaries: set[int]) -> bool:
    """Return True if the mark of `match` ends the sentence that begins at `start` of `line`.

    A mark of `WIDE_ENDS` always does. Another does not if a lower-case letter follows. A full stop
    does not after a single letter, a small number or an abbreviation, or where sentencex sees no
    boundary. `boundaries` are the positions where it sees one.
    """
    mark = line[match.start()]
    if mark in WIDE_ENDS:
        return True
    if line[match.end()].islower():
        return False
    if mark != "." or line[match.start() : match.end()].rstrip() != ".":
        return True
    before = WORD_BEFORE.search(line, max(start, match.start() - LONGEST_WORD), match.start())
    word = before[0].lower() if before else ""
    is_short = len(word) == 1 and word.isalpha() or word.isdigit() and len(word) < 3
    return match.end() in boundaries and not is_short and word not in ABBREVIATIONS


# ------------------------------------------------------------------------------------ what is kept


def braces(depth: int) -> str:
    """Return a pattern of a pair of braces with `depth` levels of braces in it."""
    inner = f"|{braces(depth - 1)}" if depth else ""
    return rf"\{{(?:[^{{}}\n]++{inner})*+\}}"


IN_ADDRESS = r"\([^\s<>()]*+\)"  # a closing bracket belongs to an address that opens it
PLACEHOLDERS = "|".join(
    [
        r"%%|%(?:\(\w+\)|\d+\$)?[-+#0]?\d*(?:\.\d+)?[hlLqjzt]{0,2}[a-zA-Z@](?!\w)",  # printf
        rf"[$#%]?{braces(3)}",  # {name}, {{name}}, ${name}, #{name}, %{name}, messages of ICU
        r"</?\d+\s*/?>",  # <0>, </0>, <0/>
        rf"(?i:https?|ftp)://(?>{IN_ADDRESS}|[^\s<>)])*(?:{IN_ADDRESS}|[^\s<>.,;:!?'\"()\]])",
        r"(?:mailto:)?(?<![\w.+-])[\w.+-]++@[\w-]+(?:\.[\w-]+)+",
    ]
)
NAME = re.compile(r"\w[\w\s'-]*")  # matches as complete words
# blocks of symbols and pictographs, of which those that a vocabulary lacks are kept
EMOJI_BASE = (
    "[\u203c\u2049\u2122\u2139\u2190-\u21ff\u2300-\u23ff\u24c2\u25a0-\u27bf\u2900-\u297f"
    "\u2b00-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff]"
)
SKIN_TONES = "[\U0001f3fb-\U0001f3ff]"
TAGS = "[\U000e0020-\U000e007f]"  # of flags such as Scotland's
ONE_EMOJI = f"{EMOJI_BASE}(?:\ufe0f|{SKIN_TONES})?{TAGS}*"
EMOJI = re.compile(
    f"[\U0001f1e6-\U0001f1ff]{{2}}|[#*0-9]\ufe0f?\u20e3|{ONE_EMOJI}(?:\u200d{ONE_EMOJI})*"
)


def keep_pattern(runtime: TextModel, texts: Iterable[str], keep: Keep) -> re.Pattern | None:
    """Return a pattern of what the translation of `texts` keeps, or None for nothing.

    `keep` is a regular expression, a list of strings, True for `PLACEHOLDERS`, or None. Emoji that
    the vocabulary of the model lacks are kept too. False keeps nothing.

    Raises:
        UsageError: if `keep` is something else.
        ValueError: if `keep` is set for an export without an alignment graph.
    """
    pattern = checked_pattern(keep)
    if pattern is not None:
        runtime.info.check_alignment()
    if keep is False or ALIGNMENT not in runtime.info.specs:
        return None
    patterns = [pattern or "", any_text(lacking_emoji(runtime, texts))]
    joined = "|".join(filter(None, patterns))
    return re.compile(joined) if joined else None


def checked_pattern(keep: Keep) -> str | None:
    """Return the regular expression of `keep`, None for None and False.

    Raises UsageError unless it is one, a list of strings or a boolean.
    """
    if keep is None or keep is False:
        return None
    if keep is True:
        return PLACEHOLDERS
    if isinstance(keep, str):
        try:
            re.compile(f"(?:{keep})")
        except re.error as error:
            raise UsageError(
                f"keep is {keep!r:.60}, expected a regular expression: {error}", "keep"
            ) from None
        return f"(?:{keep})"
    if is_strings(keep) and all(keep):
        return any_text(keep)
    raise UsageError(
        f"keep is {keep!r:.60}, expected True, a regular expression, or a list of strings that are "
        "not empty",
        "keep",
    )


def any_text(texts: Iterable[str]) -> str:
    """Return a pattern of any of `texts`, the longest first. Names match as complete words."""
    return "|".join(
        rf"(?<!\w){re.escape(text)}(?!\w)" if NAME.fullmatch(text) else re.escape(text)
        for text in sorted(set(texts), key=lambda text: (-len(text), text))
    )


def lacking_emoji(runtime: TextModel, texts: Iterable[str]) -> list[str]:
    """Return the emoji in `texts` that the tokenizer of the model reads as unknown."""
    emoji = {match[0] for text in texts for match in EMOJI.finditer(text)}
    unknown = runtime.tokenizer_settings.special_tokens["unk_token"]
    if not emoji or unknown is None:
        return []
    encodings = runtime.encode(sorted(emoji), special_tokens=False)
    return [text for text, encoding in zip(sorted(emoji), encodings) if unknown in encoding.ids]
