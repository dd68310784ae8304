"""Marks in a text that is translated without them.

A mark is an `Element` around some words, such as `<b>dog</b>`, or an `Atom`: what is not translated
and stays byte for byte, such as `<img>`, `<code>ls</code>` or `{name}`.

"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, takewhile
from typing import NamedTuple

from .alignments import NO_SPACES, Span
from .checks import has_letters

CLOSING_MARKS = ".,;:!?…%)]}»”’'\"。、，！？"  # no space before them
# A footnote such as `<sup>1</sup>` or `<a>[*]</a>` stands directly behind or before a word, or
# behind a mark that does not divide a number, or a closing quote.
FOOTNOTE = re.compile(r"[\d*†‡§¶#]")
SIGN = re.compile(r"\s*[*†‡§¶]+\s*")
QUOTES = "\"'”’»"
BEFORE_FOOTNOTE = re.compile(rf"(?:[^\W_]|(?<!\d)[{re.escape(CLOSING_MARKS)}])(?<!\s[{QUOTES}])$")

# marks around a placeholder that belong to it
PAIRS = {'""', "''", "()", "[]", "<>", "``", "“”", "„“", "‘’", "«»", "»«"}
MARKS = re.compile(r"[^\w\s]*")

HIDDEN, IMAGE, WORD = range(3)  # kinds of atoms


@dataclass
class Atom:
    """A part of a text that is not translated.

    Args:
        pieces: its bytes, in parts.
        start: where it stood in the text to translate.
        kind: `HIDDEN` for comments and the like, which need no space around them, `IMAGE`, or
            `WORD` for what is read as a word.
        has_space_before, has_space_after: True if white space or an end of the text is there.
    """

    pieces: list[str]
    start: int
    kind: int
    has_space_before: bool = False
    has_space_after: bool = True

    @property
    def follows_word(self) -> bool:
        """True if its place is directly after a word, without a space."""
        return not self.has_space_before or (self.has_space_after and self.kind == HIDDEN)

    @property
    def precedes_word(self) -> bool:
        """True if its place is directly before a word."""
        return self.has_space_before and not self.has_space_after

    @property
    def raw(self) -> str:
        return "".join(self.pieces)

    content = raw


@dataclass
class Element:
    """An element around the characters from `start` to `end` of the text to translate, with the
    marks within it. `opening` and `closing` are its tags. The first is empty for an element that
    began before the text, and the last for one that ends after it."""

    opening: str
    start: int
    end: int = 0
    closing: str = ""
    marks: list["Mark"] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The element without its words."""
        return self.opening + "".join(mark.content for mark in self.marks) + self.closing


Mark = Atom | Element


@dataclass
class MarkedText:
    """A text to translate, its marks, and the `raw` text with both. `escape` writes a translation
    between marks."""

    text: str
    marks: list[Mark]
    raw: str
    escape: Callable[[str], str] = str

    @cached_property
    def boundaries(self) -> list[int]:
        """The places where a mark begins or ends, in order."""
        places, rest = [], [*self.marks]
        while rest:
            mark = rest.pop()
            places.append(mark.start)
            if isinstance(mark, Element):
                places.append(mark.end)
                rest += mark.marks
        return sorted(places)

    def divides(self, start: int, end: int) -> bool:
        """Return True if a mark begins or ends within the characters from `start` to `end`."""
        place = bisect_right(self.boundaries, start)
        return place < len(self.boundaries) and self.boundaries[place] < end


class OpenElement(NamedTuple):
    """An element without its end yet, and the state of the builder where it began."""

    element: Element
    num_pieces: int
    num_words: int
    space: str
    waiting: list[Atom]


class MarkedTextBuilder:
    """A marked text that is put together from its parts, in order.

    White space is kept back until a word follows, so that it is not doubled where a mark is taken
    out. Matches of `keep` in the text are atoms, which `escape` writes.
    """

    def __init__(self, keep: re.Pattern | None = None, escape: Callable[[str], str] = str):
        self.keep = keep
        self.escape = escape
        self.pieces: list[str] = []
        self.length = 0
        self.num_words = 0  # pieces with a letter
        self.space = ""
        self.marks: list[Mark] = []
        self.open: list[OpenElement] = []
        self.waiting: list[Atom] = []  # atoms behind the last word
        self.takes_letters = False  # the letters that follow are of the last atom

    @property
    def text(self) -> str:
        """The text without marks, so far. Only spaces at its end are left out."""
        return "".join([*self.pieces, self.space if self.space.strip(" \t") else ""])

    @property
    def last(self) -> str:
        """The last character of the text, or "" before the first."""
        return self.pieces[-1][-1] if self.pieces else ""

    @property
    def siblings(self) -> list[Mark]:
        """The marks of the innermost open element."""
        return self.open[-1].element.marks if self.open else self.marks

    def add_text(self, text: str) -> None:
        """Add text between marks."""
        place = 0  # the end of the last match
        for match in self.keep.finditer(text) if self.keep else ():
            if not match[0]:
                continue
            start, end = widened(text, match.span(), place)
            if place and MARKS.fullmatch(text, place, start):
                start = place  # {a}/{b} is one atom
            self.add_words(text[place:start])
            self.add_atom(self.escape(text[start:end]))
            place = end
        self.add_words(text[place:])

    def add_words(self, text: str) -> None:
        """Add text without atoms."""
        body = text.strip()
        lead = text[: len(text) - len(text.lstrip())]
        if text and self.takes_letters:
            num_letters = count_letters(text)
            self.waiting[-1].pieces.append(self.escape(text[:num_letters]))
            self.takes_letters = False
            self.add_words(text[num_letters:])
            return
        if text:
            self.end_atoms(bool(lead), body[:1])
        self.space = lead or self.space
        if body:
            piece = (self.space if self.pieces or self.space.strip(" \t") else "") + body
            self.pieces.append(piece)
            self.length += len(piece)
            self.num_words += has_letters(body)
            self.space = text[len(text.rstrip()) :]

    def end_atoms(self, has_space: bool, following: str) -> None:
        """Set what follows the waiting atoms: white space if `has_space`, then `following`.

        A mark such as a full stop loses the space before a word: "See {url}." becomes "See.".
        """
        is_mark = not has_space and following != "" and following in CLOSING_MARKS
        if is_mark and self.last.isalnum() and any(atom.kind == WORD for atom in self.waiting):
            self.space, has_space = "", bool(self.space)
        for atom in self.waiting:
            atom.has_space_after = has_space
        self.waiting = []

    def add_atom(self, raw: str, kind: int = WORD) -> None:
        """Add an atom. One directly after another is a part of it."""
        if self.waiting and self.siblings and self.siblings[-1] is self.waiting[-1]:
            self.waiting[-1].pieces.append(raw)
            self.waiting[-1].kind = max(self.waiting[-1].kind, kind)
            return
        atom = Atom([raw], self.length, kind, bool(self.space) or not self.pieces)
        self.siblings.append(atom)
        self.waiting.append(atom)

    def open_element(self, opening: str) -> None:
        """Add the start tag of an element."""
        element = Element(opening, self.length)
        self.siblings.append(element)
        state = len(self.pieces), self.num_words, self.space, [*self.waiting]
        self.open.append(OpenElement(element, *state))

    def close_element(self, closing: str, raw: str, following: str) -> None:
        """Add the end tag of the innermost open element. `raw` is that element, and `following` the
        character after it.

        An element without letters becomes an atom if it is empty, a sign such as a pilcrow, or a
        footnote that touches a word.
        """
        opened = self.open.pop()
        element = opened.element
        element.end, element.closing = self.length, closing
        has_words = self.num_words > opened.num_words
        content = "" if has_words else "".join(self.pieces[opened.num_pieces :])
        if element.end == element.start:
            kinds = [mark.kind for mark in element.marks if isinstance(mark, Atom)]
            self.replace_element(opened, raw, max(kinds, default=HIDDEN))
        elif SIGN.fullmatch(content):
            self.replace_element(opened, raw, IMAGE)
        elif FOOTNOTE.search(content) and self.touches_word(opened, content, following):
            self.replace_element(opened, raw, WORD)
            if not opened.space and following.isalpha():
                self.complete_word()

    def touches_word(self, opened: OpenElement, content: str, following: str) -> bool:
        """Return True if the `content` of the element `opened` touches a word, of which it may be a
        footnote, or another atom. `following` is the character after the element."""
        before = "".join(self.pieces[max(opened.num_pieces - 2, 0) : opened.num_pieces])[-2:]
        is_behind = not (opened.space or content[:1].isspace()) and BEFORE_FOOTNOTE.search(before)
        follows_atom = any(atom.kind == WORD for atom in opened.waiting)
        is_before = not self.space and following.isalnum()
        touched = (before[-1:] if is_behind or follows_atom else "") + following * is_before
        return bool(touched) and not NO_SPACES.search(touched)

    def replace_element(self, opened: OpenElement, raw: str, kind: int) -> None:
        """Replace the element `opened`, the last mark, by an atom of the `kind`."""
        self.siblings.pop()
        del self.pieces[opened.num_pieces :]
        self.length = opened.element.start
        self.waiting = opened.waiting
        space, self.space = self.space, opened.space
        self.add_atom(raw, kind)
        self.space = opened.space or space

    def complete_word(self) -> None:
        """Make the letters on both sides of the last atom a part of it, as in H<sub>2</sub>O."""
        atom, before = self.waiting[-1], self.siblings[-2:-1]
        num_letters = count_letters(reversed(self.pieces[-1])) if self.pieces else 0
        end = max((mark.end for mark in before if isinstance(mark, Element)), default=0)
        if num_letters and end <= self.length - num_letters:
            piece = self.pieces.pop()
            body = piece[:-num_letters].rstrip()
            self.space = piece[len(body) : -num_letters]
            self.pieces += filter(None, [body])
            self.length -= len(piece) - len(body)
            atom.pieces.insert(0, self.escape(piece[-num_letters:]))
            atom.start = self.length
            atom.has_space_before = bool(self.space) or not self.pieces
            self.takes_letters = True


def count_letters(text: Iterable[str]) -> int:
    """Return the number of letters at the start of `text`."""
    return sum(1 for _ in takewhile(str.isalpha, text))


def widened(text: str, span: Span, start: int) -> Span:
    """Return `span`, a placeholder in `text`, with quotes or brackets around it, or with the
    letters of the word that it is in. It begins at `start` or later."""
    first, end = span
    if first == start or first == 0:
        return span
    around = text[first - 1] + text[end : end + 1]
    if around in PAIRS:
        return first - 1, end + 1
    if len(around) == 2 and around.isalpha():
        before = count_letters(text[place] for place in range(first - 1, start - 1, -1))
        after = count_letters(text[place] for place in range(end, len(text)))
        return first - before, end + after
    return span


def kept_texts(text: str, keep: re.Pattern, is_split: bool) -> list[str | MarkedText]:
    """Return the parts of a plain text in order: lines to translate with the matches of `keep` in
    them as marks, and strings that stay unchanged.

    Without `is_split` the text is one line.
    """
    parts: list[str | MarkedText] = []
    lines = text.splitlines(keepends=True) if is_split else [text]
    for has_match, group in groupby(lines, lambda line: bool(keep.search(line))):
        if not has_match:
            plain = "".join(group)
            parts.append(MarkedText(plain, [], plain))
            continue
        for line in group:
            raw = line.strip()
            start = line.index(raw)
            marked = kept_line(raw, keep)
            inner = marked if marked.text else raw
            parts += filter(None, [line[:start], inner, line[start + len(raw) :]])
    return parts


def kept_line(text: str, keep: re.Pattern | None) -> MarkedText:
    """Return a text with the matches of `keep` in it as marks."""
    builder = MarkedTextBuilder(keep)
    builder.add_text(text)
    return MarkedText(builder.text, builder.marks, text)
