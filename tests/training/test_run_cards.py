"""Tests of the model card, the recipe and the curves that are saved with the weights."""

import json
import re
import sys
import time
import tomllib
from dataclasses import asdict

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from messages import raises
from PIL import Image
from torch._dynamo.utils import counters
from training_runs import SMALL, STEPS, make_recipe
from transformers import TrainingArguments

from vanilla_transformer import VanillaSeq2SeqConfig, VanillaSeq2SeqForConditionalGeneration
from vanilla_transformer.training import trainer
from vanilla_transformer.training.card import model_card, toml
from vanilla_transformer.training.curves import draw_curves, panels
from vanilla_transformer.training.dry_run import dry_run
from vanilla_transformer.training.recipe import FOLDER, Recipe, read_recipe
from vanilla_transformer.training.run import train


def test_card_contains_scores_recipe_and_settings(short):
    output, metrics = short
    card, report = (
        ModelCard.load(output / "README.md"),
        json.loads((output / "training.json").read_text()),
    )
    assert (card.data.library_name, card.data.pipeline_tag, card.data.model_name) == (
        "transformers",
        "translation",
        "model",
    )
    assert card.data.tags == ["vanilla-transformer", "vanilla-seq2seq"]
    results = {
        (result.dataset_split, result.metric_type): result for result in card.data.eval_results
    }
    assert {key: result.metric_value for key, result in results.items()} == {
        ("validation", name): float(f"{metrics[f'validation_{name}']:.6g}")
        for name in ("loss", "bleu", "chrf")
    }
    assert {result.dataset_name for result in results.values()} == {"val.en, val.de"}
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([\d.]+) \|$", card.text, re.MULTILINE)
    assert {(split, metric): float(value) for split, metric, value in rows} == {
        key: float(f"{result.metric_value:.4g}") for key, result in results.items()
    }
    assert f"`{metrics['validation_signature']}`" in card.text
    assert f"with {report['parameters']:,} parameters: encoder_layers=1, " in card.text
    assert (
        f"The seed is 0. The updates took {report['seconds']:,.0f} seconds ({report['hardware']})."
        in card.text
    )
    recipe = tomllib.loads(re.search(r"```toml\n(.*?)```", card.text, re.DOTALL)[1])
    assert Recipe(**recipe) == Recipe(**report["recipe"])
    assert "![Loss, learning rate and metrics over updates](curves.png)" in card.text


def test_card_contains_command_and_states_missing_metrics(short, monkeypatch):
    report = json.loads((short[0] / "training.json").read_text()) | {"metrics": {}}
    report["recipe"]["model"] |= {"path": "pretrained", "sep_token_id": None}
    model = VanillaSeq2SeqForConditionalGeneration(VanillaSeq2SeqConfig(vocab_size=60, **SMALL))
    monkeypatch.setattr(
        sys, "argv", ["/bin/vanilla-transformer", "train", "translation", "--output", "a model"]
    )
    card = model_card(report, model, "name", has_curves=False)
    assert "\nvanilla-transformer train translation --output 'a model'\n" in card.text
    assert "Trained from `pretrained`" in card.text
    assert "neither validation nor test text" in card.text
    assert "sep_token_id" not in card.text and "curves" not in card.text


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_written_recipe_equals_read_recipe(path):
    recipe = read_recipe(path.stem)
    assert Recipe(**tomllib.loads(toml(asdict(recipe)))) == recipe


def test_curves_are_saved_with_weights(short):
    with Image.open(short[0] / "curves.png") as image:
        assert (image.format, image.size) == ("PNG", (1000, 300))  # the loss and the learning rate
        assert len(image.getcolors(maxcolors=2**20)) > 100


def test_curves_contain_logged_values(tmp_path):
    history = [
        {"loss": 2.0, "learning_rate": 0.1, "grad_norm": 3.0, "step": 1, "tokens": 7},
        {
            "eval_loss": 2.5,
            "eval_bleu": 1.0,
            "eval_signature": "tok:13a",
            "eval_runtime": 9.0,
            "step": 1,
        },
        {"loss": 1.0, "learning_rate": 0.2, "step": 2},
        {"train_loss": 1.5, "step": 2},
        {"validation_bleu": 4.0, "step": 2},
    ]
    assert panels(history) == {
        "loss": {"training": [(1, 2.0), (2, 1.0)], "validation": [(1, 2.5)]},
        "learning_rate": {"training": [(1, 0.1), (2, 0.2)]},
        "bleu": {"validation": [(1, 1.0)]},
    }
    assert list(panels(history)) == ["loss", "learning_rate", "bleu"]
    assert not draw_curves(history[-2:], tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == []


def test_curves_with_fewer_than_50_points_have_markers(monkeypatch):
    drawn, history = [], [{"loss": 1.0, "step": step} for step in range(50)]
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, path, **options: drawn.append(figure)
    )
    assert draw_curves(history[:49], "few.png") and draw_curves(history, "many.png")
    assert [figure.axes[0].lines[0].get_marker() for figure in drawn] == [".", "None"]


def test_augmentation_seed_defaults_to_trainer_default():
    rows, result = Dataset.from_dict({"input_ids": [[1], [2], [3]]}), []
    for training_settings in (
        {},
        {"seed": TrainingArguments.seed},
        {"seed": TrainingArguments.seed + 1},
    ):
        seen = trainer.training_dataset(
            rows,
            Recipe("causal-lm", training=training_settings),
            lambda row, random: (random.random(),),
        )
        result.append(seen.__getitems__([0, 1, 2]))
    assert result[0] == result[1] != result[2]


def test_dry_run_reports_plan_and_writes_nothing(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = {line.split()[0]: line for line in dry_run(make_recipe(corpus)).splitlines()}
    assert lines["train"].split()[1] == "150"
    assert "hidden_size=32" in lines["shape"]
    assert lines["updates"].split()[1] == str(3 * STEPS)
    assert "hours" in lines["time"] and "GB" in lines["memory"]
    assert list(tmp_path.iterdir()) == []


def test_dry_run_time_is_estimated_from_measured_updates(corpus):
    """Estimate the time of a run that would take hours.

    The estimate is based on two measured updates, which take only a part of the call.
    """
    start, epochs = time.monotonic(), 10**6
    lines = {
        line.split()[0]: line
        for line in dry_run(make_recipe(corpus, num_train_epochs=epochs)).splitlines()
    }
    elapsed = time.monotonic() - start
    assert 1e-4 < float(lines["time"].split()[1]) * 3600 / (epochs * STEPS) < elapsed / 2


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_recipe_is_read_by_name_or_path_and_begins_with_comment(path):
    assert read_recipe(path.stem) == read_recipe(str(path))
    assert path.read_text().startswith("# ")


def test_bpe_dropout_for_masked_lm_raises():
    with raises(ValueError, seen=("tokenizer.bpe_dropout", 0.1), expected=(0, "masked-lm")):
        Recipe("masked-lm", tokenizer={"bpe_dropout": 0.1})


def test_changes_override_recipe():
    recipe = read_recipe(
        "translation", {"training.seed": 5, "data.directory": "x", "save_dtype": "float16"}
    )
    assert (recipe.training["seed"], recipe.data["directory"], recipe.save_dtype) == (
        5,
        "x",
        "float16",
    )
    assert (
        recipe.training["tokens_per_update"]
        == read_recipe("translation").training["tokens_per_update"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_compiled_run_compiles_two_graphs_for_all_shapes(corpus, tmp_path, smoothing):
    """Compile once for the first shape and once for all others, without graph breaks."""
    torch.compiler.reset()
    counters.clear()
    settings = dict(
        torch_compile=True,
        torch_compile_backend="aot_eager",
        num_train_epochs=1,
        save_strategy="no",
    )
    train(make_recipe(corpus, label_smoothing_factor=smoothing, **settings), tmp_path / "model")
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
