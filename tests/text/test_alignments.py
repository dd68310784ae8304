"""Tests of words, their weights and their links, and of the spans of tokens."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from vanilla_transformer_export.text.alignments import (
    Alignment,
    align_words,
    mutual_best,
    shares,
    target_spans,
    with_source_words,
    words,
)
from vanilla_transformer_export.text.detokenizer import Detokenizer
from vanilla_transformer_export.text.tasks.alignment import Translation, moses_pairs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A man's dog-house, 2nd.", ["A", "man", "'", "s", "dog", "-", "house", ",", "2nd", "."]),
        ("  two\n\nlines ", ["two", "lines"]),
        ("हिन्दी में", ["हिन्दी", "में"]),  # with marks that are no letters
        ("cafe\u0301 😀!", ["cafe\u0301", "😀", "!"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),
        ("snake_case", ["snake_case"]),
        ("", []),
        (" ", []),
    ],
)
def test_words_are_runs_of_letters_or_single_marks(text, expected):
    assert [text[start:end] for start, end in words(text, [])] == expected


def test_scripts_without_spaces_are_cut_at_tokens():
    text = "私は猫です dogs"
    tokens = [(0, 1), (1, 2), (2, 3), (3, 5), (5, 8), (8, 10)]
    assert [text[start:end] for start, end in words(text, tokens)] == [
        "私", "は", "猫", "です", "dogs",
    ]  # fmt: skip


def test_tokens_across_words_are_shared_and_others_belong_to_none():
    spans = [(0, 3), (4, 7), (7, 8)]
    tokens = [(0, 0), (0, 2), (2, 3), (3, 8), (8, 8)]
    expected = [[0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0.5, 0.5], [0, 0, 0]]
    np.testing.assert_array_equal(shares(tokens, spans), np.array(expected, np.float32))


def test_weights_sum_over_source_tokens_and_averages_over_target_tokens():
    """Compare with the formula in float64, for words of two tokens each."""
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(4), 4).astype(np.float32)
    tokens = [(0, 1), (1, 2), (3, 4), (4, 5)]
    found = align_words(("ab cd", "ef gh"), (tokens, tokens), weights)
    expected = weights.astype(np.float64).reshape(2, 2, 2, 2).sum(3).mean(1)
    np.testing.assert_allclose(found.weights, expected, rtol=1e-5)


def test_links_are_the_best_of_each_other():
    weights = np.array([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.1, 0.2, 0.7]])
    assert mutual_best(weights) == [(0, 0), (2, 2)]
    aligned = Alignment("", [(0, 1), (2, 3), (4, 5)], [(0, 2), (3, 5), (6, 8)], weights)
    assert aligned.alignments == [((0, 1), (0, 2)), ((4, 5), (6, 8))]


@pytest.mark.parametrize(("source", "target"), [("", "a"), ("a", ""), ("", "")])
def test_texts_without_words_have_no_links(source, target):
    tokens = [(0, len(source)), (0, 0)], [(0, len(target))]
    assert align_words((source, target), tokens, np.full((1, 2), 0.5, np.float32)).links == []


def test_moses_pairs_number_words_between_white_space():
    target = "Ein  Hund , rennt."
    pairs = [((0, 1), (0, 3)), ((2, 5), (5, 9)), ((5, 6), (10, 11)), ((7, 11), (12, 17))]
    assert moses_pairs("A dog, runs", Translation(target, pairs)) == "0-0 1-1 1-2 2-3"
    assert moses_pairs("", Translation("", [])) == ""


def test_words_with_unknown_tokens_become_source_words():
    """A part of a name, a word of two unknown tokens, and one between spaces."""
    source = "Dražen eats 龍龍 and 😀."
    target = "Dra<unk>en isst <unk><unk> und <unk>."
    source_tokens = [(0, 3), (3, 4), (4, 6), (7, 11), (12, 14), (15, 18), (19, 20), (20, 21)]
    target_tokens = [
        (0, 3), (3, 8), (8, 10), (10, 15), (15, 21), (21, 26), (26, 30), (30, 36), (36, 37),
    ]  # fmt: skip
    rows = [0, 1, 2, 3, 4, 4, 5, 6, 7]  # the source token of each target token
    weights = np.eye(8, dtype=np.float32)[rows]
    text, spans = with_source_words(
        (source, target), (source_tokens, target_tokens), weights, [1, 4, 5, 7]
    )
    assert text == "Dražen isst 龍龍 und 😀."
    pieces = [text[start:end] for start, end in spans]
    assert pieces[:4] == ["Dražen"] * 3 + [" isst"]
    assert pieces[4].strip() == pieces[5] == "龍龍"
    assert (pieces[6], pieces[7].strip(), pieces[8]) == (" und", "😀", ".")


def test_unknown_word_of_a_source_without_words_is_left_out():
    tokens = [(0, 0)], [(0, 5)]
    text, _ = with_source_words((" ", "<unk>"), tokens, np.ones((1, 1), np.float32), [0])
    assert text == ""


def test_tokens_of_a_character_have_its_span():
    """A euro sign of three byte tokens, and special tokens, which are no text."""
    vocabulary = {"<s>": 0, "▁a": 1, "b": 2} | {
        f"<0x{byte:02X}>": 3 + number for number, byte in enumerate("€".encode())
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    text, spans = target_spans([0, 1, 3, 4, 5, 2, 0], Detokenizer(tokenizer, {0}, None), {0})
    assert text == tokenizer.decode([1, 3, 4, 5, 2])
    found = [text[start:end] for start, end in spans]
    assert found[0] == found[-1] == "" and found[1] in text[:2] and found[5].endswith("b")
    assert all("€" in piece for piece in found[2:5])
