"""Tests of text in HTML: which text is translated, and that nothing else changes."""

import itertools
import time
from html.parser import HTMLParser

import pytest
from html_documents import BROKEN, DOCUMENTS
from hypothesis import given
from hypothesis import strategies as st
from patterns import join_parts

from vanilla_transformer_export.text.markup import MarkedText
from vanilla_transformer_export.text.markup_html import html_texts
from vanilla_transformer_export.text.markup_places import with_marks


def texts(html):
    """The texts between two tags."""
    return [
        part.text for part in html_texts(html, is_aligned=False) if isinstance(part, MarkedText)
    ]


def replace(html, function):
    """Return `html` with the result of `function(number, text)` for each text."""
    numbers = itertools.count()
    return join_parts(
        html_texts(html, is_aligned=False),
        lambda part: with_marks(part, function(next(numbers), part.text), []),
    )


def without_texts(html):
    return join_parts(html_texts(html, is_aligned=False), lambda part: "")


def uppercase(html):
    return replace(html, lambda number, text: text.upper())


def unchanged(html):
    return replace(html, lambda number, text: text)


@pytest.mark.parametrize(
    "html, expected",
    [
        ("a dog", "A DOG"),
        ("<p class=\"x>y\" title='a'>a dog</P >\n", "<p class=\"x>y\" title='a'>A DOG</P >\n"),
        ("<p>a <b>big</b> dog</p>", "<p>A <b>BIG</b> DOG</p>"),
        ("<p>\n  a dog\n  runs\t</p>", "<p>\n  A DOG RUNS\t</p>"),  # a line break is white space
        (
            "<!DOCTYPE html><!-- a --><!--><p>b<![CDATA[c]]><?d?>",
            "<!DOCTYPE html><!-- a --><!--><p>B<![CDATA[c]]><?d?>",
        ),
        (
            "<script>if (a<b) '</p>'</scripts></SCRIPT >a",
            "<script>if (a<b) '</p>'</scripts></SCRIPT >A",
        ),
        (
            "<style>p{}</style><textarea>a<p>b</textarea>c",
            "<style>p{}</style><textarea>a<p>b</textarea>C",
        ),
        (
            "<pre>a</pre><code>b <i>c</i></code>d<kbd>e</kbd>",
            "<pre>a</pre><code>b <i>c</i></code>D<kbd>e</kbd>",
        ),
        ("a<br>b<img alt=c>d<hr/>e", "A<br>B<img alt=c>D<hr/>E"),
        ("<i translate=no>a <b>b</b></i>c", "<i translate=no>a <b>b</b></i>C"),
        (
            "<i TRANSLATE='No'>a<b translate=yes>b</b>c</i>",
            "<i TRANSLATE='No'>a<b translate=yes>B</b>c</i>",
        ),
        (
            '<i class="x notranslate">a</i><i class=translate>b</i>',
            '<i class="x notranslate">a</i><i class=translate>B</i>',
        ),
        (
            "<i data-translate=no>a</i><i title='translate=no'>b</i>",
            "<i data-translate=no>A</i><i title='translate=no'>B</i>",
        ),
        ("<ul><li translate=no>a<li>b</ul>", "<ul><li translate=no>a<li>B</ul>"),
        (
            "<p translate=no>a<p>b<div translate=no>c<p>d</div>e",
            "<p translate=no>a<p>B<div translate=no>c<p>d</div>E",
        ),
        ("<div translate=no><p>a</div>b</p></i>c", "<div translate=no><p>a</div>B</p></i>C"),
        ("<svg/>a<svg><text>b</text></svg>c", "<svg/>A<svg><text>b</text></svg>C"),
        ("3 < 4 a <5 b<", "3 &lt; 4 A &lt;5 B&lt;"),
        # no letters
        ("<p>3 < 4</p> 12 &ndash; &#8364;", "<p>3 < 4</p> 12 &ndash; &#8364;"),
        ("a &amp; b &lt;i&gt; c &quot;d&quot;", "A &amp; B &lt;I&gt; C &quot;D&quot;"),
        ("a&nbsp;b &eacute; é &Eacute;", "A&nbsp;B &Eacute; &Eacute; &Eacute;"),
        ("a & b &amp c &unknown; &copy 5", "A &amp; B &amp; C &amp;UNKNOWN; © 5"),
        ("a <b class='", "A <b class='"),  # the tag never ends, so browsers show none of it
        ("a <!-- b", "A <!-- b"),
        ("a </ b", "A </ b"),
        ("<title>a</title><noscript>b</noscript>", "<title>A</title><noscript>B</noscript>"),
    ],
)
def test_text_between_tags_is_replaced(html, expected):
    assert uppercase(html) == expected
    assert unchanged(html) == html


def test_replacement_text_is_escaped():
    html = "<p>a &quot; b</p>"
    changed = replace(html, lambda *_: """<script> & "'""")
    assert changed == "<p>&lt;script&gt; &amp; &quot;'</p>"


@given(st.one_of(DOCUMENTS, BROKEN))
def test_unchanged_text_keeps_html_byte_for_byte(html):
    assert unchanged(html) == html


@given(st.one_of(DOCUMENTS, BROKEN))
def test_changed_text_keeps_markup(html):
    """The new text is found again, in the same places."""
    changed = replace(html, lambda number, _: f"<{number}> & é")
    assert texts(changed) == [f"<{number}> & é" for number in range(len(texts(html)))]
    assert without_texts(changed) == without_texts(html)


class TextParser(HTMLParser):
    """The standard library's parser, which collects the text of well-formed documents."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.found, self.kept = [""], 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append("")
        self.kept += (
            bool(self.kept)
            and tag != "br"
            or tag in ("script", "code")
            or dict(attributes).get("translate") == "no"
        )

    def handle_endtag(self, tag):
        self.found.append("")
        self.kept -= bool(self.kept)

    def handle_comment(self, data):
        self.found.append("")

    def handle_data(self, data):
        if not self.kept:
            self.found[-1] += data


@given(DOCUMENTS)
def test_text_runs_match_standard_library_parser(html):
    parsed = [" ".join(text.strip(" ").split(" ")) for text in TextParser(html).found]
    assert texts(html) == [text for text in parsed if any(map(str.isalpha, text))]


@pytest.mark.parametrize(
    "unit",
    [
        *(
            "<",
            "<a",
            "<a b=",
            "<a b='",
            "<a b='\">",
            "<a a a",
            "<a class='",
            "=\"'",
            "</",
            "</a",
            "<!",
            "<!--",
            "<?",
            "<![",
            "&",
            "&a",
        ),
        *(
            "<p>",
            "</p>",
            "<li><p>",
            "<i><b></i></b>",
            "<p translate=no>a",
            "<script>",
            "<style></style",
            "a < b > c & d; ",
        ),
    ],
)
def test_parsing_time_is_not_quadratic(unit):
    html = unit * (2**17 // len(unit))
    start = time.process_time()
    assert len(uppercase(html)) >= len(html)
    assert time.process_time() - start < 5  # quadratic time would be minutes
