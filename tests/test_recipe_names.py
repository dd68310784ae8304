"""Names in recipes: keys that were renamed keep their old names for one release, in recipes and in records of runs; a name that
there is not is answered with the nearest one; tasks are found by their names, and nothing else is."""

import ast
import json
import re
import warnings
from pathlib import Path

import pytest
import standins
from safetensors.torch import load_file

from vanilla_transformer.errors import UsageError
from vanilla_transformer.training import names, trainer
from vanilla_transformer.training.checkpoints import run_facts
from vanilla_transformer.training.origins import recorded_data
from vanilla_transformer.training.recipe import FOLDER, Recipe, read_recipe
from vanilla_transformer.training.record import RECORD, recorded_tables
from vanilla_transformer.training.run import train
from vanilla_transformer.training.tasks import TASKS
from vanilla_transformer.training.tasks.task import Task
from vanilla_transformer.training.values import TRAINING
from vanilla_transformer_export import cli

CARDS = Path(__file__).parents[1] / "model_cards"
OLD_NAMES = [  # by hand, as the recipes before had them
    ("tokenizer", "dropout", "bpe_dropout", 0.25),
    ("training", "replaced", "word_replacement", 0.5),
    ("training", "spans", "span_crop", 0.125),
]
EACH_OLD_NAME = pytest.mark.parametrize("table, old, new, value", OLD_NAMES)
RECIPE = 'task = "sequence-classification"\n[data]\ntrain = "a"\n[{table}]\n{keys}\n'


def write(folder, table, **keys):
    path = folder / "a.toml"
    path.write_text(RECIPE.format(table=table, keys="\n".join(f"{name} = {value}" for name, value in keys.items())))
    return str(path)


# ------------------------------------------------------------------------------------------------------ old names


def test_the_table_has_each_name_that_was_changed():
    changed = {(table, old, new) for table, renamed in names.RENAMED.items() for old, new in renamed.items()}
    assert changed == {(table, old, new) for table, old, new, _ in OLD_NAMES}


@EACH_OLD_NAME
@pytest.mark.parametrize("place", ["file", "change", "table", "recipe", "--set"])
def test_an_old_name_is_read_with_a_warning(table, old, new, value, place, tmp_path, monkeypatch):
    plain, said = write(tmp_path, "evaluation"), f"{table}.{old} is now {table}.{new}: its old name works for one release"
    with pytest.warns(FutureWarning, match=re.escape(said)) as caught:
        if place == "file":
            recipe = read_recipe(write(tmp_path, table, **{old: value}))
        elif place == "change":
            recipe = read_recipe(plain, {f"{table}.{old}": value})
        elif place == "table":
            recipe = read_recipe(plain, {table: {old: value}})
        elif place == "recipe":
            recipe = Recipe("sequence-classification", **{table: {old: value}})
        else:
            made = []
            monkeypatch.setattr("vanilla_transformer.training.dry_run.dry_run", lambda recipe: made.append(recipe) or "")
            cli.main(["train", plain, "--output", "out", "--set", f"{table}.{old}={value}", "--dry-run"])
            [recipe] = made
    assert getattr(recipe, table) == {new: value}
    assert len([warning for warning in caught if warning.category is FutureWarning]) == 1


@EACH_OLD_NAME
def test_a_change_counts_whatever_name_the_file_has(table, old, new, value, tmp_path):
    with pytest.warns(FutureWarning):
        assert getattr(read_recipe(write(tmp_path, table, **{new: 0.75}), {f"{table}.{old}": value}), table) == {new: value}
    with pytest.warns(FutureWarning):
        assert getattr(read_recipe(write(tmp_path, table, **{old: 0.75}), {f"{table}.{new}": value}), table) == {new: value}


@EACH_OLD_NAME
def test_an_old_and_a_new_name_together_are_an_error_that_names_both(table, old, new, value, tmp_path):
    both, plain = {old: value, new: 0.75}, write(tmp_path, "evaluation")
    said = rf"^{table}.{old} is {value} and {table}.{new} is 0.75, expected {table}.{new} alone: {table}.{old} is its old name$"
    for changes in (
        {f"{table}.{old}": value, f"{table}.{new}": 0.75},
        {table: both},
        {table: {old: value}, f"{table}.{new}": 0.75},
    ):
        with pytest.raises(UsageError, match=said) as caught:
            read_recipe(plain, changes)
        assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match=said):
        read_recipe(write(tmp_path, table, **both))
    with pytest.raises(UsageError, match=said):
        Recipe("sequence-classification", **{table: both})


def test_the_value_under_an_old_name_is_checked_as_that_of_the_new_one():
    with pytest.warns(FutureWarning), pytest.raises(UsageError, match="training.span_crop is 2, expected a number from 0 to 1"):
        Recipe("sequence-classification", training={"spans": 2})


def test_shipped_recipes_have_no_old_names():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len([read_recipe(path.stem) for path in FOLDER.glob("*.toml")]) == 18


# ------------------------------------------------------------------------------------------------------ records


def with_old_names(tables: dict) -> dict:
    """As a run of the version before wrote them."""
    found = json.loads(json.dumps(tables))
    for table, old, new, _ in OLD_NAMES:
        if new in found[table]:
            found[table][old] = found[table].pop(new)
    return found


@pytest.mark.parametrize("path", [pytest.param(path, id=path.parent.name) for path in sorted(CARDS.glob(f"*/{RECORD}"))])
def test_the_records_of_shipped_models_are_read_without_a_warning(path):
    record = json.loads(path.read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe = Recipe(**recorded_tables(record))
    assert with_old_names({"tokenizer": recipe.tokenizer, "training": recipe.training}) == {
        table: record["recipe"][table] for table in ("tokenizer", "training")
    }


def test_shipped_records_have_old_names():
    """Else the test above says nothing."""
    records = [json.loads(path.read_text())["recipe"] for path in CARDS.glob(f"*/{RECORD}")]
    assert {old for table, old, *_ in OLD_NAMES for record in records if old in record[table]} == {
        "replaced",
        "spans",
        "dropout",
    }


def test_a_record_under_both_names_is_not_read(tmp_path):
    standins.classifier(tmp_path / "model")
    record = {"recipe": {"data": {"train": "a"}, "training": {"spans": 0.5, "span_crop": 0.25}}}
    (tmp_path / "model" / RECORD).write_text(json.dumps(record))
    with pytest.raises(
        ValueError, match="training.spans is 0.5 and training.span_crop is 0.25, expected training.span_crop alone"
    ):
        recorded_data(str(tmp_path / "model"))


@pytest.fixture
def augmented(tmp_path):
    """A recipe with each of the keys that were renamed, of six updates with a checkpoint at each."""
    (tmp_path / "text").write_text("".join(line + "\n" for line in standins.OPINIONS))
    teachers = [standins.classifier(tmp_path / name) for name in ("first", "second")]
    training = {"teachers": teachers, "word_replacement": 0.5, "span_crop": 0.125, "max_steps": 6, "save_steps": 1, "seed": 0}
    training |= {"tokens_per_update": 64, "learning_rate": 0.01, "save_total_limit": 6}
    data = {"train": str(tmp_path / "text")}
    tokenizer = {"kind": "bpe", "vocab_size": 40, "bpe_dropout": 0.25}
    return Recipe("sequence-classification", data, tokenizer, standins.SHAPE | {"num_hidden_layers": 1}, training)


class Stopped(Exception):
    pass


def stop_after(monkeypatch, step):
    """Training raises `Stopped` once the checkpoint of that update is written."""
    callbacks = trainer.callbacks

    class Stop(trainer.Watch):
        def __init__(self):
            pass

        def on_train_begin(self, *args, **kwargs):
            pass

        def on_evaluate(self, *args, **kwargs):
            pass

        def on_log(self, *args, **kwargs):
            pass

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step:
                raise Stopped

    monkeypatch.setattr(trainer, "callbacks", lambda recipe: [*callbacks(recipe), Stop()])


def test_a_run_that_was_begun_under_old_names_goes_on_to_the_same_weights(augmented, tmp_path, monkeypatch):
    train(augmented, tmp_path / "undisturbed")
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 3)
        train(augmented, tmp_path / "model")
    noted = tmp_path / "model-run/run.json"
    before = with_old_names(json.loads(noted.read_text()))
    assert {"replaced", "spans"} <= before["training"].keys() and "dropout" in before["tokenizer"]
    noted.write_text(json.dumps(before))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        train(augmented, tmp_path / "model")
    assert json.loads(noted.read_text()) == run_facts(augmented)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "undisturbed"))
    assert found.keys() == expected.keys() and all((found[name] == expected[name]).all() for name in expected)
    history = json.loads((tmp_path / "model" / RECORD).read_text())["history"]
    assert max(entry["step"] for entry in history) == 6


def test_a_run_of_another_value_under_an_old_name_is_another_run(augmented, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 1)
        train(augmented, tmp_path / "model")
    noted = tmp_path / "model-run/run.json"
    before = with_old_names(json.loads(noted.read_text()))
    before["training"]["spans"] = 0.75
    noted.write_text(json.dumps(before))
    with pytest.raises(UsageError, match="is the state of a run with training.span_crop=0.75, expected 0.125: --restart"):
        train(augmented, tmp_path / "model")


# ------------------------------------------------------------------------------------------------------ the nearest name


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"training.word_replacment": 1}, r"no key of [training] 'word_replacment'; did you mean 'word_replacement'?"),
        ({"training.replace": 1}, r"no key of [training] 'replace'; did you mean "),
        ({"tokenizer.bpe-dropout": 0.1}, r"no key of [tokenizer] 'bpe-dropout'; did you mean 'bpe_dropout'?"),
        ({"learning_rate": 1}, r"no key of a recipe 'learning_rate'; did you mean 'training.learning_rate'?"),
        ({"training.vocab_size": 9}, r"no key of [training] 'vocab_size'; did you mean 'tokenizer.vocab_size'?"),
        ({"generation.preset": "a"}, r"no key of [generation] 'preset'; did you mean 'model.preset'?"),
        ({"evaluation.xyz": 1}, r"no key of [evaluation] 'xyz', expected one of bleu_tokenize"),
    ],
)
def test_a_key_that_there_is_not_is_answered_with_the_nearest(changes, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        read_recipe("translation", changes)


def test_a_recipe_that_there_is_not_is_answered_with_the_nearest():
    with pytest.raises(
        FileNotFoundError,
        match="^multi30k-en-dee is neither a file nor a recipe, expected one of conll2003, .*; did you mean 'multi30k-en-de'?",
    ):
        read_recipe("multi30k-en-dee")


def test_each_key_of_ours_is_in_the_documentation_of_a_recipe():
    for name in [*TRAINING, "bpe_dropout"]:
        assert f"`{name}`" in Recipe.__doc__


# ------------------------------------------------------------------------------------------------------ tasks


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_what_every_task_has_and_keys_that_there_are(name):
    task = TASKS[name]
    members = {*Task.__annotations__, *(name for name in vars(Task) if not name.startswith("_"))}
    of_text = {"texts", "encode"} if task.ABILITIES.images else set()
    assert {member for member in members if not hasattr(task, member)} == of_text
    of_all = set() if task.ABILITIES.images else {"skip_bad_rows"}
    assert {*of_all, *task.ABILITIES.needs} <= task.DATA.keys()


TASK = '''
"""Which of two labels a text has: its first word."""

from vanilla_transformer.training.data import lines_of, paths_of
from vanilla_transformer.training.tasks.sequence_classification import *
from vanilla_transformer.training.tasks.sequence_classification import DATA as SHARED
from vanilla_transformer.training.tasks.task import Abilities
from vanilla_transformer.training.values import COUNTED

ABILITIES = Abilities(needs=("words",))
DATA = SHARED | {"words": COUNTED}


def read(data, split):
    if split not in data:
        return None
    rows = [line.split(" ", 1) for line in lines_of(paths_of(data, split))]
    shown = [" ".join(text.split()[: data["words"]]) for _, text in rows]
    return Dataset.from_dict({"label": [label for label, _ in rows], "text": shown})
'''


def test_a_new_task_is_one_file_and_one_line(tmp_path, monkeypatch):
    """With a key and abilities of its own, from its recipe to a card."""
    (tmp_path / "first_words.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TASKS, "first-words", __import__("first_words"))
    (tmp_path / "text").write_text("".join(line + "\n" for line in standins.OPINIONS))
    data = {"train": str(tmp_path / "text"), "validation": str(tmp_path / "text"), "words": 2}
    tokenizer = {"kind": "word", "vocab_size": 8}  # four special tokens, the mask, "the", and two of the things
    model = standins.SHAPE | {"num_hidden_layers": 1}
    training = {"tokens_per_update": 64, "max_steps": 2}
    with pytest.raises(UsageError, match="tokenizer.bpe_dropout is 0.1, expected 0: the subwords of first-words are always"):
        Recipe("first-words", data, {"bpe_dropout": 0.1})
    with pytest.raises(UsageError, match="data.words is 0, expected a whole number of at least 1"):
        Recipe("first-words", data | {"words": 0})
    with pytest.raises(UsageError, match="no task 'first-word'; did you mean 'first-words'"):
        Recipe("first-word", data)
    del data["words"]
    recipe = Recipe("first-words", data, tokenizer, model, training)
    with pytest.raises(UsageError, match="the recipe has no data.words, expected a whole number: first-words needs it"):
        train(recipe, tmp_path / "model")
    data["words"] = 2
    metrics = train(Recipe("first-words", data, tokenizer, model, training), tmp_path / "model")
    assert 0 <= metrics["validation_accuracy"] <= 1
    assert 'task = "first-words"' in (tmp_path / "model/README.md").read_text()


def test_no_code_beside_a_task_asks_for_its_name():
    files = [*Path(names.__file__).parent.glob("*.py")]
    assert len(files) > 20
    strings = {
        (path.name, node.value)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    }
    assert [(name, value) for name, value in strings if value in TASKS] == []
