"""Texts in HTML: find them with the tags inside their sentences. All other bytes stay unchanged.

The rules are those of the HTML standard (13.2.5, tokenization). The time is linear in the length,
even for invalid HTML. The standard library's parser (Python 3.11) raises errors for some invalid
HTML and takes quadratic time for other.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html import unescape
from itertools import groupby
from typing import NamedTuple

from .checks import has_letters
from .markup import HIDDEN, IMAGE, WORD, MarkedText, MarkedTextBuilder

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


def name_set(names: str) -> frozenset[str]:
    return frozenset(names.split())


# elements whose content has no tags and is not translated
RAW = name_set("script style textarea xmp iframe noembed noframes plaintext")
# elements whose content is not translated
KEPT = name_set("code kbd math pre samp svg var")
# elements inside a sentence: phrasing content of the HTML standard with text
INLINE = name_set(
    "a abbr b bdi bdo cite data del dfn em font i ins label mark picture q s small span strike "
    "strong sub sup time tt u"
)
# what stands inside a sentence without text to translate; "" is a comment
ATOMS = {""} | name_set("embed img input source wbr") | KEPT - {"pre"} | RAW
KINDS = dict.fromkeys(name_set("code kbd math samp var") | INLINE, WORD) | dict.fromkeys(
    {""} | name_set("script source style wbr"), HIDDEN
)  # of atoms by name, else images
MAX_DEPTH = 100  # elements inside each other in a sentence; deeper tags are atoms
VOID = name_set("area base br col embed hr img input link meta param source track wbr")
BLOCKS = name_set(
    "address article aside blockquote details div dl fieldset figure footer form h1 h2 h3 h4 "
    "h5 h6 header hr main nav ol p pre section table ul"
)
# elements that end implicitly where one of the others begins
ENDED_BY = {
    "p": BLOCKS,
    "li": {"li"},
    "dt": {"dt", "dd"},
    "dd": {"dt", "dd"},
    "td": {"td", "th", "tr"},
    "th": {"td", "th", "tr"},
}


TEXT, OPEN, CLOSE, ATOM, BREAK = "text", "open", "close", "atom", "break"


class Token(NamedTuple):
    """Text or markup of HTML, from `start` to `end`. `name` is that of its element in lower case,
    or "". `is_translated` is True if the text at this place is translated, or for a tag the text in
    its element."""

    start: int
    end: int
    kind: str
    name: str
    is_translated: bool


def html_texts(
    html: str, is_aligned: bool = True, keep: re.Pattern | None = None
) -> list[str | MarkedText]:
    """Return the parts of `html` in order: texts to translate, and strings that stay unchanged.

    Each text has a letter. Entities become characters, and white space becomes single spaces. A
    text continues over tags of `INLINE` and `ATOMS`, its marks, if `is_aligned`; else it ends at
    every tag. Matches of `keep` in a text are marks too.

    Elements with `translate="no"` or the class `notranslate`, and those of `KEPT` and `RAW`, are
    not translated. `translate="yes"` includes an element again, but not those of `RAW`.
    """
    parts: list[str | MarkedText] = []
    for is_break, group in groupby(phrases(html, is_aligned), lambda token: token.kind == BREAK):
        tokens = [*group]
        if is_break:
            parts.append(html[tokens[0].start : tokens[-1].end])
        else:
            parts += phrase_texts(html, tokens, keep)
    return parts


def phrases(html: str, is_aligned: bool) -> Iterator[Token]:
    """Yield the tokens of `html`. Those that end a sentence have the kind `BREAK`. What is not
    translated in a sentence is one token."""
    for is_translated, group in groupby(html_tokens(html), lambda token: token.is_translated):
        tokens = [*group]
        if not is_translated:
            is_atom = is_aligned and is_inline(tokens)
            kind, name = (ATOM, tokens[0].name) if is_atom else (BREAK, "")
            yield Token(tokens[0].start, tokens[-1].end, kind, name, False)
            continue
        for token in tokens:
            names = ATOMS if token.kind == ATOM else INLINE
            stays = token.kind == TEXT or (is_aligned and token.name in names)
            yield token if stays else token._replace(kind=BREAK)


def is_inline(tokens: Sequence[Token]) -> bool:
    """Return True if `tokens` are complete elements that may stand in a sentence."""
    kinds = [token.kind for token in tokens]
    names = {token.name for token in tokens}
    is_complete = kinds[0] == OPEN and kinds.count(OPEN) == kinds.count(CLOSE)
    return is_complete and tokens[0].name in INLINE | KEPT and not names & (BLOCKS | {*ENDED_BY})


def html_tokens(html: str) -> Iterator[Token]:
    """Yield the texts and the markup of `html`, which cover it."""
    elements = Elements()
    offset = 0
    while offset < len(html):
        match = BEGIN.search(html, offset)
        start = match.start() if match else len(html)
        if start > offset:
            yield Token(offset, start, TEXT, "", elements.translate)
        if start < len(html):
            yield (token := markup_at(html, start, elements))
            start = token.end
        offset = start


def markup_at(html: str, start: int, elements: "Elements") -> Token:
    """Return the markup of `html` that begins at `start`. Markup without an end reaches to the end
    of `html`.

    Tags open and close elements in `elements`. A raw element such as a script is one token.
    """
    translate = elements.translate
    tag = TAG.match(html, start)
    if tag is None:
        match = (COMMENT if html.startswith("<!--", start) else OTHER).match(html, start)
        return Token(start, match.end() if match else len(html), ATOM, "", translate)
    name = tag["name"].lower()
    if tag["end"]:
        elements.close(name)
        return Token(start, tag.end(), CLOSE, name, translate)
    if name in RAW:
        ending = re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE).search(html, tag.end())
        match = TAG.match(html, ending.start()) if ending else None
        return Token(start, match.end() if match else len(html), ATOM, name, translate)
    kind = OPEN if elements.open(name, tag["rest"]) else ATOM
    return Token(start, tag.end(), kind, name, elements.translate)


def phrase_texts(html: str, tokens: list[Token], keep: re.Pattern | None) -> list[str | MarkedText]:
    """Return the parts of the `tokens` of a phrase: what stays before its text, the text, and what
    stays after it. A phrase without letters is a string."""
    first, last = tokens[0].start, tokens[-1].end
    tokens = nested(tokens)
    inner = [number for number, token in enumerate(tokens) if is_inner(html, token)]
    if not inner:
        return [html[first:last]]
    tokens = tokens[inner[0] : inner[-1] + 1]
    start, end = tokens[0].start, tokens[-1].end
    if tokens[0].kind == TEXT:
        start = end - len(html[start:end].lstrip(SPACE))
    if tokens[-1].kind == TEXT:
        end = start + len(html[start:end].rstrip(SPACE))
    text = marked_text(html, tokens, html[start:end], keep)
    if not has_letters(text.text):
        return [html[first:last]]
    return [part for part in (html[first:start], text, html[end:last]) if part]


def nested(tokens: Sequence[Token]) -> list[Token]:
    """Return `tokens`, those of a phrase. Tags of elements that end after the phrase, or began
    before it, have no name. A tag that does not nest, or is in more than `MAX_DEPTH` elements, is
    an atom."""
    result = [
        token if token.kind in (TEXT, ATOM) else token._replace(kind=ATOM, name="")
        for token in tokens
    ]
    counts: Counter[str] = Counter()
    starts: list[int] = []  # numbers of start tags without an end tag so far
    ends: list[int] = []  # numbers of end tags without a start tag
    for number, token in enumerate(tokens):
        if token.kind == OPEN:
            starts.append(number)
            counts[token.name] += 1
        elif token.kind == CLOSE and counts[token.name]:
            while tokens[inner := starts.pop()].name != token.name:
                counts[tokens[inner].name] -= 1
            counts[token.name] -= 1
            if len(starts) < MAX_DEPTH:
                result[inner], result[number] = tokens[inner], token
        elif token.kind == CLOSE:
            ends.append(number)
    for number in (*starts[:MAX_DEPTH], *ends[-MAX_DEPTH:]):
        result[number] = tokens[number]._replace(name="")
    return result


def is_inner(html: str, token: Token) -> bool:
    """Return False for what stays at both ends of a phrase: white space, tags of elements that are
    not complete in it, and atoms that are no words."""
    if token.kind == TEXT:
        return bool(html[token.start : token.end].strip(SPACE))
    return KINDS.get(token.name) == WORD if token.kind == ATOM else token.name != ""


def marked_text(
    html: str, tokens: Sequence[Token], raw: str, keep: re.Pattern | None
) -> MarkedText:
    """Return the text of `tokens`, `raw` in `html`, with its marks."""
    texts = [html[token.start : token.end] for token in tokens if token.kind == TEXT]
    escape = escaper("".join(texts))
    builder = MarkedTextBuilder(keep, escape)
    starts = [tokens[0].start for token in tokens if token.kind == CLOSE and not token.name]
    for _ in starts:
        builder.open_element("")
    for token, following in zip(tokens, [*tokens[1:], None]):
        text = html[token.start : token.end]
        if token.kind == TEXT:
            builder.add_text(SPACES.sub(" ", unescape(text)))
        elif token.kind == ATOM:
            builder.add_atom(text, KINDS.get(token.name, IMAGE))
        elif token.kind == OPEN:
            starts.append(token.start)
            builder.open_element(text)
        else:
            has_text = following is not None and following.kind == TEXT
            next_character = html[token.end] if has_text else ""
            builder.close_element(text, html[starts.pop() : token.end], next_character)
    while starts:
        builder.close_element("", html[starts.pop() : tokens[-1].end], "")
    return MarkedText(builder.text, builder.marks, raw, escape)


class Elements:
    """The open elements, each with a flag: True if its text is translated."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, bool]] = []
        self.counts: Counter[str] = Counter()

    @property
    def translate(self) -> bool:
        """True if text at this position is translated."""
        return self.stack[-1][1] if self.stack else True

    def open(self, name: str, rest: str) -> bool:
        """Open the element `name`, in lower case, and return True. `rest` is the text of the tag
        after the name.

        Elements that end implicitly where this one begins are closed. Void and self-closing
        elements are not opened: return False.
        """
        while self.stack and name in ENDED_BY.get(self.stack[-1][0], ()):
            self.close(self.stack[-1][0])
        is_open = name not in VOID and not rest.endswith("/")
        if is_open:
            choice = translate_attribute(rest)
            self.stack.append(
                (name, self.translate and name not in KEPT if choice is None else choice)
            )
            self.counts[name] += 1
        return is_open

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


def escaper(raw: str) -> Callable[[str], str]:
    """Return a function that escapes a text for HTML. `raw` is the original HTML: a character that
    is an entity there becomes the same entity."""
    originals = {unescape(entity): entity for entity in reversed(ENTITY.findall(raw))}
    entities = {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {
        character: originals[character] for character in originals if len(character) == 1
    }
    table = str.maketrans(entities)
    return lambda text: text.translate(table)
