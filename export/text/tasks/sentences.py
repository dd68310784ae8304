"""Sentence boundaries: the abbreviations and rules that sentencex has for a language, and rules for
every language.

1. A line break ends a sentence.
2. A sentence ends at a mark of `ENDS`, with the closing quotes or brackets behind it, before white
   space and anything but a lower-case letter. A mark of `WIDE_ENDS`, of Chinese and Japanese, needs
   no white space.
3. A full stop after a single letter ("J. Smith", "z. B."), after a number of one or two digits ("am
   3. Mai", "1. The first") or after one of `ABBREVIATIONS` does not end a sentence.
4. Nor does a full stop where sentencex sees no boundary: it knows the abbreviations of the text's
   language.
"""

import re
from collections.abc import Iterator
from itertools import accumulate

import sentencex

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


def sentences_and_spaces(text: str, language: str = DEFAULT_LANGUAGE) -> Iterator[tuple[str, bool]]:
    """Yield the parts of `text` in order, each with True for a sentence or False for white space.

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


def sentences_of_line(line: str, language: str) -> Iterator[tuple[str, bool]]:
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


def has_letters(text: str) -> bool:
    """Return True if `text` has a letter of any script."""
    return any(map(str.isalpha, text))
