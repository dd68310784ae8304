"""Tests of marks in translations: places of elements and atoms, by alignments made up here."""

import random
import re
import time
from collections import Counter

import numpy as np
import pytest
from html_documents import BROKEN, DOCUMENTS
from hypothesis import given
from hypothesis import strategies as st
from patterns import Markup, join_parts

from vanilla_transformer_export.text.alignments import Alignment, words
from vanilla_transformer_export.text.markup import MarkedText, kept_texts
from vanilla_transformer_export.text.markup_html import html_texts, html_tokens
from vanilla_transformer_export.text.markup_places import best_run, with_marks
from vanilla_transformer_export.text.tasks.segments import EMOJI, PLACEHOLDERS


def permuted(text, order=None):
    """Return the alignment of a text whose target is its words in capitals, in another order: the
    word `order[n]` is the n-th."""
    source = words(text, ())
    order = order or range(len(source))
    pieces = [text[slice(*source[number])].upper() for number in order]
    target = re.sub(r" ([.,!?)])", r"\1", " ".join(pieces)).replace("( ", "(")
    weights = np.zeros((len(pieces), len(source)), np.float32)
    weights[range(len(pieces)), order] = 1
    return Alignment(target, source, words(target, ()), weights)


def translate(parts, order=None):
    def translated(part):
        alignment = permuted(part.text, order)
        return with_marks(part, alignment.text, [alignment])

    return join_parts(parts, translated)


@pytest.mark.parametrize(
    ("html", "order", "expected"),
    [
        ("a <b>dog</b> runs", [2, 0, 1], "RUNS A <b>DOG</b>"),
        ("a <b>big dog now</b> x", [1, 0, 2, 3, 4], "<b>BIG A DOG NOW</b> X"),  # one run of words
        (
            "<p>a <b>big <i>dog</i></b> runs</p>",
            [3, 2, 1, 0],
            "<p>RUNS <b><i>DOG</i> BIG</b> A</p>",
        ),
        ("a <b>big</b> <i>dog</i>", [2, 1, 0], "<i>DOG</i> <b>BIG</b> A"),
        ("a <B\nclass='x>y'> dog </B>runs", None, "A <B\nclass='x>y'>DOG</B> RUNS"),
        ("<b>a dog</b>", [1, 0], "<b>DOG A</b>"),
        # a part of a word is the word, and of two elements in a word the first has it
        ("a big<b>gest</b> dog", [2, 1, 0], "DOG <b>BIGGEST</b> A"),
        ("a <b>big</b><i>gest</i> dog", [2, 1, 0], "DOG <b>BIGGEST</b><i></i> A"),
        # atoms: beside the word that they touch, else after the word before
        ("a <img>dog runs", [2, 1, 0], "RUNS <img>DOG A"),
        ("a dog<img> runs", [2, 1, 0], "RUNS DOG<img> A"),
        ("a dog <img> runs", [1, 0, 2], "DOG <img> A RUNS"),
        ("a <b><img> dog</b> runs", None, "A <b><img> DOG</b> RUNS"),
        ("a <i id=1></i>dog <!-- b --> runs", [1, 2, 0], "<i id=1></i>DOG<!-- b --> RUNS A"),
        ("a <code>ls  -l</code> dog.", [1, 0, 2], "DOG A <code>ls  -l</code>."),
        ("use <code>ls</code>.", None, "USE <code>ls</code>."),
        ("<code>ls</code> is a dog", [2, 1, 0], "<code>ls</code> DOG A IS"),
        (
            "a <i translate=no>Big <u>X</u></i> dog",
            [1, 0],
            "DOG A <i translate=no>Big <u>X</u></i>",
        ),
        ("a <b><img></b> dog", [1, 0], "DOG A <b><img></b>"),
        ("men<sup>1</sup> run.<a>[2]</a>", [1, 0, 2], "RUN MEN<sup>1</sup>.<a>[2]</a>"),
        ("big dogs <a href=x>&para;</a>", [1, 0], "DOGS BIG <a href=x>&para;</a>"),
        ("<sup>1</sup>see me", [1, 0], "ME <sup>1</sup>SEE"),
        ("drink H<sub>2</sub>O now", [1, 0], "NOW DRINK H<sub>2</sub>O"),
        (
            "a <sub>2</sub> dog <b>3</b>.",
            None,
            "A <sub>2</sub> DOG <b>3</b>.",
        ),  # words of their own
        ("10,<b>000</b> dogs", None, "10 , <b>000</b> DOGS".replace(" ,", ",")),
        # at the ends they stay
        ("<img>\n a dog <img> ", [1, 0], "<img>\n DOG A <img> "),
        # tags that do not nest are atoms
        ("a <b>big <i>dog</b> runs</i> x", None, "A <b>BIG <i>DOG</b> RUNS</i> X"),
        ("a <b>dog <p>runs</b>", None, "A <b>DOG <p>RUNS</b>"),
        # a sentence ends at other tags and at a line break that is a tag
        ("a\n<b>dog</b><br>runs <q-x>x</q-x>", None, "A <b>DOG</b><br>RUNS <q-x>X</q-x>"),
        ("a&lt;b &amp; <b>c&quot;</b>", None, "A &lt; B &amp; <b>C &quot;</b>"),
        (
            "ein <bdo dir=rtl>\u05d0\u05d1</bdo> x",
            [1, 0, 2],
            "<bdo dir=rtl>\u05d0\u05d1</bdo> EIN X",
        ),
    ],
)
def test_marks_follow_their_words(html, order, expected):
    assert translate(html_texts(html), order) == expected


def test_unchanged_text_keeps_its_bytes():
    html = "a&nbsp;  <b> DOG </b>\n<code>x</code> , <!-- c --> b"
    [part] = html_texts(html)
    assert with_marks(part, part.text, [permuted(part.text)]) == html


def test_element_with_the_larger_sum_has_a_word_that_two_want():
    [part] = html_texts("<b>x</b> <i>y</i> z")
    weights = np.array([[0.6, 0.3, 0.0], [0.1, 0.05, 0.8]], np.float32)
    alignment = Alignment("A B", words("x y z", ()), words("A B", ()), weights)
    assert with_marks(part, "A B", [alignment]) == "<b>A</b> <i>B</i>"


def test_elements_without_a_free_word_and_empty_translations_lose_nothing():
    [part] = html_texts("<b>x</b> <i>y <u>z</u></i> <code>c</code>")
    for target in ("A", ""):
        weights = np.full((len(target), 3), 1 / 3, np.float32)
        alignment = Alignment(target, words("x y z", ()), words(target, ()), weights)
        found = Markup(with_marks(part, target, [alignment]))
        assert found.tags == Markup("<b></b><i><u></u></i><code></code>").tags
        assert found.is_nested and sorted(found.text.split()) == sorted([*target, "c"])


@given(st.lists(st.tuples(st.floats(-1, 1), st.booleans()), min_size=1, max_size=12))
def test_best_run_has_the_largest_sum_of_free_words(words):
    gains, is_free = zip(*words)
    sums = {
        (i, j): sum(gains[i:j])
        for i in range(len(gains))
        for j in range(i + 1, len(gains) + 1)
        if all(is_free[i:j])
    }
    total, start, end = best_run(gains, is_free)
    if not sums:
        assert start == end
    else:
        assert total == pytest.approx(max(sums.values()))
        assert sums[start, end] == pytest.approx(total)


# ------------------------------------------------------------------------------ any HTML, any order


def scrambled(part, rng):
    """Return the translation of a marked text by two sentences with random alignments."""
    half = len(part.text) // 2
    target, alignments = "", []
    for start, text in ((0, part.text[:half]), (half, part.text[half:])):
        source = [(first + start, last + start) for first, last in words(text, ())]
        order = rng.sample(range(len(source)), len(source))
        spans = []
        for number in order[: rng.randint(0, len(order))]:
            target += " " * bool(target)
            spans.append((len(target), len(target) + 2))
            target += f"w{number % 10}"
        weights = np.array([[rng.random() for _ in source] for _ in spans], np.float32)
        alignments.append(
            Alignment(target, source, spans, weights.reshape(len(spans), len(source)))
        )
    return with_marks(part, target, alignments)


def markup_of(html):
    return Counter(html[token.start : token.end] for token in html_tokens(html) if token.name)


@given(st.one_of(DOCUMENTS, BROKEN), st.randoms(use_true_random=False))
def test_no_tag_is_lost_or_changed(html, rng):
    changed = join_parts(html_texts(html), lambda part: scrambled(part, rng))
    assert markup_of(changed) == markup_of(html)


@given(DOCUMENTS, st.randoms(use_true_random=False))
def test_tags_keep_their_parents(html, rng):
    changed = join_parts(html_texts(html), lambda part: scrambled(part, rng))
    before, after = Markup(html), Markup(changed)
    assert after.is_nested == before.is_nested and after.tags == before.tags


DEEP = "<b>" * 50 + "a" + "</b>" * 50
UNITS = [
    "<b>a</b> ",
    "<b>a ",
    "</b>a ",
    "<b><i>a</b></i> ",
    "<b></b>",
    "<b>1</b>",
    "a<sup>1</sup> ",
]
UNITS += ["<code>x</code>", "<i translate=no>a", "<a>a b. c</a> ", DEEP]
UNITS += ["{a} ", "a{b}c", "H<sub>2</sub>O"]


def time_of_markup(html):
    """Return the seconds in which `html` is read, aligned with itself and written again."""
    rng = random.Random(0)
    start = time.process_time()
    for part in html_texts(html, keep=re.compile(PLACEHOLDERS)):
        if isinstance(part, MarkedText):
            alignments = []
            for first in range(0, len(part.text), 250):  # sentences
                source = words(part.text[first : first + 250], ())
                spans = [(begin + first, end + first) for begin, end in source]
                weights = np.array([[rng.random()] for _ in source], np.float32) * np.ones(
                    len(source)
                )
                alignments.append(Alignment("", spans, spans, weights))
            with_marks(part, part.text.upper(), alignments)
    return time.process_time() - start


@pytest.mark.parametrize("unit", [*UNITS, "nested"])
def test_time_of_markup_is_not_quadratic(unit):
    """Linear time is 8 times as long for 8 times the text, quadratic time 64 times."""

    def time_of_length(length):
        if unit == "nested":
            return time_of_markup("<b>" * (length // 7) + "a" + "</b>" * (length // 7))
        return time_of_markup(unit * (length // len(unit)))

    time_of_length(2**10)  # the first call takes longer
    # other processes may slow down one attempt
    assert any(time_of_length(2**15) < 16 * time_of_length(2**12) for _ in range(3))


# ------------------------------------------------------------------------------------- placeholders


@pytest.mark.parametrize(
    ("text", "source", "atoms"),
    [
        ("hi {name}, see %s.", "hi, see.", ["{name}", "%s"]),
        ("hi %1$s and %(n)d %-5.2f %@", "hi and", ["%1$s", "%(n)d", "%-5.2f", "%@"]),
        ("${a} #{b} {{ c }} x", "x", ["${a}", "#{b}", "{{ c }}"]),
        ("100% sure, 20 % of 5%", None, []),
        ("a <0>b</0> <1/>", "a b", ["<0>", "</0>", "<1/>"]),
        (
            "to a.b+c@d.org or http://x.y/z?a=(1)&b=2.",
            "to or.",
            ["a.b+c@d.org", "http://x.y/z?a=(1)&b=2"],
        ),
        ("a {x}/{y} b {u}{v}", "a b", ["{x}/{y}", "{u}{v}"]),
        ('a "%s" b (%d).', "a b.", ['"%s"', "(%d)"]),
        ("file{n}name x", "x", ["file{n}name"]),
        ("{x}", "", ["{x}"]),
    ],
)
def test_placeholders_are_taken_out_of_the_text(text, source, atoms):
    parts = kept_texts(text, re.compile(PLACEHOLDERS), True)
    marked = [part for part in parts if isinstance(part, MarkedText)]
    assert "".join(part.text for part in marked) == (text if source is None else source)
    assert not marked or [atom.raw for part in marked for atom in part.marks] == atoms


def test_placeholders_stay_in_their_lines():
    text = "x.\ny\n  a %s\n%d b  \n\n%s\n x\n"
    parts = kept_texts(text, re.compile("%[sd]"), True)
    shown = [part if isinstance(part, str) else (part.text, part.raw) for part in parts]
    assert shown == [
        *(("x.\ny\n", "x.\ny\n"), "  ", ("a", "a %s"), "\n", ("b", "%d b"), "  \n", ("\n", "\n")),
        *("%s", "\n", (" x\n", " x\n")),
    ]
    assert translate(parts[1:6]) == "  A %s\n%d B  \n"


@pytest.mark.parametrize(
    "emoji",
    ["🐶", "❤️", "👍🏽", "👩‍👩‍👧", "🏳️‍🌈", "🇩🇪", "1️⃣", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "✂", "™"],
)
def test_one_emoji_is_one_match(emoji):
    assert [match[0] for match in EMOJI.finditer(f"a{emoji}{emoji} b.")] == [emoji, emoji]
    assert not EMOJI.search("a 1 # * é 日本 – … €")
