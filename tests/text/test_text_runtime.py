"""Tests of TextRuntime: prompts, clean-up of spaces, invalid texts, tokenizers and options."""

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
from vanilla_transformer_export.text.detokenizer import BPE_TOO


def make_tokenizer(pattern=None):
    tokenizer = Tokenizer(
        models.WordLevel({f"w{token}": token for token in range(48)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Whitespace()
        if pattern is None
        else pre_tokenizers.Split(Regex(pattern), "isolated")
    )
    return tokenizer


@pytest.fixture(scope="module")
def directory(exported, tmp_path_factory):
    """Return an export with a tokenizer of the words w0 to w47."""
    result = copy_folder(exported("causal").directory, tmp_path_factory.mktemp("text"))
    make_tokenizer().save(str(result / "tokenizer.json"))
    list_file(result, "tokenizer.json")
    return result


@pytest.fixture(scope="module")
def runtime(directory):
    return TextRuntime(directory, threads=1)


@pytest.mark.parametrize(
    "template, expected",
    [
        ("$A", [5, 6]),
        ("w2 $A", [2, 5, 6]),  # as in OPT
        ("$A w2", [5, 6]),  # as in our older checkpoints
        ("w1 $A w2", [5, 6]),
    ],
)
def test_decoder_prompt_drops_special_tokens_if_template_appends_end_token(
    directory, tmp_path, template, expected
):
    changed = copy_folder(directory, tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("w1", 1), ("w2", 2)]
    )
    tokenizer.save(str(changed / "tokenizer.json"))
    seal(changed)
    ids, mask = TextRuntime(changed, threads=1).tokenize(["w5 w6", "w5 w6 w2"])
    assert ids[0, : mask[0].sum()].tolist() == expected
    assert ids[1].tolist() == [*expected, 2]  # an end token in the text stays


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
VOCABULARY = {token: id for id, token in enumerate(TOKENS)}
BACKENDS = {
    "word pieces": (
        models.WordPiece(VOCABULARY, unk_token="[UNK]"),
        decoders.WordPiece(cleanup=False),
        {},
    ),
    "cleaned word pieces": (
        models.WordPiece(VOCABULARY, unk_token="[UNK]"),
        decoders.WordPiece(),
        {},
    ),
    "words": (models.WordLevel(VOCABULARY, "[UNK]"), None, {}),
    "BPE": (models.BPE(VOCABULARY, []), None, {}),
    "corrupted BPE": (models.BPE(VOCABULARY, []), None, {BPE_TOO: True}),
    "unigrams": (
        models.Unigram([("[UNK]", 0), *((token, -1) for token in TOKENS[1:])], 0),
        None,
        {},
    ),
}


@pytest.mark.parametrize("cleans", [True, False, None])
@pytest.mark.parametrize("name", BACKENDS)
def test_space_clean_up_matches_transformers(directory, tmp_path, name, cleans):
    changed = copy_folder(directory, tmp_path)
    model, decoder, settings = BACKENDS[name]
    backend = Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    reference = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **settings)
    reference.save_pretrained(changed)
    edit_json(
        changed / "tokenizer_config.json",
        **({} if cleans is None else {"clean_up_tokenization_spaces": cleans}),
    )
    list_file(changed, "tokenizer_config.json")
    seal(changed)
    runtime = TextRuntime(changed, threads=1)
    rng = random.Random(0)
    rows = [rng.choices(range(1, len(TOKENS)), k=12) for _ in range(200)]
    reloaded = AutoTokenizer.from_pretrained(changed)
    expected = reloaded.batch_decode(rows, skip_special_tokens=True)
    assert runtime.decode(rows) == expected
    assert (expected != reloaded.batch_decode(rows, clean_up_tokenization_spaces=False)) == (
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
def test_invalid_texts_raise(runtime, texts, seen):
    with raises(ValueError, seen=seen) as caught:
        runtime.generate(texts)
    assert "\n" not in str(caught.value)


def test_language_for_model_without_languages_raises(runtime):
    for name in ("src_lang", "tgt_lang"):
        with raises(UsageError, seen=(name, "fra_Latn"), expected=None):
            runtime.generate(["a dog"], **{name: "fra_Latn"})


@pytest.mark.parametrize("text", [["w5"], None, 5])
def test_stream_of_invalid_text_raises(runtime, text):
    with raises(ValueError, seen=(0, 1)):
        runtime.stream(text)


def test_num_return_sequences_of_none_is_one_result_per_text(runtime, directory, tmp_path):
    """`None` means the default of the option, not the setting of the export."""
    changed = copy_folder(directory, tmp_path)
    edit_json(changed / "generation_config.json", num_return_sequences=2, num_beams=2)
    seal(changed)
    texts, options = ["w5 w6", "w7 w8"], dict(max_new_tokens=4, num_beams=2)
    expected = runtime.generate(texts, **options)
    several = TextRuntime(changed, threads=1)
    assert several.generate(texts, **options)[::2] == expected
    assert several.generate(texts, num_return_sequences=None, **options) == expected
    outputs, scores = several.generate_with_scores(texts, num_return_sequences=None, **options)
    assert outputs == expected and scores.shape == (2,)


@pytest.mark.parametrize(
    "name", ["texts", "text", "self", "input_ids", "attention_mask", "options", "num_beam"]
)
def test_argument_names_and_unknown_options_raise(runtime, name):
    for call, prompt in ((runtime.generate, ["w5"]), (runtime.stream, "w5")):
        with raises(UsageError, seen=name):
            call(prompt, **{name: 1})


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"model": 1}', b"\xff\xfe", b"null"])
def test_damaged_tokenizer_raises_and_names_file(directory, tmp_path, content):
    damaged = copy_folder(directory, tmp_path)
    (damaged / "tokenizer.json").write_bytes(content)
    seal(damaged)
    with raises(ValueError, seen="tokenizer.json"):
        TextRuntime(damaged, threads=1)


def test_invalid_regex_in_tokenizer_raises_and_names_file(directory, tmp_path):
    damaged = copy_folder(directory, tmp_path)
    content = json.loads((damaged / "tokenizer.json").read_text())
    content["pre_tokenizer"] = json.loads(make_tokenizer("a").to_str())["pre_tokenizer"] | {
        "pattern": {"Regex": "("}
    }
    (damaged / "tokenizer.json").write_text(json.dumps(content))
    seal(damaged)
    with raises(ValueError, seen=("tokenizer.json", "unmatched parenthesis")):
        TextRuntime(damaged, threads=1)


def test_regex_beyond_retry_limit_raises(directory, tmp_path):
    """Convert the panic of Rust, which is not an `Exception` in Python."""
    damaged = copy_folder(directory, tmp_path)
    make_tokenizer("(w+)+$").save(str(damaged / "tokenizer.json"))
    seal(damaged)
    runtime = TextRuntime(damaged, threads=1)
    for texts in (["w" * 40 + "!"], ["w5", "w" * 40 + "!"]):
        with raises(ValueError, seen=("tokenizer.json", "retry-limit")):
            runtime.generate(texts)


def test_keyboard_interrupt_while_encoding_is_raised(runtime, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "tokenizer", type("Interrupted", (), {"encode": interrupted}))
    with pytest.raises(KeyboardInterrupt):
        runtime.generate(["w5"])


def test_tokenizer_missing_or_not_in_manifest_raises(exported, directory, tmp_path):
    added = copy_folder(exported("causal").directory, tmp_path)
    with raises(FileNotFoundError, seen="tokenizer.json"):
        TextRuntime(added, threads=1)
    shutil.copy(directory / "tokenizer.json", added)
    with raises(ValueError, seen=("manifest.json", "tokenizer.json")):
        TextRuntime(added, threads=1)


def test_tokens_outside_vocabulary_raise(directory, tmp_path):
    larger = copy_folder(directory, tmp_path)
    Tokenizer(models.WordLevel({"w0": 0, "far": 99}, unk_token="w0")).save(
        str(larger / "tokenizer.json")
    )
    seal(larger)
    with raises(ValueError, seen=("input_ids", 99), expected=(0, 47)):
        TextRuntime(larger, threads=1).generate(["far"])
