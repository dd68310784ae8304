"""Where sentences end: one small set of rules for all languages.

1. A line break ends a sentence.
2. So does a mark of `ENDS`, with the marks and closing quotes or brackets behind it, if white space follows and then anything
   but a small letter.
3. A mark of `WIDE_ENDS`, of Chinese and Japanese, does so without white space.
4. A full stop behind one of `ABBREVIATIONS`, behind one letter ("J. Smith", "z. B.") or behind a number of one or two digits
   ("am 3. Mai", "1. The first") ends none.
"""

import re
from collections.abc import Iterator

ENDS = ".!?…‼⁇⁈⁉։؟۔।॥።፧។៕။"  # with those of Armenian, Arabic, Urdu, Hindi, Amharic, Khmer and Burmese
WIDE_ENDS = "。！？｡"
CLOSING = "\"'”’»›)]}」』）】》〉"
# What stands before a name or a number, or within a sentence; in small letters, without the last full stop.
ABBREVIATIONS = re.findall(
    r"\S+",
    "mr mrs ms dr prof st sr jr rev hon gen col capt lt sgt no nos vs cf fig figs vol vols pp ed eds dept approx e.g i.e u.s"
    " u.k hr fr nr bzw ca evtl ggf abb hrsg z.b d.h u.a mme mlle sra srta",
)
LINE_BREAKS = re.compile(r"([\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+)")
# Each run of marks is tried once, from its start: a megabyte of them would take hours otherwise.
BOUNDARY = re.compile(
    rf"(?:(?<![{re.escape(ENDS)}])[{re.escape(ENDS)}]++[{re.escape(CLOSING)}]*+(?=\s)|[{WIDE_ENDS}]+[{re.escape(CLOSING)}]*)"
    r"(?P<space>\s*)(?=\S)"
)
WORD_BEFORE = re.compile(r"[^\s\"'“‘„«‹(\[{]*$")
LONGEST_WORD = max(map(len, ABBREVIATIONS)) + 1  # that is looked at: a longer one is no abbreviation, nor is what ends it


def sentences_and_spaces(text: str) -> Iterator[tuple[str, bool]]:
    """The parts of `text`, which together are `text`, and of each whether it is a sentence, without the white space around
    it."""
    for number, part in enumerate(LINE_BREAKS.split(text)):
        if number % 2:
            yield part, False
            continue
        stripped = part.strip()
        start = part.index(stripped)
        yield part[:start], False
        yield from sentences_of_line(stripped)
        yield part[start + len(stripped) :], False


def sentences_of_line(line: str) -> Iterator[tuple[str, bool]]:
    """As `sentences_and_spaces`, of a line without white space around it."""
    start = 0
    for found in BOUNDARY.finditer(line):
        if is_end(line, start, found):
            yield line[start : found.start("space")], True
            yield found["space"], False
            start = found.end()
    yield line[start:], bool(line)


def is_end(line: str, start: int, found: re.Match) -> bool:
    """Whether the mark that was `found` ends the sentence that begins at `start`: rules 2 to 4."""
    mark = line[found.start()]
    if mark in WIDE_ENDS:
        return True
    if line[found.end()].islower():
        return False
    if mark != "." or line[found.start() : found.end()].rstrip() != ".":
        return True
    before = WORD_BEFORE.search(line, max(start, found.start() - LONGEST_WORD), found.start())
    word = before[0].lower() if before else ""
    is_short = len(word) == 1 and word.isalpha()
    return not (word in ABBREVIATIONS or is_short or (word.isdigit() and len(word) < 3))
