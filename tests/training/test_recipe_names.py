"""Tests of names in recipes: suggestions for unknown names, and tasks by their names."""

import ast
import json
import warnings
from pathlib import Path

import pytest
import standins
from messages import raises

from vanilla_transformer.errors import UsageError
from vanilla_transformer.training import names
from vanilla_transformer.training.recipe import FOLDER, Recipe, read_recipe
from vanilla_transformer.training.run import train
from vanilla_transformer.training.tasks import TASKS
from vanilla_transformer.training.values import TRAINING

CARDS = Path(__file__).parents[2] / "model_cards"


def test_shipped_recipes_are_read_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len([read_recipe(path.stem) for path in FOLDER.glob("*.toml")]) == 19


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.parent.name) for path in sorted(CARDS.glob("*/training.json"))],
)
def test_records_of_shipped_models_are_valid_recipes(path):
    tables = json.loads(path.read_text())["recipe"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe = Recipe(**tables)
    assert (recipe.tokenizer, recipe.training) == (tables["tokenizer"], tables["training"])


@pytest.mark.parametrize(
    "table, name, seen, expected",
    [
        ("training", "replaced", (), "accelerator_config"),
        ("training", "spans", (), "accelerator_config"),
        ("tokenizer", "dropout", ("bpe_dropout",), ()),
    ],
)
def test_unknown_key_raises_and_lists_known_keys(table, name, seen, expected):
    with raises(UsageError, seen=(table, name, *seen), expected=expected):
        read_recipe("translation", {f"{table}.{name}": 0.5})


# ------------------------------------------------------------------------------------- suggestions


@pytest.mark.parametrize(
    "changes, seen, expected",
    [
        ({"training.word_replacment": 1}, ("word_replacment", "word_replacement"), ()),
        ({"training.replace": 1}, "replace", ()),
        ({"tokenizer.bpe-dropout": 0.1}, ("bpe-dropout", "bpe_dropout"), ()),
        ({"learning_rate": 1}, ("learning_rate", "training.learning_rate"), ()),
        ({"training.vocab_size": 9}, ("vocab_size", "tokenizer.vocab_size"), ()),
        ({"generation.preset": "a"}, ("preset", "model.preset"), ()),
        ({"evaluation.xyz": 1}, "xyz", "bleu_tokenize"),
    ],
)
def test_unknown_key_raises_and_suggests_nearest(changes, seen, expected):
    with raises(UsageError, seen=seen, expected=expected):
        read_recipe("translation", changes)


def test_unknown_recipe_raises_and_suggests_nearest():
    with raises(
        FileNotFoundError, seen="multi30k-en-dee", expected=("conll2003", "multi30k-en-de")
    ):
        read_recipe("multi30k-en-dee")


def test_recipe_docstring_documents_our_keys():
    for name in [*TRAINING, "bpe_dropout"]:
        assert f"`{name}`" in Recipe.__doc__


# -------------------------------------------------------------------------------------------- tasks


@pytest.mark.parametrize("name", TASKS)
def test_task_reads_text_or_images_and_declares_needed_keys(name):
    task = TASKS[name]
    assert (task.processor is None) == (task.encode is not None)
    common_keys = {"skip_bad_rows"} if task.encode else set()
    assert {*common_keys, *task.needs} <= task.data.keys()


NEW_TASK = '''
"""Which of two labels a text has: its first word."""

from dataclasses import replace

from datasets import Dataset

from vanilla_transformer.training.data import read_all_lines, split_files
from vanilla_transformer.training.tasks import sequence_classification
from vanilla_transformer.training.values import COUNTED


def read(data, split):
    if split not in data:
        return None
    rows = [line.split(" ", 1) for line in read_all_lines(split_files(data, split))]
    shown = [" ".join(text.split()[: data["words"]]) for _, text in rows]
    return Dataset.from_dict({"label": [label for label, _ in rows], "text": shown})


SHARED = sequence_classification.TASK
DATA = SHARED.data | {"words": COUNTED}
TASK = replace(SHARED, read=read, data=DATA, needs=("words",), bpe_dropout=False)
'''


def test_new_task_needs_one_file_and_one_registry_entry(tmp_path, monkeypatch):
    """Define a task with a new key and abilities, and use it from recipe to model card."""
    (tmp_path / "first_words.py").write_text(NEW_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TASKS, "first-words", __import__("first_words").TASK)
    (tmp_path / "text").write_text("".join(line + "\n" for line in standins.OPINIONS))
    data = {"train": str(tmp_path / "text"), "validation": str(tmp_path / "text"), "words": 2}
    # four special tokens, the mask, "the" and two nouns
    tokenizer = {"kind": "word", "vocab_size": 8}
    model = standins.SHAPE | {"num_hidden_layers": 1}
    training = {"tokens_per_update": 64, "max_steps": 2}
    with raises(UsageError, seen=("tokenizer.bpe_dropout", 0.1), expected=(0, "first-words")):
        Recipe("first-words", data, {"bpe_dropout": 0.1})
    with raises(UsageError, seen=("data.words", 0), expected=1):
        Recipe("first-words", data | {"words": 0})
    with raises(UsageError, seen=("first-word", "first-words")):
        Recipe("first-word", data)
    del data["words"]
    recipe = Recipe("first-words", data, tokenizer, model, training)
    with raises(UsageError, seen="data.words", expected="first-words"):
        train(recipe, tmp_path / "model")
    data["words"] = 2
    metrics = train(Recipe("first-words", data, tokenizer, model, training), tmp_path / "model")
    assert 0 <= metrics["validation_accuracy"] <= 1
    assert 'task = "first-words"' in (tmp_path / "model/README.md").read_text()


def test_shared_code_does_not_mention_task_names():
    files = [*Path(names.__file__).parent.glob("*.py")]
    assert len(files) > 20
    strings = {
        (path.name, node.value)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    }
    assert [(name, value) for name, value in strings if value in TASKS] == []
