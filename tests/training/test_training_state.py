"""Tests of the state directory of a run: resuming, invalid states, and files of the user."""

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import write_corpus
from messages import raises

from vanilla_transformer.errors import UsageError
from vanilla_transformer.training import run as runs
from vanilla_transformer.training.checkpoints import (
    CompleteCheckpoints,
    check_state,
    complete_checkpoints,
    last_checkpoints,
    marked_checkpoints,
    run_facts,
)
from vanilla_transformer.training.checkpoints import open_state as make_state
from vanilla_transformer.training.recipe import Recipe


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "text").mkdir()
    files = write_corpus(tmp_path / "text", "train", 3, seed=0)
    training = {
        "learning_rate": 0.1,
        "max_steps": 10,
        "lr_scheduler_type": "inverse_sqrt",
        "logging_steps": 5,
    }
    data = {"directory": str(tmp_path / "text"), "train": [file.name for file in files]}
    return Recipe(
        "translation",
        data,
        {"kind": "bpe", "vocab_size": 60},
        {"dropout": 0.1},
        training,
        {"num_beams": 4},
    )


@pytest.fixture
def state(tmp_path):
    return tmp_path / "model-run"


def open_state(state, recipe, restart):
    facts = run_facts(recipe)
    check_state(state, facts, restart)
    make_state(state, facts, restart)


def with_changes(recipe, table, **values):
    return replace(recipe, **{table: getattr(recipe, table) | values})


def write_checkpoint(state: Path, step: int, arguments=None, **facts) -> Path:
    """Write a checkpoint as the trainer does, and call our callback."""
    path = state / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text(f"weights {step}")
    (path / "trainer_state.json").write_text("{}")
    callback, arguments = CompleteCheckpoints(), arguments or SimpleNamespace(save_total_limit=None)
    callback.on_train_begin(arguments, SimpleNamespace(best_model_checkpoint=None), None)
    assert arguments.save_total_limit is None  # the trainer would remove foreign files
    arguments.output_dir, arguments.should_save = str(state), True
    callback.on_save(
        arguments, SimpleNamespace(global_step=step, best_model_checkpoint=None, **facts), None
    )
    return path


def list_names(state):
    return sorted(path.name for path in state.iterdir())


# ---------------------------------------------------------------------------------- opening a state


def test_state_can_be_reopened_by_same_recipe(recipe, state):
    open_state(state, recipe, restart=False)
    facts = json.loads((state / "run.json").read_text())
    text = (Path(recipe.data["directory"]) / recipe.data["train"][0]).read_bytes()
    assert facts["text"]["train"][0] == hashlib.sha256(text).hexdigest()
    assert facts["training"] == recipe.training
    open_state(state, recipe, restart=False)
    assert list_names(state) == ["run.json"]


def test_directory_without_run_json_raises_and_is_kept(recipe, state):
    state.mkdir()
    open_state(state, recipe, restart=False)  # an empty directory is accepted
    (state / "run.json").unlink()
    (state / "notes").write_text("mine")
    for restart in (False, True):
        with raises(FileExistsError, seen="run.json"):
            open_state(state, recipe, restart)
    assert list_names(state) == ["notes"]


@pytest.mark.parametrize(
    "table, values, seen, expected",
    [
        ("training", {"learning_rate": 0.2}, ("training.learning_rate", 0.1), (0.2, "--restart")),
        ("training", {"seed": 1}, ("training.seed", None), 1),
        ("model", {"dropout": 0.2}, ("model.dropout", 0.1), 0.2),
        ("tokenizer", {"vocab_size": 61}, ("tokenizer.vocab_size", 60), 61),
        ("training", {"max_steps": 9}, ("training.max_steps", 10), 9),
        (
            "training",
            {"max_steps": 11, "lr_scheduler_type": "linear"},
            ("training.lr_scheduler_type", "inverse_sqrt"),
            (),
        ),
    ],
)
def test_state_of_different_recipe_raises_and_names_key(
    recipe, state, table, values, seen, expected
):
    open_state(state, recipe, restart=False)
    write_checkpoint(state, 5)
    with raises(UsageError, seen=seen, expected=expected):
        open_state(state, with_changes(recipe, table, **values), restart=False)


def test_recipe_may_change_before_first_checkpoint(recipe, state):
    open_state(state, recipe, restart=False)
    (state / "notes").write_text("mine")
    open_state(state, with_changes(recipe, "training", learning_rate=0.2), restart=False)
    assert json.loads((state / "run.json").read_text())["training"]["learning_rate"] == 0.2
    assert list_names(state) == ["notes", "run.json"]


def test_run_with_linear_schedule_cannot_be_extended(recipe, state):
    linear = with_changes(recipe, "training", lr_scheduler_type="linear")
    open_state(state, linear, restart=False)
    write_checkpoint(state, 5)
    with raises(UsageError, seen=("training.max_steps", 10), expected=11):
        open_state(state, with_changes(linear, "training", max_steps=11), restart=False)


@pytest.mark.parametrize(
    "table, values",
    [
        ("generation", {"num_beams": 5, "length_penalty": 0.6}),
        ("evaluation", {"bleu_tokenize": "none"}),
        ("training", {"logging_steps": 1, "report_to": "none"}),
        ("training", {"max_steps": 20}),
    ],
)
def test_settings_without_effect_on_weights_may_change(recipe, state, table, values):
    open_state(state, recipe, restart=False)
    write_checkpoint(state, 5)
    other = with_changes(recipe, table, **values)
    open_state(state, replace(other, save_dtype="float16"), restart=False)
    assert json.loads((state / "run.json").read_text())[table] == getattr(other, table)


def test_generation_settings_must_match_if_scores_select_weights(recipe, state):
    selecting_recipe = with_changes(
        recipe,
        "training",
        early_stopping_patience=2,
        eval_strategy="steps",
        load_best_model_at_end=True,
    )
    open_state(state, selecting_recipe, restart=False)
    write_checkpoint(state, 5)
    with raises(UsageError, seen=("generation.num_beams", 4), expected=5):
        open_state(state, with_changes(selecting_recipe, "generation", num_beams=5), restart=False)


def test_text_may_move_but_not_change(recipe, state, tmp_path):
    open_state(state, recipe, restart=False)
    write_checkpoint(state, 5)
    (tmp_path / "text").rename(tmp_path / "moved")
    moved = with_changes(recipe, "data", directory=str(tmp_path / "moved"))
    open_state(state, moved, restart=False)
    with open(tmp_path / "moved" / recipe.data["train"][0], "a") as file:
        file.write("one line more\n")
    with raises(UsageError, seen="text.train"):
        open_state(state, moved, restart=False)


def test_test_text_may_be_added_later(recipe, state):
    open_state(state, recipe, restart=False)
    write_checkpoint(state, 5)
    open_state(state, with_changes(recipe, "data", test=recipe.data["train"]), restart=False)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_restart_moves_state_aside(recipe, state, is_damaged, capsys):
    open_state(state, recipe, restart=False)
    write_checkpoint(state, 5)
    if is_damaged:
        (state / "run.json").write_text("{")
        with raises(ValueError, seen=("run.json", "--restart")):
            open_state(state, recipe, restart=False)
    for number in (1, 2):
        open_state(state, recipe, restart=True)
        assert list_names(state) == ["run.json"]
        assert f"{state}.kept-{number}" in capsys.readouterr().out
    assert list_names(Path(f"{state}.kept-1")) == ["checkpoint-5", "run.json"]


# -------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("damage", ["one byte", "shorter", "missing", "marker", "another marker"])
def test_damaged_checkpoint_is_skipped_with_warning(state, damage, caplog, monkeypatch):
    older, newest = write_checkpoint(state, 9), write_checkpoint(state, 10)
    assert list(complete_checkpoints(state)) == [newest, older]
    weights = newest / "model.safetensors"
    if damage == "one byte":
        weights.write_text("wEights 10")  # same size
    elif damage == "shorter":
        weights.write_text("weights")
    elif damage == "missing":
        weights.unlink()
    else:
        (newest / "files.json").write_text('{"model.saf' if damage == "marker" else "[]")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert list(complete_checkpoints(state)) == [older]
    assert str(newest) in caplog.text


def test_checkpoint_is_marked_before_writing(state):
    callback, arguments = (
        CompleteCheckpoints(),
        SimpleNamespace(save_total_limit=None, output_dir=str(state), should_save=True),
    )
    for saves in (False, True):
        callback.on_step_end(
            arguments, SimpleNamespace(global_step=5), SimpleNamespace(should_save=saves)
        )
        assert (state / "checkpoint-5/files.json").exists() == saves
    assert marked_checkpoints(state) == [state / "checkpoint-5"]
    assert list(complete_checkpoints(state)) == []


def test_user_files_in_checkpoint_are_ignored_and_kept(state):
    for name in ("onnx/model.onnx", "notes"):
        file = (
            write_checkpoint(state, 5) / name
            if not (state / "checkpoint-5").exists()
            else state / "checkpoint-5" / name
        )
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    assert list(complete_checkpoints(state)) == [state / "checkpoint-5"]
    write_checkpoint(state, 10, SimpleNamespace(save_total_limit=1))
    left = sorted(path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file())
    assert (
        left[-2:] == ["checkpoint-5/notes", "checkpoint-5/onnx/model.onnx"]
        and "checkpoint-5/model.safetensors" not in left
    )


def test_marker_of_outside_files_removes_nothing(state):
    (write_checkpoint(state, 5) / "files.json").write_text(
        '{"../notes": "", "model.safetensors": ""}'
    )
    (state / "notes").write_text("mine")
    for step in (10, 15):
        write_checkpoint(state, step, SimpleNamespace(save_total_limit=1))
    assert list_names(state) == ["checkpoint-15", "checkpoint-5", "notes"]
    assert (state / "checkpoint-5/model.safetensors").is_file()


def test_foreign_checkpoint_directory_raises(recipe, state):
    open_state(state, recipe, restart=False)
    (state / "checkpoint-15").mkdir()
    with raises(FileExistsError, seen="checkpoint-15"):
        open_state(state, recipe, restart=False)


@pytest.mark.parametrize("content", ["[]", "null", "1", '{"mine": 1}'])
def test_foreign_run_json_raises_and_is_kept(recipe, state, content):
    state.mkdir()
    (state / "run.json").write_text(content)
    for restart in (False, True):
        with raises(FileExistsError, seen="run.json"):
            open_state(state, recipe, restart)
    assert (state / "run.json").read_text() == content


def test_last_checkpoints_raise_if_one_is_damaged(state, caplog, monkeypatch):
    paths = [write_checkpoint(state, step) for step in (5, 10, 15)]
    assert last_checkpoints(state, 2) == paths[1:]
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert last_checkpoints(state, 4) == paths
    assert "average_last=4" in caplog.text and "3 checkpoints" in caplog.text
    (paths[1] / "model.safetensors").write_text("other")
    assert last_checkpoints(state, 1) == paths[2:]
    with raises(ValueError, seen=("average_last", 3, "checkpoint-10")):
        last_checkpoints(state, 3)


def test_best_checkpoint_is_found_in_moved_state(state):
    path = write_checkpoint(state, 5)
    callback, arguments = (
        CompleteCheckpoints(),
        SimpleNamespace(save_total_limit=None, output_dir=str(state), should_save=True),
    )
    noted = SimpleNamespace(best_model_checkpoint="/elsewhere/checkpoint-5")
    callback.on_train_begin(arguments, noted, None)
    assert noted.best_model_checkpoint == str(path)
    (path / "model.safetensors").write_text("other")
    with raises(ValueError, seen="checkpoint-5"):
        callback.on_train_begin(arguments, noted, None)


def test_run_with_relative_warmup_cannot_be_extended(recipe, state):
    shared = with_changes(recipe, "training", warmup_steps=0.5)
    open_state(state, shared, restart=False)
    write_checkpoint(state, 5)
    with raises(UsageError, seen=("training.max_steps", 10), expected=11):
        open_state(state, with_changes(shared, "training", max_steps=11), restart=False)


def test_changed_teacher_under_same_path_raises(tmp_path, state):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher/model.safetensors").write_text("one")
    (tmp_path / "text").write_text("a\tb\n")
    recipe = Recipe(
        "sequence-classification",
        {"train": str(tmp_path / "text")},
        {},
        {},
        {"teachers": [str(tmp_path / "teacher")]},
    )
    open_state(state, recipe, restart=False)
    write_checkpoint(state, 5)
    open_state(state, recipe, restart=False)
    (tmp_path / "teacher/model.safetensors").write_text("other")
    with raises(UsageError, seen="text.teachers"):
        open_state(state, recipe, restart=False)


@pytest.mark.parametrize(
    "limit, kept", [(None, [5, 10, 15, 20]), (1, [20]), (2, [15, 20]), (9, [5, 10, 15, 20])]
)
def test_save_total_limit_removes_only_checkpoints_of_run(state, limit, kept):
    foreign = ["checkpoint-mean", "checkpoint-5-mean", "notes"]
    for name in foreign:
        (state / name).mkdir(parents=True)
        (state / name / "model.safetensors").write_text("an average of theirs")
    for step in (5, 10, 15, 20):
        write_checkpoint(state, step, SimpleNamespace(save_total_limit=limit))
    assert list_names(state) == sorted([*foreign, *(f"checkpoint-{step}" for step in kept)])


def test_save_total_limit_keeps_best_checkpoint(state):
    for step in (5, 10, 15):
        write_checkpoint(state, step)
    callback, best = CompleteCheckpoints(), str(state / "checkpoint-5")
    arguments = SimpleNamespace(save_total_limit=2, output_dir=str(state), should_save=True)
    callback.on_train_begin(arguments, SimpleNamespace(best_model_checkpoint=None), None)
    callback.on_save(arguments, SimpleNamespace(global_step=15, best_model_checkpoint=best), None)
    assert list_names(state) == ["checkpoint-15", "checkpoint-5"]


# ----------------------------------------------------------------------------------------- training


def test_output_or_state_that_overlaps_inputs_raises(recipe, tmp_path):
    teacher = tmp_path / "exp-run"
    teacher.mkdir()
    (teacher / "config.json").write_text('{"model_type": "vanilla-encoder"}')
    before = sorted(tmp_path.rglob("*"))
    for name, seen in (
        ("exp-run", "exp-run"),
        ("exp", "exp-run"),
        (".", ()),
    ):
        with raises(ValueError, seen=seen):
            runs.train(
                with_changes(recipe, "model", path=str(teacher)),
                tmp_path / name,
                force=True,
                restart=True,
            )
    assert sorted(tmp_path.rglob("*")) == before


def test_input_paths(recipe, tmp_path):
    recipe = with_changes(with_changes(recipe, "model", path="start"), "tokenizer", path="words")
    text = [str(tmp_path / "text" / name) for name in recipe.data["train"]]
    assert list(map(str, runs.input_paths(recipe))) == [*text, "words", "start"]
    recipe = Recipe("translation", {"dataset": "set"}, {}, {}, {})
    assert runs.input_paths(recipe) == ["set"]
    recipe = Recipe(
        "sequence-classification", {"train": "a.txt"}, {}, {}, {"teachers": ["one", "two"]}
    )
    assert runs.input_paths(recipe) == [Path("a.txt"), "one", "two"]
