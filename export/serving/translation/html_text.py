"""Text in HTML: find it and replace it. All other bytes stay unchanged.

The rules are those of the HTML standard (13.2.5, tokenization). The time is linear in the length,
even for invalid HTML. The standard library's parser (Python 3.11) raises errors for some invalid
HTML and takes quadratic time for other.
"""

import re
from collections import Counter
from collections.abc import Sequence
from html import unescape
from typing import NamedTuple

from ...text.tasks.translation import has_letters

BEGIN = re.compile(r"<(?=[a-zA-Z!?]|/.)", re.DOTALL)  # start of markup; any other "<" is text
COMMENT = re.compile(r"<!--(?:-?>|.*?--!?>)", re.DOTALL)
# a doctype, and markup that browsers treat as a comment
OTHER = re.compile(r"<(?:[!?]|/(?![a-zA-Z]))[^>]*>")
TAG = re.compile(
    r"<(?P<end>/?)(?P<name>[a-zA-Z][^\s/>]*+)"
    r"(?P<rest>(?:[^>=]++|=\s*+(?:\"[^\"]*+\"|'[^']*+'|(?![\"'])))*+)>"
)
ATTRIBUTE = re.compile(r"""([^\s"'>/=]++)(?:\s*+=\s*+("[^"]*+"|'[^']*+'|[^\s>]*+))?+""")
ENTITY = re.compile(r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);")
SPACE = " \t\n\f\r"
SPACES = re.compile(rf"[{SPACE}]+")

# elements whose content has no tags and is not translated
RAW = {"script", "style", "textarea", "xmp", "iframe", "noembed", "noframes", "plaintext"}
# elements whose content is not translated
KEPT = {"code", "kbd", "math", "pre", "samp", "svg", "var"}
VOID = {
    "area",
    "base",
    "br",
    "col",
    "embed",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "param",
    "source",
    "track",
    "wbr",
}
BLOCKS = {
    "address",
    "article",
    "aside",
    "blockquote",
    "details",
    "div",
    "dl",
    "fieldset",
    "figure",
    "footer",
    "form",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "header",
    "hr",
    "main",
    "nav",
    "ol",
    "p",
    "pre",
    "section",
    "table",
    "ul",
}
# elements that end implicitly where one of the others begins
ENDED_BY = {
    "p": BLOCKS,
    "li": {"li"},
    "dt": {"dt", "dd"},
    "dd": {"dt", "dd"},
    "td": {"td", "th", "tr"},
    "th": {"td", "th", "tr"},
}


class TextRun(NamedTuple):
    """The text between two tags, without surrounding white space: its start, its end and the text
    with entities decoded."""

    start: int
    end: int
    text: str


def text_runs(html: str) -> list[TextRun]:
    """Return the texts in `html` to translate, in order. Each contains a letter. Entities become
    characters, and white space becomes single spaces.

    Elements with `translate="no"` or the class `notranslate`, and those of `KEPT` and `RAW`, are
    skipped. `translate="yes"` includes an element again, but not those of `RAW`.
    """
    runs = []
    elements = Elements()
    offset = 0
    while offset < len(html):
        match = BEGIN.search(html, offset)
        start = match.start() if match else len(html)
        if elements.translate:
            runs += run_between(html, offset, start)
        offset = end_of_markup(html, start, elements)
    return runs


def run_between(html: str, start: int, end: int) -> list[TextRun]:
    """Return the text of `html` between `start` and `end` as a list of one run, or an empty list if
    it has no letters."""
    raw = html[start:end]
    start += len(raw) - len(raw.lstrip(SPACE))
    raw = raw.strip(SPACE)
    text = SPACES.sub(" ", unescape(raw))
    return [TextRun(start, start + len(raw), text)] if has_letters(text) else []


def end_of_markup(html: str, start: int, elements: "Elements") -> int:
    """Return the end of the markup that begins at `start`, or the length of `html` if it never
    ends.

    Tags open and close elements in `elements`. The content of raw elements such as scripts counts
    as markup.
    """
    if html.startswith("<!--", start):
        match = COMMENT.match(html, start)
    elif (match := TAG.match(html, start)) is None:
        match = OTHER.match(html, start)
    elif match["end"]:
        elements.close(match["name"].lower())
    else:
        name = match["name"].lower()
        if name in RAW:
            ending = re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE).search(html, match.end())
            return ending.start() if ending else len(html)
        elements.open(name, match["rest"])
    return match.end() if match else len(html)


class Elements:
    """The open elements, each with a flag: True if its text is translated."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, bool]] = []
        self.counts: Counter[str] = Counter()

    @property
    def translate(self) -> bool:
        """True if text at this position is translated."""
        return self.stack[-1][1] if self.stack else True

    def open(self, name: str, rest: str) -> None:
        """Open the element `name`, in lower case. `rest` is the text of the tag after the name.

        Elements that end implicitly where this one begins are closed. Void and self-closing
        elements are not opened.
        """
        while self.stack and name in ENDED_BY.get(self.stack[-1][0], ()):
            self.close(self.stack[-1][0])
        if name not in VOID and not rest.endswith("/"):
            choice = translate_attribute(rest)
            self.stack.append(
                (name, self.translate and name not in KEPT if choice is None else choice)
            )
            self.counts[name] += 1

    def close(self, name: str) -> None:
        """Close the element `name` and all open elements within it. Ignore a tag without an open
        element."""
        while self.counts[name]:
            inner = self.stack.pop()[0]
            self.counts[inner] -= 1
            if inner == name:
                return


def translate_attribute(rest: str) -> bool | None:
    """Return True if the attributes in `rest` say that the element is translated, False if not,
    None if they say nothing.

    `rest` is the text of a tag after the name.
    """
    if "translate" not in rest.lower():
        return None
    attributes: dict[str, str] = {}
    for name, value in ATTRIBUTE.findall(rest):
        attributes.setdefault(name.lower(), value.strip("\"'").lower())
    if "notranslate" in attributes.get("class", "").split():
        return False
    return {"": True, "yes": True, "no": False}.get(attributes.get("translate", "none"))


def replace_runs(html: str, runs: Sequence[TextRun], texts: Sequence[str]) -> str:
    """Return `html` with each of `runs` replaced by the text at the same index. Unchanged texts
    keep their bytes."""
    parts = []
    offset = 0
    for run, text in zip(runs, texts, strict=True):
        raw = html[run.start : run.end]
        parts += [html[offset : run.start], raw if text == run.text else escaped(text, raw)]
        offset = run.end
    return "".join([*parts, html[offset:]])


def escaped(text: str, raw: str) -> str:
    """Return `text` escaped for HTML. `raw` is the original HTML: a character that is an entity
    there becomes the same entity."""
    originals = {unescape(entity): entity for entity in reversed(ENTITY.findall(raw))}
    entities = {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {
        character: originals[character] for character in originals if len(character) == 1
    }
    return text.translate(str.maketrans(entities))
