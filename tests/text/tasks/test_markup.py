"""Tests of HTML and placeholders translated by the shipped translators."""

import html as entities
import itertools
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from alignments import CARD, SENTENCES
from command_line import main
from gold import PAIRS, captions, gold_links, needs_captions
from messages import raises
from patterns import WORDS, Markup, Pattern, join_parts

from vanilla_transformer_export import TextRuntime, export
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.files.predictions import Predictions
from vanilla_transformer_export.files.run import Runner
from vanilla_transformer_export.text.alignments import words
from vanilla_transformer_export.text.markup import kept_line
from vanilla_transformer_export.text.markup_html import html_texts
from vanilla_transformer_export.text.markup_places import with_marks
from vanilla_transformer_export.text.tasks.segments import keep_pattern

GREEDY = dict(num_beams=1)
FRAGMENTS = Path(__file__).parents[2] / "support/apache2_doc.html"
WORDS_OF = {"en-de": WORDS, "en-fr": re.compile(r"\S+")}  # French captions are tokenized
CODE = re.compile(r"<(code|var|kbd|samp)\b.*?</\1>", re.DOTALL)


@pytest.fixture
def german(shipped):
    return shipped("en-de")


@pytest.fixture(scope="module")
def portable(tmp_path_factory):
    """An export without an alignment graph."""
    directory = tmp_path_factory.mktemp("portable") / "export"
    export(CARD, directory, cases=1)
    return TextRuntime(directory)


def sentences_of(pair):
    """Return sentences as the card of `pair` reads them."""
    if pair == "en-de":
        return SENTENCES
    return [text.lower().replace(".", " .") for text in SENTENCES]


def patterns(sources, count, seed, tokens):
    """Return (number of a source, HTML of it) for `count` patterns with a mark."""
    rng = random.Random(seed)
    made = []
    while len(made) < count:
        number = rng.randrange(len(sources))
        pattern = Pattern(sources[number], rng, tokens)
        if pattern.number:
            made.append((number, pattern.html))
    return made


@pytest.mark.parametrize("pair", PAIRS)
def test_patterns_keep_tags_parents_and_the_text_of_the_translation(shipped, pair):
    sources = sentences_of(pair)
    translated = shipped(pair).translate(sources, **GREEDY)
    cases = patterns(sources, 400, 5, WORDS_OF[pair])
    results = shipped(pair).translate([html for _, html in cases], markup="html", **GREEDY)
    for (number, html), result in zip(cases, results, strict=True):
        before, after = Markup(html), Markup(result)
        assert after.is_nested and after.tags == before.tags
        assert after.text == translated[number]


@needs_captions
@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_elements_are_around_the_words_of_gold_links(shipped, pair):
    """Gold links are those of eflomal, see gold_alignments.txt."""
    sources, _ = captions(pair)
    aligned = shipped(pair).generate(sources, return_alignments=True)
    gold = gold_links(pair, [alignment.text for alignment in aligned])
    both = num_found = num_gold = num_linked = 0
    for number, html in patterns(sources, 4000, 5, WORDS_OF[pair]):
        links = gold[number] or set()
        alignment = aligned[number]
        result = join_parts(
            html_texts(html), lambda part, one=alignment: with_marks(part, one.text, [one])
        )
        before, after = Markup(html), Markup(result)
        assert after.is_nested and after.tags == before.tags and after.text == alignment.text
        inside, translated = before.numbers(words), after.numbers(words)
        for element, of_element in inside.items():
            expected = {target for source, target in links if source in of_element}
            found = translated.get(element, set())
            both += len(expected & found)
            num_gold += len(expected)
            num_found += len(found)
            num_linked += len(found & {target for _, target in links}) if expected else 0
    assert 2 * both / (num_found + num_gold) >= 0.85
    assert 2 * both / (num_linked + num_gold) >= 0.90


def fragments():
    return FRAGMENTS.read_text(encoding="utf-8").split("\n\n")[1:]


def test_fragments_of_apaches_manual_change_only_in_their_text(german):
    sources = fragments()
    assert len(sources) == 200
    with pytest.warns(UserWarning, match="was cut"):
        results = german.translate(sources, markup="html", max_new_tokens=40, **GREEDY)
    for source, result in zip(sources, results, strict=True):
        before, after = Markup(source), Markup(result)
        assert after.is_nested and after.tags == before.tags
        found = [Counter(match[0] for match in CODE.finditer(html)) for html in (source, result)]
        assert found[0] == found[1]
    assert sum(source != result for source, result in zip(sources, results)) > 100


def test_markup_does_not_depend_on_other_texts(german):
    html = [pattern for _, pattern in patterns(SENTENCES, 20, 2, WORDS_OF["en-de"])]
    together = german.translate(html, markup="html", **GREEDY)
    assert together == [german.translate([text], markup="html", **GREEDY)[0] for text in html]


def test_sentences_go_on_over_tags(german):
    html = "<p>A <b>dog</b> runs.<b> A man\n is <i>standing. A woman</i> is</b> sitting.</p>"
    plain = "A dog runs. A man is standing. A woman is sitting."
    [result] = german.translate([html], markup="html", **GREEDY)
    assert result.startswith("<p>") and result.endswith("</p>")
    assert re.sub("<.*?>", "", result) == german.translate([plain], **GREEDY)[0]
    assert "Ein <b>Hund</b> " in result and re.search("<i>[^<]*steht. Eine Frau</i>", result)


def test_export_without_alignments_translates_between_tags_with_one_warning(portable):
    html = "<p>A dog &amp; <b>a man</b></p><p>12"
    parts = portable.translate(["A dog &", "a man"], **GREEDY)
    expected = "<p>{} <b>{}</b></p><p>12".format(*map(entities.escape, parts))
    portable.__dict__.pop("aligns_markup", None)
    with pytest.warns(UserWarning, match="no alignment graph") as record:
        for _ in range(2):
            assert portable.translate([html], markup="html", **GREEDY) == [expected]
    assert len(record) == 1
    with raises(ValueError, seen="no alignment graph", expected="--target cpu"):
        portable.translate(["A {name}."], keep=True)
    assert portable.translate(["A dog 🐶."]) == portable.translate(["A dog 🐶."], keep=False)


# ------------------------------------------------------------------------------------ placeholders

PLACEHOLDERS = ["{name}", "%s", "%1$d", "<0>", "https://a.b/c?d=1&e=2", "a.b@c.de", "${x}", "{{y}}"]
PLACEHOLDERS += [
    "HTTPS://A.B/c_(d)",
    "mailto:a@b.de",
    "%%",
    "%{z}",
    "{n, plural, one {#} other {two}}",
]


def with_placeholders(sentence, rng):
    """Return `sentence` with 1 to 3 placeholders between words or at marks, and these."""
    parts = sentence.split(" ")
    chosen = [rng.choice(PLACEHOLDERS) for _ in range(rng.randint(1, 3))]
    for placeholder in chosen:
        place = rng.randrange(len(parts) + 1)
        if rng.random() < 0.2 and place < len(parts):
            parts[place] = f"({placeholder}), {parts[place]}"
        else:
            parts.insert(place, placeholder)
    return " ".join(parts), chosen


@pytest.mark.parametrize("is_html", [False, True])
def test_all_placeholders_are_kept(german, is_html):
    rng = random.Random(3)
    cases = [with_placeholders(rng.choice(SENTENCES), rng) for _ in range(500)]
    texts = [text for text, _ in cases]
    if is_html:
        texts = [f"<p>{entities.escape(text)}</p>" for text in texts]
    options = dict(markup="html" if is_html else None, keep=True, **GREEDY)
    for result, (_, kept) in zip(german.translate(texts, **options), cases, strict=True):
        result = entities.unescape(result) if is_html else result
        for placeholder, count in Counter(kept).items():
            assert result.count(placeholder) == count


@pytest.mark.parametrize(
    ("keep", "text", "kept"),
    [
        (["Ada", "(c)"], "Ada and Adam are playing (c).", ["Ada", "(c)"]),
        (r"\b[A-Z]{2}\d+\b", "A dog with AB12 is sleeping.", ["AB12"]),
        (True, "{a} {a}\n%s\n\n A dog.", ["{a} {a}\n%s\n\n "]),
        (True, "%s", ["%s"]),
        (None, "A dog 🐶 is sleeping 👩‍👩‍👧.", ["🐶", "👩‍👩‍👧"]),
    ],
)
def test_keep_takes_strings_patterns_and_true(german, keep, text, kept):
    [result] = german.translate([text], keep=keep, **GREEDY)
    assert all(part in result for part in kept)
    marked = kept_line(text, keep_pattern(german, [text], keep))
    if "\n" not in text and marked.text:
        [plain] = german.translate([marked.text], keep=False, **GREEDY)
        for part in kept:
            result = result.replace(f" {part}", "").replace(part, "")
        assert result.strip() == plain


def test_generate_keeps_placeholders_of_each_result(german):
    texts = ["A dog {name} is sleeping.", "{x}", "A man is standing."]
    options = dict(num_beams=3, num_return_sequences=3)
    results = german.generate(texts, keep=True, **options)
    assert [result.count("{name}") for result in results[:3]] == [1, 1, 1]
    assert results[3:6] == ["{x}"] * 3
    assert results[6:] == german.generate(texts[2:], **options)
    plain = german.generate(["A dog is sleeping."], **options)
    assert [result.replace(" {name}", "") for result in results[:3]] == plain


def test_files_keep_placeholders(german, tmp_path):
    (tmp_path / "in").write_text("A dog {name} is sleeping.\n\n%s\n")
    for task in ("generate", "translate"):
        options = dict(keep=r"\{\w+\}|%s", **GREEDY)
        Runner(Predictions(german, task, options)).to_file(tmp_path / "in", tmp_path / task)
        lines = (tmp_path / task).read_text().split("\n")
        assert lines[0].count("{name}") == 1 and lines[1:] == ["", "%s", ""]


def test_command_line_keeps_placeholders(german, capsys):
    directory = str(german.info.directory)
    text = "A dog {name} is sleeping."
    for flags, keep in ((["--keep"], True), (["--keep", "{name}"], ["{name}"])):
        main(["generate", directory, text, "--num-beams", "1", *flags])
        assert capsys.readouterr().out.splitlines() == german.generate([text], keep=keep, **GREEDY)
    html = "A <b>dog</b> {name}."
    options = ["--task", "translate", "--set", "markup=html", "--num-beams", "1", "--keep"]
    main(["predict", directory, html, *options])
    expected = german.translate([html], markup="html", keep=True, **GREEDY)
    assert capsys.readouterr().out.splitlines() == expected
    with pytest.raises(SystemExit):
        main(["generate", directory, text, "--stream", "--keep"])
    assert "--keep cannot be combined with --stream" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "seen", "expected"),
    [
        (dict(markup="xml"), "xml", "html"),
        (dict(keep="("), "(", "regular expression"),
        (dict(keep=["", "a"]), "['', 'a']", "not empty"),
        (dict(keep=3), 3, "list of strings"),
        (dict(keep=True, return_alignments=True), ("keep", True), "only one"),
        (dict(markup="html", return_alignments=True), ("markup", "html"), "only one"),
    ],
)
def test_wrong_options_are_named(german, options, seen, expected):
    with raises(UsageError, seen=seen, expected=expected):
        german.translate(["A dog."], **options)


def test_wrong_options_of_files_are_named(german, portable):
    for others in (dict(scores=True), dict(n_best=2), dict(alignments="moses")):
        with raises(UsageError, seen=("keep", *others), expected="one"):
            Predictions(german, "generate", dict(keep=True), **others)
    with raises(UsageError, seen="(", expected="regular expression"):
        Predictions(german, "generate", dict(keep="("))
    with raises(ValueError, seen="no alignment graph", expected="--target cpu"):
        Predictions(portable, "translate", dict(keep=True))


@pytest.mark.parametrize(
    "html",
    [
        *("<p>A <b>dog", "A dog</b> runs", "<b><i>A dog</b></i> runs", "A <b class=x>dog</B> runs"),
        *(
            "A &lt;b&gt; dog &amp; <b>&nbsp;man</b>",
            "<SCRIPT>A dog</SCRIPT> A <textarea>dog</textarea>",
        ),
        *("<p>A dog<br>runs <i>over<br>a</i> field", "<pre>A dog</pre><style>a</style>"),
        *(
            "<bdo dir=rtl>\u05e9\u05dc\u05d5\u05dd</bdo> <b>dog</b>",
            "\u65e5\u672c<b>\u8a9e\u306e</b>\u6587",
        ),
        "".join(itertools.chain(["<b>"] * 50, ["A dog"], ["</b>"] * 50, [" runs."])),
        "A <b>dog</b> " * 60,
    ],
)
def test_any_html_keeps_its_tags(german, html):
    with pytest.warns(UserWarning, match="was cut"):
        german.translate(["A dog."], max_new_tokens=1, **GREEDY)
        [result] = german.translate([html], markup="html", max_new_tokens=8, **GREEDY)
    tags = re.compile("<.*?>|&nbsp;", re.DOTALL)
    assert Counter(tags.findall(result.replace("\xa0", "&nbsp;"))) >= Counter(
        tag for tag in tags.findall(html) if tag != "&nbsp;"
    )


def test_surrogates_are_rejected(german):
    for options in (dict(markup="html"), dict(keep=True), {}):
        with raises(ValueError, seen="surrogates", expected="Unicode"):
            german.translate(["A <b>dog \ud800</b>"], **options)


def test_marks_do_not_depend_on_a_text_without_marks_before(german):
    """The verb changes its place in German, so marks in the order of words would be wrong."""
    text = "In the <b>snow</b> a dog is <u>playing</u>."
    _, result = german.translate(["A dog.", text], markup="html", **GREEDY)
    assert "<u>spielt</u> ein Hund" in result


def test_longest_of_several_kept_texts_counts(german):
    text = "A dog in New York City is sleeping."
    for keep in (["New", "New York City", "York"], ["New York City", "New"]):
        [result] = german.translate([text], keep=keep, **GREEDY)
        assert "New York City" in result


def test_pattern_that_matches_nothing_keeps_only_what_it_matches(german):
    text = "A dog is sleeping."
    [plain] = german.translate([text], keep=False, **GREEDY)
    for keep in (r"\d*", r"x?"):
        assert german.translate([text], keep=keep, **GREEDY) == [plain]
    [result] = german.translate(["A dog 120765 is sleeping."], keep=r"\d*", **GREEDY)
    assert "120765" in result
