"""Tests of what recipes say about text: checks before it is read, and held-out text."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import standins
from messages import check_message, raises

from vanilla_transformer.errors import UsageError
from vanilla_transformer.training import prepare as preparation
from vanilla_transformer.training.origins import logger
from vanilla_transformer.training.prepare import check_complete, prepare
from vanilla_transformer.training.recipe import Recipe, read_recipe
from vanilla_transformer.training.tasks import sequence_classification

SMALL = dict(
    hidden_size=16, intermediate_size=16, num_attention_heads=2, encoder_layers=1, decoder_layers=1
)
FOLDS = {"train": "train.txt", "folds": 5, "fold": 0}


# ------------------------------------------------------------------------------ before text is read


@pytest.mark.parametrize(
    "recipe, seen, expected",
    [
        (Recipe("translation"), (), ()),
        (Recipe("causal-lm", {"train": "a"}, {"kind": "character"}), "data.block_size", ()),
        (Recipe("masked-lm", {"train": "a"}), "tokenizer.vocab_size", ()),
        (
            Recipe(
                "masked-lm", {"train": "a"}, {"vocab_size": 9}, training={"eval_strategy": "epoch"}
            ),
            "data.validation",
            ("training.eval_strategy", "epoch", "no"),
        ),
        (
            Recipe(
                "sequence-classification",
                {"train": "a"},
                {"vocab_size": 9},
                training={"word_replacement": 0.1},
            ),
            ("training.word_replacement", 0.1),
            "training.teachers",
        ),
    ],
)
def test_missing_settings_raise_before_text_is_read(recipe, seen, expected):
    with raises(UsageError, seen=seen, expected=expected):
        prepare(recipe)


def test_few_examples_and_label_that_occurs_once_are_logged(tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr(preparation.logger, "warning", notes.append)
    monkeypatch.setattr(sequence_classification.logger, "warning_once", notes.append)
    (tmp_path / "text").write_text("A a dog\nA a cat\nB a bird\n")
    data, size = {"train": str(tmp_path / "text")}, {"vocab_size": 60}
    model = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    prepare(Recipe("sequence-classification", data, size, model))
    assert any("data.train" in note and "['B']" in note for note in notes)
    assert "data.train" in notes[-1] and "(3)" in notes[-1] and "model.path" in notes[-1]


@pytest.mark.parametrize(
    "key, path",
    [
        ("model.path", "nowhere"),
        ("model.path", "a/b/c"),
        ("training.teachers", "nowhere"),
        ("tokenizer.path", "./x"),
    ],
)
def test_missing_checkpoint_raises_one_line_error(tmp_path, monkeypatch, key, path):
    monkeypatch.chdir(tmp_path)
    Path("a").touch()
    Path("b").touch()
    table, name = key.split(".")
    changes = {
        "data.train": "a",
        "tokenizer": {"vocab_size": 9},
        "data.validation": "b",
        "training": {},
    }
    recipe = read_recipe("sst2", {**changes, key: [path] if name == "teachers" else path})
    with pytest.raises(FileNotFoundError) as caught:
        prepare(recipe)
    message = str(caught.value)
    assert (
        message.startswith(f"{key}: {path} ")
        and "checkpoint directory" in message
        and "Hub" in message
        and "\n" not in message
    )


def classification(data=None, **tables):
    tables = {"tokenizer": {"kind": "word", "vocab_size": 15}, **tables}
    return Recipe("sequence-classification", data or {"train": "train.txt"}, **tables)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Return a directory with text, a masked language model, a classifier and an empty folder."""
    monkeypatch.chdir(tmp_path)
    standins.write_text(read_recipe("trec", {"data": {"train": "train.txt"}}), tmp_path)
    standins.checkpoint(tmp_path / "words")
    standins.classifier(tmp_path / "classifier")
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_unsuitable_checkpoints_raise(work):
    check_complete(classification(model={"path": "words"}))
    with raises(ValueError, seen="VanillaEncoderForMaskedLM"):
        check_complete(classification(training={"teachers": ["words"]}))
    with raises(FileNotFoundError, seen=("model.path", "empty", "config.json")):
        check_complete(classification(model={"path": "empty"}))
    with raises(ValueError, expected="vanilla-seq2seq"):
        check_complete(Recipe("translation", {"train": ["a", "b"]}, model={"path": "words"}))
    with raises(UsageError, seen=("hidden_size", 0), expected=1):
        check_complete(classification(model={"path": "words", "hidden_size": 0}))
    with raises(ValueError, seen=("model.path", "words")):
        prepare(classification(model={"path": "words", "hidden_size": 32}))


def test_generation_tokens_outside_vocabulary_raise(tmp_path):
    standins.write_text(read_recipe("translation", {"data.train": ["a", "b"]}), tmp_path)
    data = {"directory": str(tmp_path), "train": ["a", "b"]}
    recipe = Recipe(
        "translation", data, {"vocab_size": 60}, SMALL, generation={"bad_words_ids": [[3, 60]]}
    )
    with raises(UsageError, seen=("generation.bad_words_ids", 60), expected=(0, 59)):
        prepare(recipe)


# ------------------------------------------------------------------------------------ held-out text


def write_record(path, **data):
    (path / "training.json").write_text(
        json.dumps({"recipe": {"data": {"train": "train.txt", **data}}})
    )


@pytest.mark.parametrize("data", [{"folds": 5, "fold": 1}, {"folds": 4, "fold": 0}, {}], ids=str)
@pytest.mark.parametrize("key", ["teachers", "path"])
def test_checkpoint_trained_on_held_out_fold_raises(work, data, key):
    write_record(work / "classifier", **data)
    tables = (
        {"training": {"teachers": ["classifier"]}}
        if key == "teachers"
        else {"model": {"path": "classifier"}}
    )
    checkpoint_fold = f"fold {data['fold']} of {data['folds']}" if data else "no fold"
    with raises(ValueError, seen=checkpoint_fold, expected=("data.fold", 0, "data.folds", 5)):
        prepare(classification(FOLDS, **tables))
    prepare(classification(**tables))  # this recipe holds out no fold


def test_teacher_of_same_fold_or_different_text_is_accepted(work):
    recipe = classification(FOLDS, training={"teachers": ["classifier"]})
    write_record(work / "classifier", folds=5, fold=0)
    check_complete(recipe)
    write_record(work / "classifier", folds=5, fold=1, train=["other.txt"])
    check_complete(recipe)
    shutil.copy("train.txt", "other.txt")  # the same text under another name
    with raises(ValueError, seen=("fold", 1, 5)):
        check_complete(recipe)
    Path("other.txt").write_bytes(
        b"\xef\xbb\xbf" + Path("train.txt").read_bytes().replace(b"\n", b"\r\n")
    )
    with raises(ValueError, seen=("fold", 1, 5)):
        check_complete(recipe)
    Path("packed.gz").write_bytes(gzip.compress(Path("train.txt").read_bytes()))
    write_record(work / "classifier", folds=5, fold=1, train=["packed.gz"])
    with raises(ValueError, seen=("fold", 1, 5)):
        check_complete(recipe)
    Path("packed.gz").write_bytes(gzip.compress(Path("train.txt").read_bytes() + b"more\n"))
    check_complete(recipe)
    # a text with the same name that does not exist any more
    write_record(work / "classifier", folds=5, fold=1, directory="gone")
    with raises(ValueError, seen=("fold", 1, 5)):
        check_complete(recipe)
    for damaged in ("[]", "{", "[" * 100_000, '{"recipe": {"data": {"train": 5}}}'):
        (work / "classifier" / "training.json").write_text(damaged)
        with raises(ValueError, seen="training.json"):
            check_complete(recipe)


def test_teacher_without_training_record_warns(work, monkeypatch):
    warnings = []
    monkeypatch.setattr(logger, "warning", warnings.append)
    check_complete(classification(FOLDS, training={"teachers": ["classifier"]}))
    [warning] = warnings
    check_message(warning, seen=("classifier", "training.json"))
    write_record(work / "classifier", folds=5, fold=0)
    check_complete(classification(FOLDS, training={"teachers": ["classifier"]}))
    assert len(warnings) == 1
