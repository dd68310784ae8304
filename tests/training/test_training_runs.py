"""Training runs: they learn, stop and go on, and give what the recipe says."""

import json
import math
import re
import signal
import subprocess
import sys
import time
import tomllib
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import toy_corpus, write_corpus
from datasets import Dataset, DatasetDict
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch.distributions import Categorical, kl_divergence
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, TrainerCallback, TrainingArguments
from transformers.generation import utils as generation
from transformers.trainer_pt_utils import LabelSmoother

from vanilla_transformer import VanillaSeq2SeqConfig, VanillaSeq2SeqForConditionalGeneration
from vanilla_transformer.training import run as runs
from vanilla_transformer.training import trainer
from vanilla_transformer.training.averaging import average, average_weights
from vanilla_transformer.training.callbacks import Watch
from vanilla_transformer.training.card import model_card, toml
from vanilla_transformer.training.curves import draw_curves, panels
from vanilla_transformer.training.dry_run import dry_run
from vanilla_transformer.training.loss import loss_function
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import FOLDER, Recipe, read_recipe
from vanilla_transformer.training.run import train

SMALL = dict(
    hidden_size=32, intermediate_size=64, num_attention_heads=4, encoder_layers=1, decoder_layers=1
)
ENCODER = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=1)
STEPS = 12  # updates of an epoch of the corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """(train files, validation files)."""
    directory = tmp_path_factory.mktemp("corpus")
    return write_corpus(directory, "train", 300, seed=0), write_corpus(directory, "val", 30, seed=1)


def recipe_of(corpus, model=None, **training):
    """Three epochs by default."""
    settings = dict(
        tokens_per_update=512, tokens_per_batch=256, num_train_epochs=3, learning_rate=5e-3,
        warmup_steps=20, lr_scheduler_type="inverse_sqrt", label_smoothing_factor=0.1,
        save_strategy="epoch", logging_steps=5, seed=0,
    )  # fmt: skip
    data = {"train": list(map(str, corpus[0])), "validation": list(map(str, corpus[1]))}
    tokenizer, generation = (
        {"kind": "bpe", "vocab_size": 60},
        {"num_beams": 5, "max_new_tokens": 64},
    )
    return Recipe(
        "translation",
        data,
        tokenizer,
        {**SMALL, **(model or {})},
        {**settings, **training},
        generation,
    )


@pytest.fixture
def unimproved(corpus):
    """A recipe of nine epochs whose run gets no better than in the first, and waits for two."""
    settings = dict(
        learning_rate=0.0, num_train_epochs=9, eval_strategy="epoch", early_stopping_patience=2
    )
    return recipe_of(corpus, **settings, load_best_model_at_end=True, metric_for_best_model="bleu")


@pytest.fixture(scope="module")
def short(corpus, tmp_path_factory):
    """A run of three epochs, undisturbed: its directory and metrics."""
    output = tmp_path_factory.mktemp("short") / "model"
    return output, train(recipe_of(corpus), output)


def weights(output):
    return load_file(output / "model.safetensors")


def are_equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def history(output):
    return json.loads((output / "training.json").read_text())["history"]


# ----------------------------------------------------------------------------------------- learning


def test_training_learns_to_translate(corpus, tmp_path):
    output, still = tmp_path / "model", {"dropout": 0.0, "embedding_dropout": 0.0}
    settings = dict(num_train_epochs=40, average_last=2, eval_strategy="steps", eval_steps=160)
    metrics = train(recipe_of(corpus, still, **settings), output)
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


def test_the_same_seed_gives_the_same_weights_and_another_one_others(short, corpus, tmp_path):
    train(recipe_of(corpus), tmp_path / "again")
    assert are_equal(weights(tmp_path / "again"), weights(short[0]))
    assert (tmp_path / "again/tokenizer.json").read_text() == (
        short[0] / "tokenizer.json"
    ).read_text()
    train(recipe_of(corpus, seed=1), tmp_path / "other")
    assert not are_equal(weights(tmp_path / "other"), weights(short[0]))


def test_the_report_has_the_recipe_what_it_gave_and_the_tokens_of_every_update(short, corpus):
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


def test_the_log_has_the_tokens_since_the_last_one_without_padding():
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


def test_half_stores_float16_that_loads_as_float32(short, corpus, tmp_path):
    recipe = recipe_of(corpus)
    recipe.save_dtype = "float16"
    train(recipe, tmp_path / "half")
    assert are_equal(
        weights(tmp_path / "half"),
        {name: weight.half() for name, weight in weights(short[0]).items()},
    )
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "half").dtype == torch.float32


@pytest.mark.slow
def test_early_stopping_ends_a_run_that_gets_no_better_with_its_best_weights(unimproved, tmp_path):
    train(unimproved, tmp_path / "model")
    assert max(record["epoch"] for record in history(tmp_path / "model")) == 3


# ------------------------------------------------------------------------------- beside the weights


def test_the_card_has_the_scores_the_recipe_and_the_settings_of_the_report(short):
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
        ("validation", name): metrics[f"validation_{name}"] for name in ("loss", "bleu", "chrf")
    }
    assert {result.dataset_name for result in results.values()} == {"val.en, val.de"}
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([\d.]+) \|$", card.text, re.MULTILINE)
    assert {(split, metric): float(value) for split, metric, value in rows} == {
        key: float(f"{result.metric_value:.4g}") for key, result in results.items()
    }
    assert f"`{metrics['validation_signature']}`" in card.text
    assert f"with {report['parameters']:,} parameters: encoder_layers=1, " in card.text
    assert (
        f"Seed 0; {report['seconds']:,.0f} seconds of updates, {report['hardware']}; " in card.text
    )
    recipe = tomllib.loads(re.search(r"```toml\n(.*?)```", card.text, re.DOTALL)[1])
    assert Recipe(**recipe) == Recipe(**report["recipe"])
    assert "![Loss, learning rate and metrics over updates](curves.png)" in card.text


def test_the_card_says_how_the_run_was_started_and_what_was_not_measured(short, monkeypatch):
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
def test_a_recipe_that_is_written_is_the_one_that_was_read(path):
    recipe = read_recipe(path.stem)
    assert Recipe(**tomllib.loads(toml(asdict(recipe)))) == recipe


def test_curves_are_drawn_beside_the_weights(short):
    with Image.open(short[0] / "curves.png") as image:
        assert (image.format, image.size) == ("PNG", (1000, 300))  # the loss and the learning rate
        assert len(image.getcolors(maxcolors=2**20)) > 100


def test_the_curves_are_those_of_the_log(tmp_path):
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


def test_points_are_marked_where_they_are_fewer_than_50(monkeypatch):
    drawn, history = [], [{"loss": 1.0, "step": step} for step in range(50)]
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: drawn.append(figure))
    assert draw_curves(history[:49], "few.png") and draw_curves(history, "many.png")
    assert [figure.axes[0].lines[0].get_marker() for figure in drawn] == [".", "None"]


def test_without_a_seed_rows_are_augmented_by_that_of_transformers_default():
    rows, found = Dataset.from_dict({"input_ids": [[1], [2], [3]]}), []
    for given in ({}, {"seed": TrainingArguments.seed}, {"seed": TrainingArguments.seed + 1}):
        seen = trainer.training_dataset(
            rows, Recipe("causal-lm", training=given), lambda row, random: (random.random(),)
        )
        found.append(seen.__getitems__([0, 1, 2]))
    assert found[0] == found[1] != found[2]


# --------------------------------------------------------------------------------------- the pieces


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
@pytest.mark.parametrize("items", [None, 40])
def test_the_smoothed_loss_and_its_gradient_are_those_of_transformers(smoothing, items):
    """Of more rows than are looked at together; theirs in float64. In evaluation the logits stay
    what they are."""
    logits, labels = (
        torch.randn(30, 9, 11, dtype=torch.float64, requires_grad=True),
        torch.randint(11, (30, 9)),
    )
    labels[0, 3:] = -100
    expected = LabelSmoother(smoothing)({"logits": logits}, labels, num_items_in_batch=items)
    expected.backward()
    found, seen = logits.detach().float().requires_grad_(), []
    loss = loss_function(seen.append, smoothing)
    with torch.no_grad():
        assert loss({"logits": found}, labels, items).item() == pytest.approx(
            expected.item(), rel=1e-5
        )
    assert torch.equal(found, logits.float())
    value = loss({"logits": found}, labels, items)
    value.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert [total.item() for total in seen] == pytest.approx(
        2 * [value.item() * (items or 264)], rel=1e-5
    )
    torch.testing.assert_close(found.grad, logits.grad.float(), rtol=1e-4, atol=1e-7)


def test_there_is_no_smoothed_loss_without_smoothing():
    assert loss_function(None, 0.0) is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("items", [None, 500])
def test_r_drop_adds_the_divergences_of_two_passes_of_which_no_label_is_padding(smoothing, items):
    """Liang et al. 2021: for each label the cross-entropies of both passes, and alpha / 2 times the
    divergences both ways; the mean is over the labels of both. The gradient is autograd's, in
    float64, of more rows than are looked at together."""
    logits, labels = (
        torch.randn(2, 30, 9, 11, dtype=torch.float64, requires_grad=True),
        torch.randint(11, (30, 9)),
    )
    labels[0, 3:] = -100
    first, second = (Categorical(logits=part[labels != -100]) for part in logits)
    divergences = (kl_divergence(first, second) + kl_divergence(second, first)).sum()
    twice, count = torch.cat([labels, labels]), items or 528
    plain = LabelSmoother(smoothing)({"logits": logits.flatten(0, 1)}, twice)
    expected = (plain * 528 + 1.5 * divergences) / count
    expected.backward()
    found = logits.detach().float().flatten(0, 1).requires_grad_()
    loss = loss_function(lambda total: None, smoothing, r_drop=3.0)
    with torch.no_grad():
        assert loss({"logits": found}, twice).item() == pytest.approx(plain.item())
    value = loss({"logits": found}, twice, items)
    value.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(found.grad, logits.grad.float().flatten(0, 1), rtol=1e-4, atol=1e-7)


def test_with_r_drop_a_model_sees_each_row_twice(short, corpus, tmp_path):
    train(recipe_of(corpus, r_drop=1.0), tmp_path / "model")
    tokens = [
        sum(record["tokens"] for record in history(path) if "tokens" in record)
        for path in (tmp_path / "model", short[0])
    ]
    assert tokens[0] == 2 * tokens[1]
    assert not are_equal(weights(tmp_path / "model"), weights(short[0]))
    with pytest.raises(
        ValueError, match="r_drop is 1.0, expected 0: it takes batches by tokens_per_update"
    ):
        Recipe("causal-lm", training={"r_drop": 1.0, "per_device_train_batch_size": 1})


def is_mean_of(directory, checkpoints):
    expected = dict(average_weights(checkpoints).named_parameters())
    return all(torch.equal(weight, expected[name]) for name, weight in weights(directory).items())


def test_the_average_is_the_mean_of_every_weight(short, corpus, tmp_path):
    state = short[0].with_name("model-run")
    paths = sorted(state.glob("checkpoint-*"))
    assert len(paths) == 2
    found, ours = [weights(path) for path in paths], dict(average_weights(paths).named_parameters())
    for name in found[0]:
        expected = sum(tensors[name].numpy().astype(np.float64) for tensors in found) / 2
        np.testing.assert_allclose(ours[name].detach().numpy(), expected, rtol=1e-6, atol=1e-9)
    average(paths, tmp_path / "mean")
    assert are_equal(
        weights(tmp_path / "mean"),
        {name: ours[name].detach() for name in weights(tmp_path / "mean")},
    )
    assert (tmp_path / "mean/tokenizer.json").is_file()
    with pytest.raises(FileExistsError, match="--force"):
        average(paths, tmp_path / "mean")


def test_the_average_of_one_checkpoint_is_that_checkpoint(short):
    found, expected = dict(average_weights(short[:1]).named_parameters()), weights(short[0])
    assert are_equal({name: found[name].detach() for name in expected}, expected)


def test_a_run_that_gets_no_better_ends_and_gives_the_mean_of_its_last_checkpoints(
    corpus, tmp_path
):
    settings = dict(
        num_train_epochs=9,
        eval_strategy="epoch",
        early_stopping_patience=1,
        metric_for_best_model="loss",
    )
    # of a loss, which falls
    recipe = recipe_of(corpus, **settings, greater_is_better=True, average_last=2)
    train(recipe, tmp_path / "model")
    paths = sorted((tmp_path / "model-run").glob("checkpoint-*"))
    assert [path.name for path in paths] == [f"checkpoint-{STEPS}", f"checkpoint-{2 * STEPS}"]
    assert not are_equal(*map(weights, paths))
    assert is_mean_of(tmp_path / "model", paths)


def test_models_of_other_shapes_have_no_average(short, tmp_path):
    other = VanillaSeq2SeqConfig(vocab_size=60, **{**SMALL, "intermediate_size": 48})
    VanillaSeq2SeqForConditionalGeneration(other).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="other has another architecture or other shapes"):
        average_weights([short[0], tmp_path / "other"])


def test_averaging_the_last_checkpoints_is_what_a_run_ends_with(short, corpus, tmp_path):
    train(recipe_of(corpus, average_last=2), tmp_path / "model")
    checkpoints = sorted(short[0].with_name("model-run").glob("checkpoint-*"))
    assert is_mean_of(tmp_path / "model", checkpoints)


def test_a_dry_run_says_what_would_happen_and_writes_nothing(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = {line.split()[0]: line for line in dry_run(recipe_of(corpus)).splitlines()}
    assert lines["train"].split()[1] == "300"
    assert "hidden_size=32" in lines["shape"]
    assert lines["updates"].split()[1] == str(3 * STEPS)
    assert "hours" in lines["time"] and "GB" in lines["memory"]
    assert list(tmp_path.iterdir()) == []


def test_the_time_that_a_dry_run_tells_is_that_of_the_updates_it_tried(corpus):
    """Of as many as take hours. Those that were tried, two of which count, took a part of the
    call."""
    start, epochs = time.monotonic(), 10**6
    lines = {
        line.split()[0]: line
        for line in dry_run(recipe_of(corpus, num_train_epochs=epochs)).splitlines()
    }
    elapsed = time.monotonic() - start
    assert 1e-4 < float(lines["time"].split()[1]) * 3600 / (epochs * STEPS) < elapsed / 2


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_read_and_says_in_its_first_line_what_it_is(path):
    assert read_recipe(path.stem) == read_recipe(str(path))
    assert path.read_text().startswith("# ")


def test_tasks_whose_subwords_are_always_the_same_have_no_bpe_dropout():
    with pytest.raises(
        ValueError,
        match=(
            "tokenizer.bpe_dropout is 0.1, expected 0: the subwords of masked-lm are always "
            "the same"
        ),
    ):
        Recipe("masked-lm", tokenizer={"bpe_dropout": 0.1})


def test_changes_go_over_a_recipe():
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
def test_a_compiled_run_compiles_twice_for_all_its_shapes(corpus, tmp_path, smoothing):
    """Once for the first, once for all others; nothing of the run itself is in the graph."""
    torch.compiler.reset()
    counters.clear()
    settings = dict(
        torch_compile=True,
        torch_compile_backend="aot_eager",
        num_train_epochs=1,
        save_strategy="no",
    )
    train(recipe_of(corpus, label_smoothing_factor=smoothing, **settings), tmp_path / "model")
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


# ----------------------------------------------------------------------------------- stop and go on


class Stop(Exception):
    """In the place of a process that is killed."""


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
    recipe = recipe_of(corpus, save_strategy="steps", save_steps=step)
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
    recipe = recipe_of(corpus, max_steps=steps, save_strategy="steps", save_steps=5, average_last=2)
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
    """In the second epoch: BPE-dropout, and masks."""
    recipe = recipe_of(corpus, num_train_epochs=2, save_strategy="steps", save_steps=STEPS + 3)
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
    recipe = recipe_of(
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
    with pytest.raises(
        ValueError,
        match="position_embedding_type is 'learned', expected one without a maximum length",
    ):
        prepare(replace(streamed, model={**SMALL, "position_embedding_type": "learned"}))
    del streamed.training["tokens_per_update"], streamed.training["tokens_per_batch"]
    with pytest.raises(
        ValueError,
        match="batches of a stream are by token count: expected training.tokens_per_update",
    ):
        train(streamed, tmp_path / "model")


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("optimizer.pt", "files.json")]


@pytest.mark.parametrize("damaged", ["model.safetensors", *OTHERS])
def test_a_checkpoint_that_was_cut_short_is_passed_over(
    short, corpus, tmp_path, monkeypatch, damaged
):
    state = stopped(recipe_of(corpus), tmp_path / "model", 2 * STEPS, monkeypatch)
    file = state / f"checkpoint-{2 * STEPS}" / damaged
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    train(recipe_of(corpus), tmp_path / "model")
    assert are_equal(weights(tmp_path / "model"), weights(short[0]))


def test_the_state_of_another_recipe_is_refused_by_what_differs(corpus, tmp_path, monkeypatch):
    stopped(recipe_of(corpus), tmp_path / "model", STEPS, monkeypatch)
    other = recipe_of(corpus, seed=1, num_train_epochs=1)
    for force in (False, True):  # which is about the result
        with pytest.raises(
            ValueError,
            match="a run with training.num_train_epochs=3, expected 1: --restart moves it aside",
        ):
            train(other, tmp_path / "model", force)
    train(other, tmp_path / "model", restart=True)
    assert (tmp_path / "model/model.safetensors").is_file()
    assert (tmp_path / f"model-run.kept-1/checkpoint-{STEPS}/model.safetensors").is_file()


def test_a_finished_run_gives_its_result_again_without_an_update(
    short, corpus, tmp_path, monkeypatch
):
    """Where it was moved to, or by force where it is; with other settings of generation."""
    output = tmp_path / "model"
    train(recipe_of(corpus), output)
    output.rename(tmp_path / "moved")
    seen, callbacks = StopAt(), trainer.callbacks
    monkeypatch.setattr(trainer, "callbacks", lambda recipe: [*callbacks(recipe), seen])
    for force, beams in ((False, 5), (True, 2)):
        train(
            replace(recipe_of(corpus), generation={"num_beams": beams, "max_new_tokens": 64}),
            output,
            force,
        )
        assert are_equal(weights(output), weights(short[0]))
        assert json.loads((output / "generation_config.json").read_text())["num_beams"] == beams
    assert seen.steps == []


def test_a_run_whose_schedule_has_no_end_is_made_longer(corpus, tmp_path, monkeypatch):
    """To the weights of one that was begun as long."""
    settings = dict(save_strategy="steps", save_steps=5, tokens_per_batch=512)
    train(recipe_of(corpus, max_steps=10, **settings), tmp_path / "long")
    train(recipe_of(corpus, max_steps=5, **settings), tmp_path / "model")
    train(recipe_of(corpus, max_steps=10, **settings), tmp_path / "model", force=True)
    assert are_equal(weights(tmp_path / "model"), weights(tmp_path / "long"))


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_goes_on_to_the_same_weights(short, corpus, tmp_path):
    recipe = recipe_of(corpus)
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


# ---------------------------------------------------------------------------------------- bad input


class Poison(TrainerCallback):
    """Makes a weight infinite after some steps."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == STEPS + 2:
            with torch.no_grad():
                model.lm_head.weight[5, 0] = math.nan


def test_a_loss_that_is_not_finite_stops_the_run_names_the_batch_and_leaves_the_checkpoints(
    corpus, tmp_path, monkeypatch
):
    callbacks = trainer.callbacks
    monkeypatch.setattr(trainer, "callbacks", lambda recipe: [*callbacks(recipe), Poison()])
    with pytest.raises(
        FloatingPointError,
        match=r"the loss is nan for the batch of [0-9]+ rows \['.* (sees|wants|finds) ",
    ):
        train(recipe_of(corpus), tmp_path / "model")
    [checkpoint] = (tmp_path / "model-run").glob("checkpoint-*")
    assert all(weight.isfinite().all() for weight in weights(checkpoint).values())


def test_generation_while_training_warns_of_nothing(corpus, tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(generation.logger, "warning", warned.append)
    train(
        recipe_of(corpus, num_train_epochs=1, eval_strategy="epoch", per_device_eval_batch_size=8),
        tmp_path / "model",
    )
    assert not warned
    assert "max_length" not in json.loads(
        (tmp_path / "model" / "generation_config.json").read_text()
    )


def test_lines_longer_than_the_position_table_are_counted_and_left_out(corpus, tmp_path, capsys):
    table = {"position_embedding_type": "learned", "max_position_embeddings": 16}
    _, _, rows = prepare(recipe_of(corpus, table))
    kept = rows["train"]
    assert 0 < len(kept) < 300
    assert (
        f"{300 - len(kept)} of 300 train rows have more than 16 tokens, up to "
        in capsys.readouterr().out
    )
    assert max(max(map(len, kept["input_ids"])), max(map(len, kept["labels"]))) == 16
    with pytest.raises(ValueError, match="300 of 300 train rows have more than 3 tokens"):
        prepare(recipe_of(corpus, table | {"max_position_embeddings": 3}))


def test_a_tokenizer_that_does_not_fit_is_refused_with_both_sizes(corpus):
    with pytest.raises(
        ValueError, match="tokenizer.vocab_size is 60, expected model.vocab_size=61"
    ):
        recipe_of(corpus, {"vocab_size": 61})
    characters = replace(
        recipe_of(corpus), tokenizer={"kind": "character"}, model={**SMALL, "vocab_size": 61}
    )
    with pytest.raises(
        ValueError, match="the tokenizer has 3[0-9] entries, expected vocab_size=61"
    ):
        prepare(characters)


def test_an_existing_output_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/notes").touch()
    missing = (tmp_path / "nowhere.en", tmp_path / "nowhere.de")
    with pytest.raises(FileExistsError, match=r"model exists already.*--force"):
        train(recipe_of((missing, missing)), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_recipe_without_training_text_is_refused(corpus):
    with pytest.raises(ValueError, match="no training text"):
        prepare(Recipe("translation"))


def test_no_room_on_the_disk_leaves_no_half_checkpoint_behind(corpus, tmp_path, monkeypatch):
    def full(model, tokenizer, directory: Path, dtype):
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space left"):
        train(recipe_of(corpus, num_train_epochs=1), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model-run"]
