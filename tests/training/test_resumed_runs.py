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

from vanilla_transformer.errors import UsageError
from vanilla_transformer.training import run, trainer
from vanilla_transformer.training.dry_run import dry_run
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train
from vanilla_transformer_export.cli.main import main

ENCODER = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=1)


class Stop(Exception):
    """A stand-in for the end of a process that is killed."""


class StopAt(TrainerCallback):
    """A callback that stops training after the checkpoint of `step`, and records all steps."""

    def __init__(self, step=None):
        self.step, self.steps = step, []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Stop


def run_until(recipe, output, step, monkeypatch):
    """Train, stop after the checkpoint of `step`, and return the state directory."""
    callbacks = trainer.callbacks
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "callbacks", lambda recipe: [*callbacks(recipe), StopAt(step)])
        with pytest.raises(Stop):
            train(recipe, output)
    assert not output.exists()
    torch.randn(7)  # other use of the random generator
    return output.with_name(output.name + "-run")


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(STEPS, id="after one epoch", marks=pytest.mark.slow),
        pytest.param(2 * STEPS + 3, id="inside the third"),
    ],
)
def test_stopped_run_resumes_to_same_weights(short, corpus, tmp_path, monkeypatch, step):
    recipe = make_recipe(corpus, save_strategy="steps", save_steps=step)
    run_until(recipe, tmp_path / "model", step, monkeypatch)
    seen = StopAt()
    callbacks = trainer.callbacks
    monkeypatch.setattr(trainer, "callbacks", lambda recipe: [*callbacks(recipe), seen])
    train(recipe, tmp_path / "model")
    assert seen.steps == list(range(step + 1, 3 * STEPS + 1))
    assert are_equal(weights(tmp_path / "model"), weights(short[0]))


def test_run_stopped_after_last_update_only_writes_result_on_resume(corpus, tmp_path, monkeypatch):
    """End the updates inside an epoch."""
    steps = STEPS + 3
    recipe = make_recipe(
        corpus, max_steps=steps, save_strategy="steps", save_steps=5, average_last=2
    )
    train(recipe, tmp_path / "undisturbed")
    run_until(recipe, tmp_path / "model", steps, monkeypatch)
    seen = StopAt()
    callbacks = trainer.callbacks
    monkeypatch.setattr(trainer, "callbacks", lambda recipe: [*callbacks(recipe), seen])
    train(recipe, tmp_path / "model")
    assert seen.steps == []
    assert are_equal(weights(tmp_path / "model"), weights(tmp_path / "undisturbed"))
    losses = [
        [record["loss"] for record in history(tmp_path / name) if "loss" in record]
        for name in ("model", "undisturbed")
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [2, 3], ids=["while it waited", "before its result"])
def test_early_stopping_ends_resumed_run_with_best_weights(
    unimproved, tmp_path, monkeypatch, epochs
):
    run_until(unimproved, tmp_path / "model", epochs * STEPS, monkeypatch)
    train(unimproved, tmp_path / "model")
    assert max(record["epoch"] for record in history(tmp_path / "model")) == 3
    best = tmp_path / f"model-run/checkpoint-{STEPS}"
    assert are_equal(weights(tmp_path / "model"), weights(best))


@pytest.mark.parametrize("task", ["translation", pytest.param("masked-lm", marks=pytest.mark.slow)])
def test_resumed_run_augments_rows_identically(corpus, tmp_path, monkeypatch, task):
    """Stop the run in the second epoch, with BPE-dropout or masks."""
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
    run_until(recipe, tmp_path / "model", STEPS + 3, monkeypatch)
    train(recipe, tmp_path / "model")
    assert are_equal(weights(tmp_path / "model"), weights(tmp_path / "undisturbed"))


@pytest.fixture
def stream_recipe(corpus, tmp_path):
    """Return a recipe that streams the corpus as a dataset for two epochs."""
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


def test_streaming_run_resumes_to_same_weights(stream_recipe, tmp_path, monkeypatch):
    stream_recipe.tokenizer["bpe_dropout"] = 0.1
    metrics = train(stream_recipe, tmp_path / "undisturbed")
    assert metrics["validation_loss"] < math.log(60)  # loss of uniform predictions
    run_until(stream_recipe, tmp_path / "model", STEPS + 3, monkeypatch)
    train(stream_recipe, tmp_path / "model")
    assert are_equal(weights(tmp_path / "model"), weights(tmp_path / "undisturbed"))


def test_streaming_requires_token_batches_and_unbounded_positions(stream_recipe):
    assert "a stream of examples" in dry_run(stream_recipe)
    with raises(ValueError, seen=("position_embedding_type", "learned")):
        prepare(replace(stream_recipe, model={**SMALL, "position_embedding_type": "learned"}))
    names = ("tokens_per_update", "tokens_per_batch")
    others = {name: value for name, value in stream_recipe.training.items() if name not in names}
    with raises(UsageError, seen="data.streaming", expected="training.tokens_per_update"):
        replace(stream_recipe, training=others)


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("optimizer.pt", "files.json")]


@pytest.mark.parametrize("damaged", ["model.safetensors", *OTHERS])
def test_truncated_checkpoint_is_skipped_on_resume(short, corpus, tmp_path, monkeypatch, damaged):
    state = run_until(make_recipe(corpus), tmp_path / "model", 2 * STEPS, monkeypatch)
    file = state / f"checkpoint-{2 * STEPS}" / damaged
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    train(make_recipe(corpus), tmp_path / "model")
    assert are_equal(weights(tmp_path / "model"), weights(short[0]))


def test_state_of_different_recipe_raises_without_restart(corpus, tmp_path, monkeypatch):
    run_until(make_recipe(corpus), tmp_path / "model", STEPS, monkeypatch)
    other = make_recipe(corpus, seed=1, num_train_epochs=1)
    for force in (False, True):  # force only replaces the result
        with raises(ValueError, seen=("training.num_train_epochs", 3), expected=(1, "--restart")):
            train(other, tmp_path / "model", force)
    train(other, tmp_path / "model", restart=True)
    assert (tmp_path / "model/model.safetensors").is_file()
    assert (tmp_path / f"model-run.kept-1/checkpoint-{STEPS}/model.safetensors").is_file()


def test_finished_run_rewrites_result_without_updates(short, corpus, tmp_path, monkeypatch):
    """Move the result away, or replace it by force, with other generation settings."""
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


def test_run_with_open_ended_schedule_can_be_extended(corpus, tmp_path, monkeypatch):
    """Compare the weights with a run that had this length from the beginning."""
    settings = dict(save_strategy="steps", save_steps=5, tokens_per_batch=512)
    train(make_recipe(corpus, max_steps=10, **settings), tmp_path / "long")
    train(make_recipe(corpus, max_steps=5, **settings), tmp_path / "model")
    train(make_recipe(corpus, max_steps=10, **settings), tmp_path / "model", force=True)
    assert are_equal(weights(tmp_path / "model"), weights(tmp_path / "long"))


@pytest.mark.slow
def test_killed_run_resumes_to_same_weights(short, corpus, tmp_path):
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


@pytest.mark.parametrize("restart", [[], ["--restart"]], ids=["", "restart"])
def test_interrupted_command_says_how_it_resumes_from_a_complete_checkpoint(
    tmp_path, monkeypatch, capsys, restart
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", interrupted)
    command, state = ["train", "trec", "--output", str(tmp_path / "out")], tmp_path / "out-run"
    for updates, content in ((3, None), (7, "{}"), (5, '{"model.safetensors": "hash"}')):
        (state / f"checkpoint-{updates}").mkdir(parents=True)
        if content is not None:
            (state / f"checkpoint-{updates}" / "files.json").write_text(content)
        with pytest.raises(SystemExit) as end:
            main(command + restart)
        assert end.value.code == 130
        *before, message = capsys.readouterr().err.splitlines()
        if updates != 5:
            assert message == "vanilla-transformer: interrupted" and before == []
    without = " without --restart" if restart else ""
    resumes = f"the same command{without} resumes the run in {state}, after 5 updates"
    assert message == f"vanilla-transformer: interrupted; {resumes}"
    assert before == ([] if restart else [f"Resuming the run in {state}, after 5 updates"])
