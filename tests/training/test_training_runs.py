"""Tests of training runs: they learn, report and stop on errors."""

import ast
import json
import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import toy_corpus, write_corpus
from messages import raises
from training_runs import SMALL, STEPS, are_equal, history, make_recipe, weights
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, TrainerCallback
from transformers.generation import utils as generation

from vanilla_transformer import VanillaSeq2SeqConfig, VanillaSeq2SeqForConditionalGeneration
from vanilla_transformer.training import run as runs
from vanilla_transformer.training import trainer
from vanilla_transformer.training.callbacks import Watch
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train

# ----------------------------------------------------------------------------------------- learning


def test_training_learns_to_translate(corpus, tmp_path):
    corpus = write_corpus(tmp_path, "train", 300, seed=0), corpus[1]
    output, no_dropout = tmp_path / "model", {"dropout": 0.0, "embedding_dropout": 0.0}
    settings = dict(num_train_epochs=20, average_last=2, eval_strategy="steps", eval_steps=70)
    fast = dict(tokens_per_batch=512, learning_rate=1e-2, label_smoothing_factor=0.0)
    recipe = make_recipe(corpus, no_dropout, **settings, **fast)
    recipe.generation |= {"num_beams": 5, "max_new_tokens": 64}
    metrics = train(recipe, output)
    assert metrics["validation_bleu"] > 50
    assert metrics["validation_chrf"] > 50
    assert metrics["validation_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|")
    losses = [entry["eval_loss"] for entry in history(output) if "eval_loss" in entry]
    assert losses[0] > 1.2 * losses[-1]
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(output),
        AutoTokenizer.from_pretrained(output),
    )
    assert (model.generation_config.num_beams, model.generation_config.max_new_tokens) == (5, 64)
    assert (model.config.use_cache, model.generation_config.max_length) == (True, None)
    pairs = toy_corpus(20, seed=2)
    outputs = model.generate(
        **tokenizer([source for source, _ in pairs], return_tensors="pt", padding=True)
    )
    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    assert sum(text == target for text, (_, target) in zip(texts, pairs, strict=True)) >= 5


def test_same_seed_gives_same_weights_and_other_seed_does_not(short, corpus, tmp_path):
    train(make_recipe(corpus), tmp_path / "again")
    assert are_equal(weights(tmp_path / "again"), weights(short[0]))
    assert (tmp_path / "again/tokenizer.json").read_text() == (
        short[0] / "tokenizer.json"
    ).read_text()
    train(make_recipe(corpus, seed=1), tmp_path / "other")
    assert not are_equal(weights(tmp_path / "other"), weights(short[0]))


def test_report_contains_recipe_metrics_and_tokens_per_update(short, corpus):
    output, metrics = short
    report = json.loads((output / "training.json").read_text())
    assert report["recipe"]["training"]["learning_rate"] == 5e-3
    assert report["metrics"] == metrics
    assert report["parameters"] == sum(tensor.numel() for tensor in weights(output).values())
    records = [record for record in report["history"] if "tokens" in record]
    tokenizer = AutoTokenizer.from_pretrained(output)
    lines = [line for file in corpus[0] for line in file.read_text().splitlines()]
    assert sum(record["tokens"] for record in records) == pytest.approx(
        3 * sum(map(len, tokenizer(lines)["input_ids"])), rel=0.1
    )
    assert all(record["tokens_per_second"] > 0 for record in records)
    assert report["seconds"] == pytest.approx(
        sum(record["tokens"] / record["tokens_per_second"] for record in records)
    )
    assert (
        report["hardware"] == f"1 process, each on the CPU with {torch.get_num_threads()} threads"
    )


def test_log_counts_tokens_since_last_log_without_padding():
    model = VanillaSeq2SeqForConditionalGeneration(
        VanillaSeq2SeqConfig(vocab_size=60, **SMALL)
    ).train()
    watch, arguments, state = (
        Watch(model, None),
        Namespace(device="cpu", world_size=1),
        Namespace(log_history=[{}]),
    )
    ids = torch.tensor([[5, 6, 2], [7, 2, 0]])
    for batches in ([ids, ids], [ids[:1]], []):
        for rows in batches:
            watch.forward_hook(model, (), {"input_ids": rows, "decoder_input_ids": rows[:, :1]}, {})
        watch.on_log(arguments, state, None, logs={"loss": 1.0})
        assert state.log_history[-1]["tokens"] == sum(
            int((rows != 0).sum()) + len(rows) for rows in batches
        )


def test_float16_weights_load_as_float32(short, corpus, tmp_path):
    recipe = make_recipe(corpus)
    recipe.save_dtype = "float16"
    train(recipe, tmp_path / "half")
    assert are_equal(
        weights(tmp_path / "half"),
        {name: weight.half() for name, weight in weights(short[0]).items()},
    )
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "half").dtype == torch.float32


@pytest.mark.slow
def test_early_stopping_ends_run_with_best_weights(unimproved, tmp_path):
    train(unimproved, tmp_path / "model")
    assert max(record["epoch"] for record in history(tmp_path / "model")) == 3
    best, last = (tmp_path / f"model-run/checkpoint-{epoch * STEPS}" for epoch in (1, 3))
    assert are_equal(weights(tmp_path / "model"), weights(best))
    assert not are_equal(weights(best), weights(last))


# ------------------------------------------------------------------------------ errors and warnings


class Poison(TrainerCallback):
    """A callback that sets a weight to NaN after some steps."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == STEPS + 2:
            with torch.no_grad():
                model.lm_head.weight[5, 0] = math.nan


def test_nonfinite_loss_error_quotes_batch_and_keeps_checkpoints(corpus, tmp_path, monkeypatch):
    callbacks = trainer.callbacks
    monkeypatch.setattr(trainer, "callbacks", lambda recipe: [*callbacks(recipe), Poison()])
    with raises(FloatingPointError, seen="nan") as raised:
        train(make_recipe(corpus), tmp_path / "model")
    count, _, rows = str(raised.value).partition("the batch of ")[2].partition(" rows ")
    texts = ast.literal_eval(rows)
    assert int(count) == len(texts) > 0
    assert set(texts) <= set(corpus[0][0].read_text().splitlines())
    [checkpoint] = (tmp_path / "model-run").glob("checkpoint-*")
    assert all(weight.isfinite().all() for weight in weights(checkpoint).values())


def test_generation_during_training_does_not_warn(corpus, tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(generation.logger, "warning", warned.append)
    train(
        make_recipe(
            corpus, num_train_epochs=1, eval_strategy="epoch", per_device_eval_batch_size=8
        ),
        tmp_path / "model",
    )
    assert not warned
    assert "max_length" not in json.loads(
        (tmp_path / "model" / "generation_config.json").read_text()
    )


def test_lines_longer_than_position_table_are_dropped_and_counted(corpus, tmp_path, capsys):
    table = {"position_embedding_type": "learned", "max_position_embeddings": 16}
    _, _, rows = prepare(make_recipe(corpus, table))
    kept = rows["train"]
    assert 0 < len(kept) < 150
    assert (
        f"{150 - len(kept)} of 150 train rows have more than 16 tokens, up to "
        in capsys.readouterr().out
    )
    assert max(max(map(len, kept["input_ids"])), max(map(len, kept["labels"]))) == 16
    with raises(ValueError, seen=(150, 3)):
        prepare(make_recipe(corpus, table | {"max_position_embeddings": 3}))


def test_vocabulary_size_mismatch_raises(corpus):
    with raises(ValueError, seen=("tokenizer.vocab_size", 60), expected=("model.vocab_size", 61)):
        make_recipe(corpus, {"vocab_size": 61})
    characters = replace(
        make_recipe(corpus), tokenizer={"kind": "character"}, model={**SMALL, "vocab_size": 61}
    )
    with raises(ValueError, seen="tokenizer", expected=("vocab_size", 61)):
        prepare(characters)


def test_existing_output_raises_before_text_is_read(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/notes").touch()
    empty = (tmp_path / "empty.en", tmp_path / "empty.de")  # an error once it is read
    for path in empty:
        path.touch()
    with raises(FileExistsError, expected="--force"):
        train(make_recipe((empty, empty)), tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "empty.en", "empty.de"}


def test_recipe_without_training_text_raises(corpus):
    with raises(ValueError, expected="train"):
        prepare(Recipe("translation"))


def test_full_disk_leaves_no_partial_output(corpus, tmp_path, monkeypatch):
    def full(prepared, directory: Path, dtype):
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "save_checkpoint", full)
    with raises(OSError, seen="model"):
        train(make_recipe(corpus, num_train_epochs=1), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model-run"]


def test_metrics_are_of_the_weights_that_are_saved(short, corpus, tmp_path):
    recipe = make_recipe(corpus)
    recipe.save_dtype = "float16"
    metrics = train(recipe, tmp_path / "half")
    exact = short[1]["validation_loss"]
    assert metrics["validation_loss"] != exact
    assert metrics["validation_loss"] == pytest.approx(exact, rel=1e-3)
