"""Text in, text out: what is no text, what is no tokenizer, and options under the names of
arguments."""

import json
import random
import shutil

import numpy as np
import pytest
from checkpoints import copy_folder, edit_json, list_file, seal
from messages import raises
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.text.tokenization_spaces import BPE_TOO


def tokenizer(pattern=None):
    made = Tokenizer(models.WordLevel({f"w{token}": token for token in range(48)}, unk_token="w0"))
    made.pre_tokenizer = (
        pre_tokenizers.Whitespace()
        if pattern is None
        else pre_tokenizers.Split(Regex(pattern), "isolated")
    )
    return made


@pytest.fixture(scope="module")
def directory(exported, tmp_path_factory):
    """An export with a tokenizer of the words w0 to w47."""
    result = copy_folder(exported("causal").directory, tmp_path_factory.mktemp("text"))
    tokenizer().save(str(result / "tokenizer.json"))
    list_file(result, "tokenizer.json")
    return result


@pytest.fixture(scope="module")
def runtime(directory):
    return TextRuntime(directory, threads=1)


@pytest.mark.parametrize(
    "template, expected",
    [
        ("$A", [5, 6]),
        ("w2 $A", [2, 5, 6]),  # OPT's
        ("$A w2", [5, 6]),  # ours, as it was saved before
        ("w1 $A w2", [5, 6]),
    ],
)
def test_a_decoder_s_prompt_is_what_transformers_reads_unless_the_end_token_would_be_behind_it(
    directory, tmp_path, template, expected
):
    changed = copy_folder(directory, tmp_path)
    made = tokenizer()
    made.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("w1", 1), ("w2", 2)]
    )
    made.save(str(changed / "tokenizer.json"))
    seal(changed)
    ids, mask = TextRuntime(changed, threads=1).tokenize(["w5 w6", "w5 w6 w2"])
    assert ids[0, : mask[0].sum()].tolist() == expected
    assert ids[1].tolist() == [*expected, 2]  # that is in the text stays


TOKENS = [
    "[UNK]",
    "i",
    "do",
    "don",
    "n",
    "n't",
    "'",
    "t",
    "s",
    "ve",
    "re",
    "m",
    ".",
    ",",
    "?",
    "!",
    "##s",
    "it",
    "know",
]
WHOLE = {token: id for id, token in enumerate(TOKENS)}
BACKENDS = {
    "word pieces": (
        models.WordPiece(WHOLE, unk_token="[UNK]"),
        decoders.WordPiece(cleanup=False),
        {},
    ),
    "cleaned word pieces": (models.WordPiece(WHOLE, unk_token="[UNK]"), decoders.WordPiece(), {}),
    "words": (models.WordLevel(WHOLE, "[UNK]"), None, {}),
    "BPE": (models.BPE(WHOLE, []), None, {}),
    "corrupted BPE": (models.BPE(WHOLE, []), None, {BPE_TOO: True}),
    "unigrams": (
        models.Unigram([("[UNK]", 0), *((token, -1) for token in TOKENS[1:])], 0),
        None,
        {},
    ),
}


@pytest.mark.parametrize("cleans", [True, False, None])
@pytest.mark.parametrize("name", BACKENDS)
def test_spaces_are_cleaned_up_as_by_transformers(directory, tmp_path, name, cleans):
    changed = copy_folder(directory, tmp_path)
    model, decoder, settings = BACKENDS[name]
    backend = Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **settings)
    theirs.save_pretrained(changed)
    edit_json(
        changed / "tokenizer_config.json",
        **({} if cleans is None else {"clean_up_tokenization_spaces": cleans}),
    )
    list_file(changed, "tokenizer_config.json")
    seal(changed)
    runtime = TextRuntime(changed, threads=1)
    rng = random.Random(0)
    rows = [rng.choices(range(1, len(TOKENS)), k=12) for _ in range(200)]
    again = AutoTokenizer.from_pretrained(changed)
    expected = again.batch_decode(rows, skip_special_tokens=True)
    assert runtime.decode(rows) == expected
    assert (expected != again.batch_decode(rows, clean_up_tokenization_spaces=False)) == (
        cleans is True and name != "BPE"
    )
    for row, text in zip(rows, expected, strict=True):
        assert "".join(runtime.decode_stream(np.array([token]) for token in row)) == text


@pytest.mark.parametrize(
    "texts, seen",
    [
        ("w5 w6", "w5 w6"),
        (["w5", None], (1, 2, None)),
        ([b"w5"], (0, 1, "w5")),
        ([["w5"]], (0, 1, "w5")),
        (5, 5),
        ({"w5": 1}, ("w5", 1)),
        ([], ()),
        (["w5", " "], (1, 2, " ")),
        (["w5", "w6 \ud83d"], (1, 2)),
    ],
    ids=ascii,
)
def test_what_is_no_list_of_texts_is_refused(runtime, texts, seen):
    with raises(ValueError, seen=seen) as caught:
        runtime.generate(texts)
    assert "\n" not in str(caught.value)


def test_a_model_without_languages_takes_none(runtime):
    for name in ("src_lang", "tgt_lang"):
        with raises(UsageError, seen=(name, "fra_Latn"), expected=None):
            runtime.generate(["a dog"], **{name: "fra_Latn"})


@pytest.mark.parametrize("text", [["w5"], None, 5])
def test_what_is_no_text_does_not_stream(runtime, text):
    with raises(ValueError, seen=(0, 1)):
        runtime.stream(text)


@pytest.mark.parametrize(
    "name", ["texts", "text", "self", "input_ids", "attention_mask", "options", "num_beam"]
)
def test_options_under_the_names_of_arguments_are_unknown_ones(runtime, name):
    for call, given in ((runtime.generate, ["w5"]), (runtime.stream, "w5")):
        with raises(UsageError, seen=name):
            call(given, **{name: 1})


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"model": 1}', b"\xff\xfe", b"null"])
def test_a_damaged_tokenizer_is_refused_by_name(directory, tmp_path, content):
    damaged = copy_folder(directory, tmp_path)
    (damaged / "tokenizer.json").write_bytes(content)
    seal(damaged)
    with raises(ValueError, seen="tokenizer.json"):
        TextRuntime(damaged, threads=1)


def test_an_expression_that_does_not_compile_is_refused_by_name(directory, tmp_path):
    damaged = copy_folder(directory, tmp_path)
    content = json.loads((damaged / "tokenizer.json").read_text())
    content["pre_tokenizer"] = json.loads(tokenizer("a").to_str())["pre_tokenizer"] | {
        "pattern": {"Regex": "("}
    }
    (damaged / "tokenizer.json").write_text(json.dumps(content))
    seal(damaged)
    with raises(ValueError, seen=("tokenizer.json", "unmatched parenthesis")):
        TextRuntime(damaged, threads=1)


def test_an_expression_past_the_engine_s_limit_is_an_error(directory, tmp_path):
    """There Rust panics, which Python sees as no `Exception`."""
    damaged = copy_folder(directory, tmp_path)
    tokenizer("(w+)+$").save(str(damaged / "tokenizer.json"))
    seal(damaged)
    runtime = TextRuntime(damaged, threads=1)
    for texts in (["w" * 40 + "!"], ["w5", "w" * 40 + "!"]):
        with raises(ValueError, seen=("tokenizer.json", "retry-limit")):
            runtime.generate(texts)


def test_an_interrupt_is_no_failure_of_the_tokenizer(runtime, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "tokenizer", type("Interrupted", (), {"encode": interrupted}))
    with pytest.raises(KeyboardInterrupt):
        runtime.generate(["w5"])


def test_a_tokenizer_the_manifest_does_not_list_is_refused(exported, directory, tmp_path):
    added = copy_folder(exported("causal").directory, tmp_path)
    with raises(FileNotFoundError, seen="tokenizer.json"):
        TextRuntime(added, threads=1)
    shutil.copy(directory / "tokenizer.json", added)
    with raises(ValueError, seen=("manifest.json", "tokenizer.json")):
        TextRuntime(added, threads=1)


def test_tokens_outside_the_vocabulary_are_an_error(directory, tmp_path):
    larger = copy_folder(directory, tmp_path)
    Tokenizer(models.WordLevel({"w0": 0, "far": 99}, unk_token="w0")).save(
        str(larger / "tokenizer.json")
    )
    seal(larger)
    with raises(ValueError, seen=("input_ids", 99), expected=(0, 47)):
        TextRuntime(larger, threads=1).generate(["far"])
