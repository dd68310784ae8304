"""Tokenizers without vocabulary files, which transformers loads with an empty vocabulary."""

import json

import pytest
from command_line import read_error
from families import random_config, random_model
from messages import raises

from vanilla_transformer.checkpoint import load_tokenizer

FILES = {
    "BertTokenizer": ["vocab.txt"],
    "DistilBertTokenizer": ["vocab.txt"],
    "RobertaTokenizerFast": ["merges.txt", "vocab.json"],
    "GPT2Tokenizer": ["merges.txt", "vocab.json"],
    "T5Tokenizer": ["spiece.model"],
    "XLMRobertaTokenizer": ["sentencepiece.bpe.model"],
    "NllbTokenizer": ["sentencepiece.bpe.model"],
    "MarianTokenizer": ["source.spm", "target.spm", "vocab.json"],
    "M2M100Tokenizer": ["sentencepiece.bpe.model", "vocab.json"],
}


@pytest.mark.parametrize("name, files", FILES.items())
def test_error_names_missing_vocabulary_files(name, files, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    with raises(FileNotFoundError, seen=(tmp_path, name.removesuffix("Fast"))) as caught:
        load_tokenizer(tmp_path)
    assert all(
        file in str(caught.value)
        for file in (*files, "tokenizer.json", "remove tokenizer_config.json")
    )


@pytest.mark.parametrize(
    "family, architecture",
    [("bert", "BertModel"), ("gpt2", "GPT2LMHeadModel"), ("bart", "BartModel")],
)
def test_missing_vocabulary_is_rejected_without_tokenizer_class(family, architecture, tmp_path):
    source = tmp_path / "source"
    random_model(architecture, random_config(family, architecture, 0)).save_pretrained(source)
    (source / "tokenizer_config.json").write_text("{}")
    for verb in ("convert", "export"):
        message = read_error(verb, source, tmp_path / "out")
        assert (
            f"{source} has " in message
            and "Tokenizer without " in message
            and not (tmp_path / "out").exists()
        )


def test_missing_merges_are_rejected(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer"})
    )
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    with raises(FileNotFoundError, seen="merges.txt", expected=("merges.txt", "tokenizer.json")):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    assert load_tokenizer(tmp_path)("ab")["input_ids"] == [2]


def test_error_names_empty_vocabulary(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer"})
    )
    (tmp_path / "vocab.txt").write_text("")
    with raises(ValueError, seen=tmp_path / "vocab.txt", expected="BertTokenizer"):
        load_tokenizer(tmp_path)


def test_byte_tokenizer_needs_no_vocabulary_file(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "ByT5Tokenizer"})
    )
    assert load_tokenizer(tmp_path)("a")["input_ids"] == [ord("a") + 3, 1]
