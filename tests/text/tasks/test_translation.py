"""Tests of translation: sentence splitting, token limits and languages."""

import dataclasses
import time
import warnings

import pytest
from checkpoints import EOS, copy_folder, list_file
from messages import raises
from sentence_splitting import ours, right_texts
from tokenizers import Tokenizer, models, pre_tokenizers

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.text.tasks.segments import join_parts, sentences_and_spaces


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("One. Two!  Three?", ["One.", "Two!", "Three?"]),
        ("Dr. Smith met J. R. Lee. He left.", ["Dr. Smith met J. R. Lee.", "He left."]),
        ("Am 3. Mai kam z. B. er. Dann ging er.", ["Am 3. Mai kam z. B. er.", "Dann ging er."]),
        ("It costs 3.50 today. and more... he said", ["It costs 3.50 today. and more... he said"]),
        ('"Is it?" He asked. (No.) Yes', ['"Is it?"', "He asked.", "(No.)", "Yes"]),
        ("a line\n\n  another line \r\nthe last", ["a line", "another line", "the last"]),
        ("你好。你好吗？“好！”他说", ["你好。", "你好吗？", "“好！”", "他说"]),
        ("नमस्ते। आप कैसे हैं?", ["नमस्ते।", "आप कैसे हैं?"]),
        ("1. The first. 2. The second.", ["1. The first.", "2. The second."]),
        (" . ", ["."]),
    ],
)
def test_text_is_split_into_sentences(text, sentences):
    parts = list(sentences_and_spaces(text))
    assert [part for part, is_sentence in parts if is_sentence] == sentences
    assert "".join(part for part, _ in parts) == text


@pytest.mark.parametrize(
    "language, minimum",
    [("en", 21), ("de", 15), ("fr", 9), ("es", 10), ("ru", 7), ("cs", 7), ("zh", 3)],
)
def test_abbreviations_do_not_end_sentences(language, minimum):
    """Count texts that are split as marked by hand. docs/run.md lists these numbers."""
    assert right_texts(ours)[language] >= minimum


@pytest.mark.parametrize("space", ["\u2003", "\u1680", "\u00a0", "\t"])
def test_unicode_whitespace_separates_sentences(space):
    text = f"An S.{space}A man.{space}It runs."
    parts = list(sentences_and_spaces(text))
    assert [part for part, is_sentence in parts if is_sentence] == [
        f"An S.{space}A man.",
        "It runs.",
    ]
    assert "".join(part for part, _ in parts) == text


@pytest.mark.parametrize("unit, count", [(".", 1), (". A", 1), (".)", 1), (" .", 1), ("。", 2)])
def test_sentence_splitting_time_is_not_quadratic(unit, count):
    start = time.process_time()
    result = list(sentences_and_spaces("a" + unit * 2**16 + "a"))
    assert sum(is_sentence for _, is_sentence in result) == count
    assert time.process_time() - start < 2  # a quadratic algorithm takes minutes


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_text_is_translated_by_sentence_and_keeps_line_breaks(translator):
    sentences = ["w5 w6 .", "w7 W9 .", "w20 w21 w22", "w30 ."]
    one, two, three, four = translator.generate(sentences, max_new_tokens=12)
    texts = [f"  {sentences[0]} W7 W9 .\n\n{sentences[2]}\t\n", sentences[3]]
    two = translator.generate(["W7 W9 ."], max_new_tokens=12)[0]
    assert translator.translate(texts, max_new_tokens=12) == [f"  {one} {two}\n\n{three}\t\n", four]
    unsplit = translator.generate(texts, max_new_tokens=12)
    assert translator.translate(texts, split=False, max_new_tokens=12) == unsplit


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_sentences_without_letters_are_copied(translator):
    options = {"max_new_tokens": 12}
    one, two = translator.generate(["w5 w6 .", "W7 W9 ."], **options)
    letterless = ["12345", "***", "12:30", "\N{DOG FACE}", "\u0967\u0968", "19.99 %"]
    for copied in letterless:
        text = f"w5 w6 . {copied}\n  {copied}\n\nW7 W9 ."
        assert translator.translate([text, copied], **options) == [
            f"{one} {copied}\n  {copied}\n\n{two}",
            copied,
        ]
        assert translator.translate([copied], split=False, **options) == [copied]
    assert translator.translate(letterless, **options) == letterless
    assert translator.translate(["w5 w6 .\n。W7 W9 ."], **options) == [f"{one}\n。{two}"]
    assert translator.translate(
        letterless, copy_letterless=False, split=False, **options
    ) == translator.generate(letterless, **options)
    both = translator.generate(["w5", "12345"], **options)
    assert translator.translate(["w5\n12345"], copy_letterless=False, **options) == [
        "\n".join(both)
    ]
    for script in ("é", "Ω", "ж", "犬", "か", "ع", "ह", "ก", "한"):
        assert translator.translate([script], **options) == translator.generate([script], **options)


def test_invalid_options_raise_even_if_text_is_copied(translator, monkeypatch):
    for options, seen, expected in (
        ({"tgt_lang": "de"}, ("tgt_lang", "de"), None),
        ({"src_lang": "de"}, ("src_lang", "de"), None),
        ({"num_beams": 2, "do_sample": True}, ("do_sample", True, "num_beams", 2), ()),
    ):
        with raises(UsageError, seen=seen, expected=expected):
            translator.translate(["12345"], **options)
    monkeypatch.setattr(
        translator, "languages", dataclasses.replace(translator.languages, words=[">>a<<"])
    )
    assert translator.translate([">>a<< 12345", ">>a<<"]) == ["12345", ""]
    assert translator.translate([">>a<<\n12345"], split=False) == ["12345"]
    with raises(ValueError, seen=">>b<<"):
        translator.translate([">>b<< 12345"])


def test_truncated_translation_warns(translator):
    text, options = "w3 w20\nw8 w20", {"no_repeat_ngram_size": 1}
    rows = translator.runtime.generate(
        *translator.tokenize(text.split("\n")), max_new_tokens=40, **options
    )
    # both have an end token, the second later; the start token is not new
    short, long = (row.index(EOS) for row in rows[:, 1:].tolist())
    assert 0 < short < long
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        translator.translate([text], max_new_tokens=long + 1, **options)
    for limit, count in ((long, 1), (short, 2)):
        with pytest.warns(UserWarning, match=f"'w. w20'.* {limit} ") as warned:
            translator.translate([text], max_new_tokens=limit, **options)
        assert len(warned) == count
    # a forced end token does not suppress the warning
    with pytest.warns(UserWarning, match="'w8 w20'.* 5 "):
        translator.translate(["w8 w20"], max_new_tokens=5, forced_eos_token_id=EOS, **options)


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_sentence_longer_than_position_table_raises(translator, monkeypatch):
    monkeypatch.setitem(translator.runtime.config, "position_embedding_type", "learned")
    monkeypatch.setitem(translator.runtime.config, "max_position_embeddings", 10)
    texts = ["w5", "w6 . " * 6]
    with raises(ValueError, seen=(1, 2, "w6", 12, "learned"), expected=10):
        translator.translate(texts, split=False)
    assert len(translator.translate(["w5", "W6. " * 12], max_new_tokens=2)) == 2


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_language_word_applies_to_all_sentences(translator, monkeypatch):
    words = dataclasses.replace(translator.languages, words=["w40", ">>a<<"])
    monkeypatch.setattr(translator, "languages", words)
    seen = []
    rows = translator.rows
    monkeypatch.setattr(
        translator, "rows", lambda texts, lang=None: seen.extend(texts) or rows(texts, lang)
    )
    translator.translate([">>a<< w5. W6.", "w7"], max_new_tokens=2)
    assert seen == [">>a<< w5.", ">>a<< W6.", "w7"]
    with raises(ValueError, seen=">>b<<"):
        translator.translate([">>b<< w5"])


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_languages_can_be_set_per_text(translator, monkeypatch):
    tokens = {"a": 10, "b": 11}
    languages = dataclasses.replace(
        translator.languages,
        tokens=tokens,
        source="a",
        before=[None],
        after=[],
        target="forced_bos_token_id",
    )
    monkeypatch.setattr(translator, "languages", languages)
    texts = ["w5. W6.", "w7", "w8. W9."]
    settings = {"src_lang": ["a", "b", "a"], "tgt_lang": ["b", "a", "a"], "max_new_tokens": 6}
    actual = translator.translate(texts, **settings)
    for text, result, src_lang, tgt_lang in zip(
        texts, actual, settings["src_lang"], settings["tgt_lang"], strict=True
    ):
        single = [
            translator.generate([part], None, src_lang, tgt_lang, max_new_tokens=6)[0]
            for part in text.split(" ")
        ]
        assert result == " ".join(single)
    with raises(UsageError, seen=("src_lang", 2)):
        translator.translate(texts, src_lang=["a", "b"], tgt_lang="a")


def test_unsupported_translate_options_raise(translator):
    with raises(UsageError, seen=("num_return_sequences", 2), expected=1):
        translator.translate(["w5"], num_return_sequences=2)
    with raises(UsageError, seen="target_prefix"):
        translator.translate(["w5"], target_prefix=["w6"])
    with raises(UsageError, seen=("split", "no"), expected=(True, False)):
        translator.translate(["w5"], split="no")
    with raises(UsageError, seen=("copy_letterless", "no"), expected=(True, False)):
        translator.translate(["w5"], copy_letterless="no")


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_sentence_has_at_most_as_many_tokens_as_the_position_table(translator, monkeypatch):
    monkeypatch.setitem(translator.runtime.config, "position_embedding_type", "learned")
    monkeypatch.setitem(translator.runtime.config, "max_position_embeddings", 10)
    [text] = translator.translate(["w5"], suppress_tokens=[EOS])
    assert len(text.split()) == 10


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_each_sentence_of_a_text_is_sampled_with_a_seed_of_its_own(translator):
    text = "w5 w6\nw5 w6\nw5 w6"
    sampling = {"do_sample": True, "max_new_tokens": 12}
    one, other = translator.translate([text, text], seeds=[3, 4], **sampling)
    assert len({*one.split("\n"), *other.split("\n")}) == 6
    assert translator.translate([text, text], seeds=[3, 3], **sampling) == [one, one]


@pytest.mark.parametrize("language, count", [("de", 2), ("de-AT", 2), ("en", 3), ("de_AT", 3)])
def test_region_of_a_language_does_not_change_its_abbreviations(language, count):
    parts = sentences_and_spaces("Das sind 3 Mio. Euro. Danach ging er.", language)
    assert sum(is_sentence for _, is_sentence in parts) == count


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_prefixes_are_read_by_the_tokenizer_of_translations(translator, tmp_path):
    directory = copy_folder(translator.info.directory, tmp_path)
    words = Tokenizer(models.WordLevel({f"v{token}": token for token in range(48)}, unk_token="v0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(directory / "target_tokenizer.json"))
    list_file(directory, "target_tokenizer.json")
    runtime = TextRuntime(directory, threads=1)
    [text] = runtime.generate(["w5"], target_prefix=["v7 v8"], max_new_tokens=4)
    assert text.startswith("w7 w8")


@pytest.mark.parametrize(
    "sentences, text",
    [
        (["A.", "", "B."], "A. B."),
        (["A.", "", ""], "A."),
        (["", "B."], "B."),
        (["A.", " ", "B."], "A. B."),
        (["你。", "", "我。"], "你。我。"),
    ],
)
def test_one_space_separates_sentences_around_an_empty_one(sentences, text):
    assert join_parts([(part, part != " ") for part in sentences]) == text
