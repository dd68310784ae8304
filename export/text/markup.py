"""Marks in a text that is translated without them, and their places in the translation.

A mark is an `Element` around some words, such as `<b>dog</b>`, or an `Atom`: what is not translated
and stays byte for byte, such as `<img>`, `<code>ls</code>` or `{name}`.

An element goes around the one run of target words with the largest sum of (share of attention
inside the element - 1/2). The run lies within that of the parent and apart from those of siblings.
An atom goes beside the translation of the word that it touches, else of the word before it.
"""

import heapq
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, takewhile
from typing import NamedTuple

import numpy as np

from .alignments import NO_SPACES, Alignment
from .tasks.sentences import has_letters

Run = tuple[int, int]  # the first of some words, and the one after the last
Gains = tuple[int, np.ndarray]  # the first of some target words, and what each of them gains
CLOSING_MARKS = ".,;:!?…%)]}»”’'\"。、，！？"  # no space before them
# A footnote such as `<sup>1</sup>` or `<a>[*]</a>` stands directly behind or before a word, or
# behind a mark that does not divide a number.
FOOTNOTE = re.compile(r"[\d*†‡§¶#]")
BEFORE_FOOTNOTE = re.compile(rf"(?:[^\W_]|(?<!\d)[{re.escape(CLOSING_MARKS)}])$")

# marks around a placeholder that belong to it
PAIRS = {'""', "''", "()", "[]", "<>", "``", "“”", "„“", "‘’", "«»", "»«"}
MARKS = re.compile(r"[^\w\s]*")

HIDDEN, IMAGE, WORD = range(3)  # kinds of atoms


@dataclass
class Atom:
    """What is not translated.

    Args:
        raw: its bytes.
        start: where it stood in the text to translate.
        kind: `HIDDEN` for comments and the like, which need no space around them, `IMAGE`, or
            `WORD` for what is read as a word.
        has_space_before, has_space_after: True if white space or an end of the text is there.
    """

    raw: str
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
    def content(self) -> str:
        return self.raw


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

    def translated(self, translation: str, alignments: Sequence[Alignment]) -> str:
        """Return `translation` with the marks. `alignments` are those of its sentences, in order,
        with spans in `text` and in `translation`."""
        if translation == self.text:
            return self.raw
        if not self.marks:
            return self.escape(translation)
        return Placement(translation, alignments, self.escape).marked_text(self.marks)


# ------------------------------------------------------------------------------------ reading marks


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
            self.waiting[-1].raw += self.escape(text[:num_letters])
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
            self.waiting[-1].raw += raw
            self.waiting[-1].kind = max(self.waiting[-1].kind, kind)
            return
        atom = Atom(raw, self.length, kind, bool(self.space) or not self.pieces)
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

        An element without letters that is empty or touches a word becomes an atom.
        """
        opened = self.open.pop()
        element = opened.element
        element.end, element.closing = self.length, closing
        is_empty = element.end == element.start
        if is_empty or (self.num_words == opened.num_words and self.is_footnote(opened, following)):
            self.replace_element(opened, raw, not is_empty)
            if not is_empty and not opened.space and following.isalpha():
                self.complete_word()

    def is_footnote(self, opened: OpenElement, following: str) -> bool:
        """Return True if the element `opened`, without letters, is a footnote of the word before it
        or of that after it, which begins with `following`."""
        before = "".join(self.pieces[max(opened.num_pieces - 2, 0) : opened.num_pieces])[-2:]
        is_behind = not opened.space and bool(BEFORE_FOOTNOTE.search(before))
        is_behind = is_behind or any(atom.kind == WORD for atom in opened.waiting)
        touched = before[-1:] * is_behind + following * following.isalnum()
        content = "".join(self.pieces[opened.num_pieces :])
        return bool(touched and FOOTNOTE.search(content) and not NO_SPACES.search(touched))

    def replace_element(self, opened: OpenElement, raw: str, has_text: bool) -> None:
        """Replace the element `opened`, the last mark, by an atom."""
        self.siblings.pop()
        del self.pieces[opened.num_pieces :]
        self.length = opened.element.start
        self.waiting = opened.waiting
        space, self.space = self.space, opened.space
        kinds = [mark.kind for mark in opened.element.marks if isinstance(mark, Atom)]
        self.add_atom(raw, WORD if has_text else max(kinds, default=HIDDEN))
        self.space = opened.space or space

    def complete_word(self) -> None:
        """Make the letters on both sides of the last atom a part of it, as in H<sub>2</sub>O."""
        *_, before, atom = [None, *self.siblings]
        num_letters = count_letters(reversed(self.pieces[-1])) if self.pieces else 0
        end = before.end if isinstance(before, Element) else 0
        if num_letters and end <= self.length - num_letters:
            piece = self.pieces.pop()
            body = piece[:-num_letters].rstrip()
            self.space = piece[len(body) : -num_letters]
            self.pieces += filter(None, [body])
            self.length -= len(piece) - len(body)
            atom.raw = self.escape(piece[-num_letters:]) + atom.raw
            atom.start = self.length
            atom.has_space_before = bool(self.space) or not self.pieces
            self.takes_letters = True


def count_letters(text: Iterable[str]) -> int:
    """Return the number of letters at the start of `text`."""
    return sum(1 for _ in takewhile(str.isalpha, text))


def widened(text: str, span: Run, start: int) -> Run:
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
            builder = MarkedTextBuilder(keep)
            builder.add_text(raw)
            marked = MarkedText(builder.text, builder.marks, raw) if builder.text else raw
            parts += filter(None, [line[:start], marked, line[start + len(raw) :]])
    return parts


# ------------------------------------------------------------------------------------ placing marks


class Block(NamedTuple):
    """A sentence of a placement: the numbers of its first source word and first target word, and
    the share (T, S) of each source word in each target word."""

    source: int
    target: int
    shares: np.ndarray


class Placement:
    """The places of marks in `translation`, whose sentences have `alignments`."""

    def __init__(
        self, translation: str, alignments: Sequence[Alignment], escape: Callable[[str], str]
    ):
        self.translation = translation
        self.escape = escape
        source = [span for alignment in alignments for span in alignment.source]
        target = [span for alignment in alignments for span in alignment.target]
        self.source_starts, self.source_ends = columns(source)
        self.target_starts, self.target_ends = columns(target)
        self.blocks: list[Block] = []
        num_source = num_target = 0
        for alignment in alignments:
            shares = word_shares(alignment.weights)
            self.blocks.append(Block(num_source, num_target, shares))
            num_target, num_source = num_target + shares.shape[0], num_source + shares.shape[1]

    def marked_text(self, marks: Sequence[Mark]) -> str:
        """Return the translation with `marks`."""
        if not self.target_starts:
            return self.escape(self.translation) + "".join(map(first_content, marks)).rstrip()
        start, end = self.target_starts[0], self.target_ends[-1]
        before, after = map(self.escape, (self.translation[:start], self.translation[end:]))
        return before + self.marked_words(marks, (0, len(self.target_starts))) + after

    def marked_words(self, marks: Sequence[Mark], within: Run) -> str:
        """Return the target words of the run `within` with `marks`."""
        low, high = within
        parts = []
        place = self.target_starts[low]  # characters before it are written

        for start, end, mark in self.arranged(marks, within):
            before = self.target_ends[start - 1] if start > low else place
            after = self.target_starts[start] if start < high else before
            is_before_word = isinstance(mark, Element) or mark.precedes_word
            until = after if is_before_word else before
            parts.append(self.escape(self.translation[place:until]))
            place = max(place, until)
            if isinstance(mark, Element):
                inside = self.marked_words(mark.marks, (start, end))
                parts.append(mark.opening + inside + mark.closing)
                place = self.target_ends[end - 1]
            elif start == low:
                parts.append(first_content(mark))
            else:
                parts.append(("" if is_before_word or mark.follows_word else " ") + mark.raw)
        return "".join([*parts, self.escape(self.translation[place : self.target_ends[high - 1]])])

    def arranged(self, marks: Sequence[Mark], within: Run) -> list[tuple[int, int, Mark]]:
        """Return (start, end, mark) of each mark in the order of the words. An atom has equal start
        and end, and an element without a free word becomes an atom."""
        runs, inner = self.runs(marks, within)
        taken = sorted(runs.values())
        keys = []
        arranged: list[Mark] = []
        for number, mark in enumerate(marks):
            if number in runs:
                start, end = runs[number]
                keys.append((start, 2, end, number))
                arranged.append(mark)
                continue
            atom = mark if isinstance(mark, Atom) else Atom(mark.content, mark.start, HIDDEN)
            gap = self.gap(atom, inner, taken)
            keys.append((gap, int(atom.precedes_word), gap, number))
            arranged.append(atom)
        return [(start, end, arranged[number]) for start, _, end, number in sorted(keys)]

    def gap(self, atom: Atom, within: Run, taken: Sequence[Run]) -> int:
        """Return the number of the target word before which `atom` goes: beside the translation of
        its word, in the run `within`, and not within one of the runs `taken`."""
        low, high = within
        word = bisect_left(self.source_starts, atom.start)  # the word after it
        if atom.precedes_word and word < len(self.source_starts):
            gap = self.best_word(word)
        else:
            gap = self.best_word(word - 1) + 1 if word else low
        gap = min(max(gap, low), high)
        around = bisect_left(taken, (gap,)) - 1
        if around >= 0 and gap < taken[around][1]:
            gap = taken[around][0 if atom.precedes_word else 1]
        return gap

    def best_word(self, source_word: int) -> int:
        """Return the target word in which `source_word` has its largest share."""
        block = self.blocks[self.block_number(source_word)]
        column = block.shares[:, source_word - block.source]
        return block.target + (int(column.argmax()) if len(column) else 0)

    def block_number(self, source_word: int) -> int:
        return bisect_right(self.blocks, source_word, key=lambda block: block.source) - 1

    def runs(self, marks: Sequence[Mark], within: Run) -> tuple[dict[int, Run], Run]:
        """Return the run of each element in `marks` by its number, and the run of what is between
        an element that began before the text and one that ends after it. Elements that no free word
        of the run `within` is left for are missing.

        The element with the largest sum comes first, and the others take words that are left. A
        word that two elements share belongs to the first of them.
        """
        low, high = within
        words = self.source_words(marks)
        runs: dict[int, Run] = {}
        if marks and 0 in words and is_open_ended(marks[0], "opening"):
            low = self.edge(words.pop(0), (low, high), 1)
            runs[0] = within[0], low
        last = len(marks) - 1
        if last in words and is_open_ended(marks[last], "closing"):
            high = self.edge(words.pop(last), (low, high), -1)
            runs[last] = high, within[1]
        gains = {number: self.gains(source, (low, high)) for number, source in words.items()}
        runs = {number: run for number, run in runs.items() if run[0] < run[1]}
        return runs | separate_runs(gains, (low, high)), (low, high)

    def edge(self, source: Run, within: Run, direction: int) -> int:
        """Return where an element around the `source` words ends that begins with the run `within`,
        or where it begins if `direction` is -1 and it ends with the run."""
        start, gains = self.gains(source, within)
        if not len(gains):
            return within[0] if direction == 1 else within[1]
        number = int(np.cumsum(gains[::direction]).argmax()) + 1
        return start + number if direction == 1 else start + len(gains) - number

    def source_words(self, marks: Sequence[Mark]) -> dict[int, Run]:
        """Return the source words of each element in `marks` that has some, by its number. A word
        that two elements share belongs to the first of them."""
        words: dict[int, Run] = {}
        end = 0
        for number, mark in enumerate(marks):
            if isinstance(mark, Element):
                start = max(end, bisect_right(self.source_ends, mark.start))
                end = max(end, bisect_left(self.source_starts, mark.end))
                if start < end:
                    words[number] = start, end
        return words

    def gains(self, source: Run, within: Run) -> Gains:
        """Return (first word, gains) of target words in the run `within`: how much more than half
        of its share is in the `source` words. Words of other sentences are left out."""
        first, end = source
        blocks = self.blocks[self.block_number(first) : self.block_number(end - 1) + 1]
        shares = [
            block.shares[:, max(first - block.source, 0) : end - block.source].sum(axis=1)
            for block in blocks
        ]
        low, start = within[0], blocks[0].target
        gains = np.concatenate(shares)[max(low - start, 0) : max(within[1] - start, 0)] - 0.5
        return max(low, start), gains


def is_open_ended(mark: Mark, tag: str) -> bool:
    """Return True if `mark` is an element without its `tag`, "opening" or "closing"."""
    return isinstance(mark, Element) and not getattr(mark, tag)


def columns(spans: Sequence[Run]) -> tuple[list[int], list[int]]:
    return [start for start, _ in spans], [end for _, end in spans]


def first_content(mark: Mark) -> str:
    """Return what `mark` is without words, where nothing comes before it."""
    if isinstance(mark, Element):
        return mark.content
    return mark.raw + (" " if mark.kind != HIDDEN and mark.has_space_after else "")


def word_shares(weights: np.ndarray) -> np.ndarray:
    """Return the share (T, S) of each source word in each target word. The `weights` are squared,
    so heads that look everywhere do not blur those that do not."""
    squares = (weights + 1e-6) ** 2
    return squares / squares.sum(axis=1, keepdims=True)


def separate_runs(gains: dict[int, Gains], within: Run) -> dict[int, Run]:
    """Return the run of each number of `gains`, (first word, gains of the words from there on), in
    the run `within`. Runs do not overlap. Those with larger sums come first."""
    low, high = within
    is_free = np.ones(high - low, bool)
    queue: list[tuple[float, int, int, int]] = []
    runs: dict[int, Run] = {}

    def push(number: int) -> None:
        start, values = gains[number]
        free = is_free[start - low : start - low + len(values)]
        if free.any():
            # no run with the largest sum has a word that is not free
            total, first, end = best_run(np.where(free, values, -len(values)))
            heapq.heappush(queue, (-total, number, start + first, start + end))

    for number in gains:
        push(number)
    while queue:
        _, number, start, end = heapq.heappop(queue)
        if is_free[start - low : end - low].all():
            is_free[start - low : end - low] = False
            runs[number] = start, end
        else:
            push(number)
    return runs


def best_run(gains: np.ndarray) -> tuple[float, int, int]:
    """Return (sum, start, end) of the run with the largest sum of `gains`, of at least one."""
    sums = np.concatenate([[0.0], np.cumsum(gains)])
    totals = sums[1:] - np.minimum.accumulate(sums[:-1])
    end = int(totals.argmax()) + 1
    return float(totals[end - 1]), int(sums[:end].argmin()), end
