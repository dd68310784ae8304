"""Tests of training runs that stop and resume."""

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from messages import raises
from training_runs import SMALL, STEPS, are_equal, history, make_recipe, weights
from transformers import TrainerCallback

from vanilla_transformer.training import trainer
from vanilla_transformer.training.dry_run import dry_run
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train

ENCODER = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=1)


class Stop(Exception):
    """A stand-in for the end of a process that is killed."""


class StopAt(TrainerCallback):
    """Ends the training once the checkpoint of `step` is saved, and notes the steps before."""

    def __init__(self, step=None):
        self.step, self.steps = step, []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Stop


def stopped(recipe, output, step, monkeypatch):
    """The state directory of a run that ended at `step`, and what its checkpoints are called."""
    callbacks = trainer.callbacks
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "callbacks", lambda recipe: [*callbacks(recipe), StopAt(step)])
        with pytest.raises(Stop):
            train(recipe, output)
    assert not output.exists()
    torch.randn(7)  # whatever happened in between
    return output.with_name(output.name + "-run")


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(STEPS, id="after one epoch", marks=pytest.mark.slow),
        pytest.param(2 * STEPS + 3, id="inside the third"),
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(corpus, tmp_path, monkeypatch, step):
    recipe = make_recipe(corpus, save_strategy="steps", save_steps=step)
    train(recipe, tmp_path / "undisturbed")
    stopped(recipe, tmp_path / "model", step, monkeypatch)
    seen = StopAt()
    callbacks = trainer.callbacks
    monkeypatch.setattr(trainer, "callbacks", lambda recipe: [*callbacks(recipe), seen])
    train(recipe, tmp_path / "model")
    assert seen.steps == list(range(step + 1, 3 * STEPS + 1))
    assert are_equal(weights(tmp_path / "model"), weights(tmp_path / "undisturbed"))


def test_a_run_that_was_stopped_before_its_result_only_writes_that(corpus, tmp_path, monkeypatch):
    """Its updates end inside an epoch."""
    steps = STEPS + 3
    recipe = make_recipe(
        corpus, max_steps=steps, save_strategy="steps", save_steps=5, average_last=2
    )
    train(recipe, tmp_path / "undisturbed")
    stopped(recipe, tmp_path / "model", steps, monkeypatch)
    train(recipe, tmp_path / "model")
    assert are_equal(weights(tmp_path / "model"), weights(tmp_path / "undisturbed"))
    losses = [
        [record["loss"] for record in history(tmp_path / name) if "loss" in record]
        for name in ("model", "undisturbed")
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [2, 3], ids=["while it waited", "before its result"])
def test_early_stopping_ends_a_run_that_goes_on_where_it_would_have(
    unimproved, tmp_path, monkeypatch, epochs
):
    stopped(unimproved, tmp_path / "model", epochs * STEPS, monkeypatch)
    train(unimproved, tmp_path / "model")
    assert max(record["epoch"] for record in history(tmp_path / "model")) == 3


@pytest.mark.parametrize("task", ["translation", pytest.param("masked-lm", marks=pytest.mark.slow)])
def test_rows_are_augmented_alike_by_a_run_that_goes_on(corpus, tmp_path, monkeypatch, task):
    """The run stops in the second epoch, with BPE-dropout and masks."""
    recipe = make_recipe(corpus, num_train_epochs=2, save_strategy="steps", save_steps=STEPS + 3)
    recipe.tokenizer["bpe_dropout"] = 0.1
    if task == "masked-lm":
        recipe = Recipe(
            task,
            {"train": str(corpus[0][0])},
            {"kind": "bpe", "vocab_size": 48},
            ENCODER,
            recipe.training,
        )
    train(recipe, tmp_path / "undisturbed")
    stopped(recipe, tmp_path / "model", STEPS + 3, monkeypatch)
    train(recipe, tmp_path / "model")
    assert are_equal(weights(tmp_path / "model"), weights(tmp_path / "undisturbed"))


@pytest.fixture
def streamed(corpus, tmp_path):
    """A recipe for the corpus as a data set that is streamed, of two epochs."""
    splits = {}
    for split, files in zip(("train", "validation"), corpus):
        lines = [path.read_text().splitlines() for path in files]
        splits[split] = Dataset.from_dict(dict(zip(("en", "de"), lines)))
    DatasetDict(splits).save_to_disk(tmp_path / "set")
    recipe = make_recipe(
        corpus, num_train_epochs=1, max_steps=2 * STEPS, save_strategy="steps", save_steps=STEPS + 3
    )
    recipe.data = {"dataset": str(tmp_path / "set"), "columns": ["en", "de"], "streaming": True}
    return recipe


def test_a_streamed_run_goes_on_to_the_same_weights(streamed, tmp_path, monkeypatch):
    streamed.tokenizer["bpe_dropout"] = 0.1
    metrics = train(streamed, tmp_path / "undisturbed")
    assert metrics["validation_loss"] < math.log(60)  # that of knowing nothing
    stopped(streamed, tmp_path / "model", STEPS + 3, monkeypatch)
    train(streamed, tmp_path / "model")
    assert are_equal(weights(tmp_path / "model"), weights(tmp_path / "undisturbed"))


def test_a_stream_needs_batches_by_token_count_and_positions_without_an_end(streamed, tmp_path):
    assert "a stream of examples" in dry_run(streamed)
    with raises(ValueError, seen=("position_embedding_type", "learned")):
        prepare(replace(streamed, model={**SMALL, "position_embedding_type": "learned"}))
    del streamed.training["tokens_per_update"], streamed.training["tokens_per_batch"]
    with raises(ValueError, expected="training.tokens_per_update"):
        train(streamed, tmp_path / "model")


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("optimizer.pt", "files.json")]


@pytest.mark.parametrize("damaged", ["model.safetensors", *OTHERS])
def test_a_checkpoint_that_was_cut_short_is_passed_over(
    short, corpus, tmp_path, monkeypatch, damaged
):
    state = stopped(make_recipe(corpus), tmp_path / "model", 2 * STEPS, monkeypatch)
    file = state / f"checkpoint-{2 * STEPS}" / damaged
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    train(make_recipe(corpus), tmp_path / "model")
    assert are_equal(weights(tmp_path / "model"), weights(short[0]))


def test_the_state_of_another_recipe_is_refused_by_what_differs(corpus, tmp_path, monkeypatch):
    stopped(make_recipe(corpus), tmp_path / "model", STEPS, monkeypatch)
    other = make_recipe(corpus, seed=1, num_train_epochs=1)
    for force in (False, True):  # which is about the result
        with raises(ValueError, seen=("training.num_train_epochs", 3), expected=(1, "--restart")):
            train(other, tmp_path / "model", force)
    train(other, tmp_path / "model", restart=True)
    assert (tmp_path / "model/model.safetensors").is_file()
    assert (tmp_path / f"model-run.kept-1/checkpoint-{STEPS}/model.safetensors").is_file()


def test_a_finished_run_gives_its_result_again_without_an_update(
    short, corpus, tmp_path, monkeypatch
):
    """The result was moved away, or stays and is replaced by force, with other settings of
    generation."""
    output = tmp_path / "model"
    train(make_recipe(corpus), output)
    output.rename(tmp_path / "moved")
    seen, callbacks = StopAt(), trainer.callbacks
    monkeypatch.setattr(trainer, "callbacks", lambda recipe: [*callbacks(recipe), seen])
    for force, beams in ((False, 5), (True, 2)):
        train(
            replace(make_recipe(corpus), generation={"num_beams": beams, "max_new_tokens": 64}),
            output,
            force,
        )
        assert are_equal(weights(output), weights(short[0]))
        assert json.loads((output / "generation_config.json").read_text())["num_beams"] == beams
    assert seen.steps == []


def test_a_run_whose_schedule_has_no_end_is_made_longer(corpus, tmp_path, monkeypatch):
    """The weights are those of a run that was as long from the beginning."""
    settings = dict(save_strategy="steps", save_steps=5, tokens_per_batch=512)
    train(make_recipe(corpus, max_steps=10, **settings), tmp_path / "long")
    train(make_recipe(corpus, max_steps=5, **settings), tmp_path / "model")
    train(make_recipe(corpus, max_steps=10, **settings), tmp_path / "model", force=True)
    assert are_equal(weights(tmp_path / "model"), weights(tmp_path / "long"))


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_goes_on_to_the_same_weights(short, corpus, tmp_path):
    recipe = make_recipe(corpus)
    code = (
        "import json, sys; from pathlib import Path; from vanilla_transformer.training import "
        "recipe, run; "
    )
    code += "run.train(recipe.Recipe(**json.loads(sys.argv[1])), Path(sys.argv[2]))"
    arguments = [sys.executable, "-c", code, json.dumps(recipe.__dict__), str(tmp_path / "model")]
    for seconds in np.random.default_rng(0).uniform(5, 15, size=4):
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    if not (tmp_path / "model").exists():
        train(recipe, tmp_path / "model")
    assert are_equal(weights(tmp_path / "model"), weights(short[0]))
