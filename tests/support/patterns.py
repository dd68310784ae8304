"""Generated HTML: elements around words of a sentence, its translation, and what a parser finds in
it."""

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape, unescape
from html.parser import HTMLParser

from vanilla_transformer_export.text.markup import MarkedText

WORDS = re.compile(r"\w+|[^\w\s]")
NAMES = ("b", "i", "a", "em", "span")
VOID = ("img", "wbr")


class Pattern:
    """HTML of `text` with 1 to 4 elements, comments and void elements: nested, adjacent, empty, and
    with white space inside and outside."""

    def __init__(self, text: str, rng: random.Random, words: re.Pattern):
        self.text = text
        self.rng = rng
        self.spans = [match.span() for match in words.finditer(text)]
        self.left = rng.randint(1, 4)
        self.number = 0
        self.place = 0
        self.html = self.grow(0, len(self.spans), 4) + self.until(len(text))

    def until(self, place: int) -> str:
        """Return the text up to `place`, escaped."""
        start, self.place = self.place, max(self.place, place)
        return escape(self.text[start : self.place], quote=False)

    def grow(self, low: int, high: int, depth: int) -> str:
        """Return the HTML of words from `low` to `high`."""
        html, word = "", low
        while word < high and self.left and self.rng.random() < 0.85:
            first = self.rng.randrange(word, high)
            last = self.rng.randint(first, min(high - 1, first + 4))
            self.left -= 1
            self.number += 1
            html += self.mark(first, last, depth)
            word = last + 1 if self.place > self.spans[first][0] else first
        return html

    def mark(self, first: int, last: int, depth: int) -> str:
        """Return the text up to the word `first` and an element around it and those to `last`, or a
        mark before it."""
        number, kind = self.number, self.rng.random()
        start = self.spans[first][0]
        is_spaced = start > self.place and self.text[start - 1] == " "
        before = self.until(start - (is_spaced and self.rng.random() < 0.2))
        if kind < 0.07:
            return f'{before}<{self.rng.choice(VOID)} id="{number}">'
        if kind < 0.13:
            return f'{before}<i id="{number}"></i>'
        if kind < 0.17:
            return f"{before}<!-- {number} -->"
        name = self.rng.choice(NAMES)
        inside = self.grow(first, last + 1, depth - 1) if depth > 1 else ""
        end = self.spans[last][1]
        inside += self.until(end + (self.text[end : end + 1] == " " and self.rng.random() < 0.15))
        return f'{before}<{name} id="{number}">{inside}</{name}>'


def join_parts(parts: Sequence[str | MarkedText], translate: Callable[[MarkedText], str]) -> str:
    """Return `parts` as one text, with the result of `translate` for each that is marked."""
    return "".join(part if isinstance(part, str) else translate(part) for part in parts)


class Markup(HTMLParser):
    """The tags and the text that a parser finds in HTML.

    `tags` counts (name, attributes, parent) of elements and comments, `text` is that without tags,
    and `words` has the spans of text by the id of the element. `is_nested` is False if an end tag
    is not that of the innermost element.
    """

    def __init__(self, html: str):
        super().__init__(convert_charrefs=False)
        self.stack: list[tuple] = [()]
        self.tags: Counter[tuple] = Counter()
        self.words: dict[str, list[tuple[int, int]]] = {}
        self.text = ""
        self.is_nested = True
        self.feed(html)
        self.close()
        self.is_nested &= len(self.stack) == 1

    def handle_starttag(self, tag: str, attributes: Sequence[tuple]) -> None:
        element = (tag, tuple(attributes))
        self.tags[(*element, self.stack[-1])] += 1
        if tag not in (*VOID, "br"):
            self.stack.append(element)

    def handle_endtag(self, tag: str) -> None:
        if len(self.stack) > 1 and self.stack[-1][0] == tag:
            self.stack.pop()
        else:
            self.is_nested = False

    def handle_comment(self, data: str) -> None:
        self.tags[("", data, self.stack[-1])] += 1

    def handle_entityref(self, name: str) -> None:
        self.handle_data(unescape(f"&{name};"))

    def handle_charref(self, name: str) -> None:
        self.handle_data(unescape(f"&#{name};"))

    def handle_data(self, data: str) -> None:
        span = len(self.text), len(self.text) + len(data)
        self.text += data
        for tag, attributes in filter(None, self.stack):
            self.words.setdefault(dict(attributes).get("id", tag), []).append(span)

    def numbers(self, words: Callable) -> dict[str, set[int]]:
        """Return the numbers of the words in each element, by its id. `words` returns the spans of
        the words of a text."""
        spans = words(self.text, ())
        return {
            element: {
                number
                for number, (start, end) in enumerate(spans)
                if any(start < last and first < end for first, last in runs)
            }
            for element, runs in self.words.items()
        }
