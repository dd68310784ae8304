"""Tests of `replace_unknowns`, with a seeded model whose target words are often unknown."""

import dataclasses
import json
import re

import numpy as np
import pytest
from checkpoints import EOS, PAD, START
from command_line import command, read_error
from messages import raises
from targets import build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vanilla_transformer_export import TextRuntime, export
from vanilla_transformer_export.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.*was cut after")

WORDS = [f"w{number:02}" for number in range(48)]
UNK = 7
TEXTS = ["w08 w09 w10 w11", "w12 Zug w13", "w20 w21 w22 w23 w24 w25", "Ünder Oslo w30"]
OPTIONS = dict(num_beams=1, max_new_tokens=8, no_repeat_ngram_size=2)


@pytest.fixture(scope="module", params=["special", "plain"])
def directory(request, tmp_path_factory):
    """An export whose unknown token is special, so that texts lack it, or a token as any other."""
    model, folder = build("seq2seq"), tmp_path_factory.mktemp(request.param)
    model.lm_head.bias.data[UNK] += 4.0
    model.config.alignment_heads = [[1, 0, "made"], [0, 2, "read"]]
    model.save_pretrained(folder / "checkpoint")
    vocabulary = {word: id for id, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=WORDS[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [WORDS[id] for id in (PAD, START, EOS)]
    tokenizer.add_special_tokens(special)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=WORDS[UNK],
        clean_up_tokenization_spaces=False,
        **names,
    )
    wrapped.save_pretrained(folder / "checkpoint")
    if request.param == "plain":
        make_plain(folder / "checkpoint" / "tokenizer.json")
    export(folder / "checkpoint", folder / "export", target="cpu", cases=2)
    return folder / "export"


def make_plain(path):
    content = json.loads(path.read_text())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] != WORDS[UNK]
    ]
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def runtime(directory):
    return TextRuntime(directory)


def replaced(runtime, text, **options):
    """Return the translations of `text` with fairseq's rule: an unknown word is the source word
    with the largest weight in its row. Each token is a word."""
    ids, mask = runtime.tokenize([text])
    rows = runtime.runtime.generate(ids, mask, **OPTIONS | options)
    results, number = [], 0
    for row in rows.tolist():
        end = row.index(EOS, 1) + 1 if EOS in row[1:] else len(row)
        [weights] = runtime.runtime.alignments(ids.tolist(), [row[:end]])
        words = []
        for token, of_token in zip(row[1:end], weights, strict=True):
            number += token == UNK
            if token == UNK:
                sources = text.split()
                words.append(sources[of_token[: len(sources)].argmax()])
            elif token not in (PAD, START, EOS):
                words.append(WORDS[token])
        results.append(" ".join(words))
    return results, number


@pytest.mark.parametrize(
    "options",
    [dict(), dict(num_beams=3, num_return_sequences=3), dict(do_sample=True, seed=3)],
)
def test_unknown_words_become_those_with_the_largest_weight(runtime, options):
    expected, numbers = zip(*[replaced(runtime, text, **options) for text in TEXTS])
    assert sum(numbers) > 4
    for text, texts in zip(TEXTS, expected):
        found = runtime.generate([text], replace_unknowns=True, **OPTIONS | options)
        assert found == texts
        scored, _ = runtime.generate_with_scores([text], replace_unknowns=True, **OPTIONS | options)
        assert scored == texts
    assert runtime.generate(TEXTS, **OPTIONS) != [first for first, *_ in expected]


@pytest.mark.parametrize("options", [dict(), dict(num_beams=3), dict(do_sample=True, seed=3)])
def test_only_sequences_with_the_unknown_token_are_aligned(runtime, options):
    """The prompt counts too: it is part of the translation."""
    texts = [f"{one} w{number}" for number, one in enumerate(TEXTS * 8, start=10)]
    count = 2 if options else 1
    settings = dict(max_new_tokens=3, num_return_sequences=count) | options
    ids, mask = runtime.tokenize(texts)
    starts = np.array([[START, UNK if row < 2 else 9] for row in range(len(texts))])
    rows = runtime.runtime.inputs(ids, mask, starts, settings)
    asked = [dataclasses.replace(row, unknown_token=UNK) for row in rows]
    together = not options.get("do_sample")  # samples finish one by one, beams together
    has_both = set()
    for row, sequences in zip(rows, runtime.runtime.sequences(asked), strict=True):
        has_unknown = [UNK in (*row.prompt, *sequence.tokens) for sequence in sequences]
        expected = [any(has_unknown)] * count if together else has_unknown
        assert [sequence.alignment is not None for sequence in sequences] == expected
        has_both |= {*expected}
    assert has_both == {True, False}


def test_translations_and_their_spans_are_of_the_replaced_text(runtime):
    expected = [replaced(runtime, text)[0][0] for text in TEXTS]
    assert runtime.translate(TEXTS, replace_unknowns=True, **OPTIONS) == expected
    found = runtime.translate(TEXTS, replace_unknowns=True, return_alignments=True, **OPTIONS)
    assert [translation.text for translation in found] == expected
    copied = 0
    for source, translation in zip(TEXTS, found):
        for one, other in translation.alignments:
            words = source[slice(*one)], translation.text[slice(*other)]
            assert words[0] in source.split() and words[1] in translation.text.split()
            copied += words[0] == words[1]
    assert copied > 0


def test_flag_of_generate_and_predict_and_files(runtime, directory, tmp_path):
    expected = [replaced(runtime, text)[0][0] for text in TEXTS]
    (tmp_path / "in").write_text("".join(f"{text}\n" for text in TEXTS))
    flags = ["--replace-unknowns", "--num-beams", "1", "--max-new-tokens", "8"]
    flags += ["--no-repeat-ngram-size", "2"]
    for verb in (["generate"], ["predict", "--task", "translate"]):
        result = command(*verb, directory, *flags, "--input", tmp_path / "in")
        assert result.stdout.splitlines() == expected, result.stderr
    assert command("generate", directory, *flags, *TEXTS).stdout.splitlines() == expected


def test_wrong_uses_are_errors(runtime, directory):
    with raises(UsageError, seen=("replace_unknowns", "yes"), expected="True or False"):
        runtime.translate(TEXTS, replace_unknowns="yes")
    message = read_error("generate", directory, "--replace-unknowns", "--stream", "w10")
    assert "--replace-unknowns cannot be combined with --stream" in message


def test_unknown_words_beside_markup_are_replaced_too(runtime):
    """The text without its tags is the translation of the text without tags."""
    plain = runtime.translate([TEXTS[1]], replace_unknowns=True, **OPTIONS)
    html = "<b>w12</b> Zug <i>w13</i>"
    [found] = runtime.translate([html], markup="html", replace_unknowns=True, **OPTIONS)
    assert found.count("<b>") == found.count("</b>") == found.count("<i>") == 1
    assert [re.sub("<.*?>", "", found)] == plain
    [kept] = runtime.translate(["w12 {x} w13"], keep=True, replace_unknowns=True, **OPTIONS)
    assert kept.count("{x}") == 1
