"""Marks of a text around and beside the words of its translation.

An element goes around the one run of target words with the largest sum of (share of attention
inside the element - 1/2). The run lies within that of the parent and apart from those of siblings.
An atom goes beside the translation of the word that it touches, else of the word before it.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from .alignments import Alignment
from .markup import HIDDEN, IMAGE, WORD, Atom, Element, Mark, MarkedText

Run = tuple[int, int]  # the first of some words, and the one after the last
Gains = tuple[int, np.ndarray]  # the first of some target words, and what each of them gains


def with_marks(text: MarkedText, translation: str, alignments: Sequence[Alignment]) -> str:
    """Return `translation` with the marks of `text`. `alignments` are those of its sentences, in
    order, with spans in the text without marks and in `translation`."""
    if translation == text.text:
        return text.raw
    if not text.marks:
        return text.escape(translation)
    return Placement(translation, alignments, text.escape).marked_text(text.marks)


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
            # squares, so heads that look everywhere do not blur those that do not
            squares = (alignment.weights + 1e-6) ** 2
            shares = squares / squares.sum(axis=1, keepdims=True)
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
        occupied = sorted(runs.values())
        keys = []
        arranged: list[Mark] = []
        for number, mark in enumerate(marks):
            if number in runs:
                start, end = runs[number]
                keys.append((start, 2, end, number))
                arranged.append(mark)
                continue
            atom = mark if isinstance(mark, Atom) else Atom([mark.content], mark.start, HIDDEN)
            gap = self.gap(atom, inner, occupied)
            keys.append((gap, int(atom.precedes_word), gap, number))
            arranged.append(atom)
        return [(start, end, arranged[number]) for start, _, end, number in sorted(keys)]

    def gap(self, atom: Atom, within: Run, occupied: Sequence[Run]) -> int:
        """Return the number of the target word before which `atom` goes: beside the translation of
        its word, in the run `within`, and not within one of the runs `occupied`."""
        low, high = within
        word = bisect_left(self.source_starts, atom.start)  # the word after it
        if atom.precedes_word and word < len(self.source_starts):
            gap = self.best_word(word)
        elif atom.kind == IMAGE and atom.has_space_before and word == len(self.source_starts):
            gap = high  # an icon at the end stays there
        else:
            gap = self.best_word(word - 1) + 1 if word else low
        gap = min(max(gap, low), high)
        around = bisect_left(occupied, (gap,)) - 1
        if around >= 0 and gap < occupied[around][1]:
            gap = occupied[around][0 if atom.precedes_word else 1]
        return gap

    def best_word(self, source_word: int) -> int:
        """Return the target word in which `source_word` has its largest share."""
        block = self.blocks[self.block_number(source_word)]
        column = block.shares[:, source_word - block.source]
        return block.target + (int(column.argmax()) if len(column) else 0)

    def block_number(self, source_word: int) -> int:
        return bisect_right(self.blocks, source_word, key=lambda block: block.source) - 1

    def runs(self, marks: Sequence[Mark], within: Run) -> tuple[dict[int, Run], Run]:
        """Return the run of each element in `marks` by its number, and the run for other marks.

        An element that began before the text has the start of the run `within`, and one that ends
        after the text has its end. Others are between these. Elements without a free word are
        missing.
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
        """Return the end of an element around the `source` words that begins with the run `within`.
        If `direction` is -1, return the beginning of one that ends with the run."""
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
    is_spaced = mark.kind == WORD or (mark.kind == IMAGE and mark.has_space_before)
    return mark.raw + (" " if is_spaced and mark.has_space_after else "")


def separate_runs(gains: dict[int, Gains], within: Run) -> dict[int, Run]:
    """Return the run of each number of `gains` in the run `within`. Runs do not overlap. Those with
    larger sums come first."""
    low, high = within
    is_free = [True] * (high - low)
    queue: list[tuple[float, int, Run]] = []
    runs: dict[int, Run] = {}

    def push(number: int) -> None:
        """Add the best run of free words, if any is free."""
        first, values = gains[number]
        free = is_free[first - low : first - low + len(values)]
        total, start, end = best_run(values.tolist(), free)
        if start < end:
            heapq.heappush(queue, (-total, number, (first + start, first + end)))

    for number in gains:
        push(number)
    while queue:
        _, number, (start, end) = heapq.heappop(queue)
        if all(is_free[start - low : end - low]):
            is_free[start - low : end - low] = [False] * (end - start)
            runs[number] = start, end
        else:
            push(number)
    return runs


def best_run(gains: Sequence[float], is_free: Sequence[bool]) -> tuple[float, int, int]:
    """Return (sum, start, end) of the run of free words with the largest sum of `gains`. It has one
    word at least, if any is free."""
    best = (-float("inf"), 0, 0)
    start, total = 0, 0.0
    for word, (gain, free) in enumerate(zip(gains, is_free)):
        if total < 0 or not free:
            start, total = word + (not free), 0.0
        if free:
            total += gain
            best = max(best, (total, start, word + 1), key=itemgetter(0))
    return best
