"""Tests of scores of translations and labels, their intervals and baselines."""

import gzip
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import captions
import fine_tuning
import intervals
import linear_baseline
import numpy as np
import pytest
import sacrebleu
import scores
import standins
from checkpoints import OPINIONS, toy_corpus, write_corpus
from messages import raises

from vanilla_transformer.training.recipe import Recipe, read_recipe
from vanilla_transformer.training.run import train


def test_scores_recompute_metrics_and_exit_with_1_if_report_differs(tmp_path, capsys, monkeypatch):
    for split, count in (("train", 60), ("test", 8)):
        write_corpus(tmp_path, split, count, seed=count)
    data = {"directory": "", "train": ["train.en", "train.de"], "test": ["test.en", "test.de"]}
    shape = dict(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        encoder_layers=1,
        decoder_layers=1,
    )
    settings = dict(
        max_steps=2, per_device_train_batch_size=8, save_strategy="no", report_to="none"
    )
    recipe = Recipe(
        "translation",
        data,
        {"kind": "bpe", "vocab_size": 50},
        shape,
        settings,
        {"num_beams": 2},
        {},
        "float16",
    )
    monkeypatch.chdir(tmp_path)
    train(recipe, tmp_path / "model")
    monkeypatch.setattr(
        sys, "argv", ["scores.py", "--data", str(tmp_path), str(tmp_path / "model")]
    )
    with pytest.raises(SystemExit) as done:
        scores.main()
    assert done.value.code is None
    lines = [
        json.loads(line)
        for line in capsys.readouterr().out.splitlines()
        if line.startswith('{"model')
    ]
    assert [line["score"] for line in lines] == ["test_bleu", "test_chrf"]
    assert all(line["same"] and line["now"] == line["said"] for line in lines)
    assert all(low <= high for low, high in (line["interval"] for line in lines))
    report = json.loads((tmp_path / "model/training.json").read_text())
    report["metrics"]["test_chrf"] += 1
    (tmp_path / "model/training.json").write_text(json.dumps(report))
    with raises(SystemExit, seen=1):
        scores.main()


def test_bleu_and_chrf_intervals_match_sacrebleu(tmp_path):
    references = [target for _, target in toy_corpus(60, seed=0)]
    outputs = [
        line.replace("Hund", "Ball") if place % 3 else line for place, line in enumerate(references)
    ]
    outputs[5:20] = ["Ein Hund."] * 15
    for name, lines in (("references", references), ("outputs", outputs)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    command = [
        sys.executable,
        "-m",
        "sacrebleu",
        tmp_path / "references",
        "-i",
        tmp_path / "outputs",
        "-m",
        "bleu",
        "chrf",
    ]
    sacrebleu_output = subprocess.run(
        [*command, "--confidence", "-w", "4"], check=True, capture_output=True, text=True
    ).stdout
    for printed, metric in zip(
        json.loads(sacrebleu_output),
        (sacrebleu.metrics.BLEU(), sacrebleu.metrics.CHRF()),
        strict=True,
    ):
        mean, half = printed["confidence_mean"], printed["confidence_var"]
        assert half > 1
        assert intervals.corpus_interval(metric, outputs, references) == pytest.approx(
            (mean - half, mean + half), abs=2e-4
        )


def test_accuracy_interval_is_wilson_interval():
    right, count, z = 718, 872, 1.959964
    share = right / count
    center = share + z**2 / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    expected = [(center - half) / (1 + z**2 / count), (center + half) / (1 + z**2 / count)]
    assert intervals.accuracy_interval(right, count) == pytest.approx(expected, abs=1e-6)
    labels = np.arange(count) % 2
    actual = scores.intervals(
        SimpleNamespace(task="sequence-classification"),
        None,
        labels ^ (np.arange(count) >= right),
        labels,
    )
    assert actual == {"accuracy": intervals.accuracy_interval(right, count)}


def test_perplexity_interval_matches_delta_method():
    """The expected interval comes from the delta method, over groups of 12 blocks.

    Losses of a group have the same scale, and blocks differ in their number of labels.
    """
    rng = np.random.default_rng(0)
    losses = rng.gamma(2, 1, (32 * 12, 16)) * rng.uniform(0.5, 1.5, (32, 1)).repeat(12, axis=0)
    labels = np.where(np.arange(16) < rng.integers(4, 17, (32 * 12, 1)), 1, -100)
    losses[labels == -100] = 0
    totals, counts = (values.reshape(32, -1).sum(axis=1) for values in (losses, labels != -100))
    mean = totals.sum() / counts.sum()
    error = math.sqrt(((totals - mean * counts) ** 2).sum()) / counts.sum()
    result = scores.intervals(SimpleNamespace(task="causal-lm"), None, losses, labels)
    assert result["nll"] == pytest.approx(
        (mean - 1.96 * error, mean + 1.96 * error), abs=0.2 * error
    )
    assert result["perplexity"] == pytest.approx(tuple(math.exp(bound) for bound in result["nll"]))


def test_linear_baseline_trains_on_train_rows_and_scores_held_out_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(linear_baseline.GRID, "linearsvc__C", [0.5, 4.0])
    held_out = [
        "bad the music bores",
        "bad the music fails",
        "good the music wins",
        "good the music fails",
    ]
    for name, lines in (("train", OPINIONS), ("validation", held_out)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    data = {"directory": str(tmp_path), "train": "train", "validation": "validation"}
    for features in linear_baseline.FEATURES:
        result = linear_baseline.baseline(data, features)
        assert (result["train"], result["rows"], result["correct"], result["accuracy"]) == (
            len(OPINIONS),
            4,
            3,
            0.75,
        )
        assert result["c"] in linear_baseline.GRID["linearsvc__C"]
        assert result["interval"] == intervals.accuracy_interval(3, 4)


TARGETS = ["Ein Mann sagt: „Hallo“.", "Zwei Hunde rennen über eine Wiese."]
TOKENS = ["ein mann sagt : &quot; hallo &quot; .", "zwei hunde rennen über eine wiese ."]


@pytest.fixture
def two_captions(tmp_path):
    """Write two lines of `val` in the format of Multi30k's files, and return the directory."""
    files = {
        "val.en.gz": ["A man.", "Two dogs."],
        "val.de.gz": TARGETS,
        "val.lc.norm.tok.de.gz": TOKENS,
    }
    for name, lines in files.items():
        with gzip.open(tmp_path / name, "wt", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
    return tmp_path


def test_captions_are_scored_cased_and_lower_cased(two_captions):
    """The first translation is wrong only in its case."""

    def translate(texts):
        return ["EIN mann sagt: „Hallo“.", TARGETS[1]]

    cased, lowercased = captions.text_scores(translate, two_captions, "val")
    expected = sacrebleu.corpus_bleu(translate([]), [TARGETS]).score
    assert cased["bleu"] == round(expected, 2) < 95 and "tok:13a" in cased["signature"]
    assert lowercased == dict(
        text="val",
        form="lower-cased",
        bleu=100.0,
        interval=[100.0, 100.0],
        signature=f"nrefs:1|case:mixed|eff:no|tok:none|smooth:exp|version:{sacrebleu.__version__}",
        lines=2,
        alike=2,
    )


def test_noise_scores_have_one_row_per_kind_of_noise(two_captions):
    """The translator knows only the captions without noise."""

    def translate(texts):
        known = dict(zip(["A man.", "Two dogs."], TARGETS))
        return [known.get(text, "") for text in texts]

    rows = {row["text"]: row["bleu"] for row in captions.noise_scores(translate, two_captions)}
    assert rows == {
        "val, all capitals": 0,
        "val, no capitals": 0,
        "val, no final stop": 0,
        "val, doubled spaces": 0,
        "val, typing errors": 0,
    }


# --------------------------------------------------------------------------- a pretrained encoder


def test_fine_tuning_trains_and_measures_each_dataset_and_fold_once(tmp_path, monkeypatch, capsys):
    for name in fine_tuning.TEXTS:
        recipe = read_recipe(name)
        standins.write_text(recipe, tmp_path / name)
    every_model = fine_tuning.models(fine_tuning.TEXTS, tmp_path)
    assert list(every_model) == ["sst2", *(f"trec-{fold}" for fold in range(5))]
    few = {name: every_model[name] for name in ("sst2", "trec-0", "trec-1")}
    monkeypatch.setattr(fine_tuning, "models", lambda texts, data: few)
    encoder = standins.checkpoint(tmp_path / "encoder")
    arguments = [encoder, "--data", str(tmp_path), "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", ["fine_tuning.py", *arguments])
    fine_tuning.main()
    lines = capsys.readouterr().out.splitlines()
    *models, total = [json.loads(line) for line in lines if line.startswith('{"model"')]
    assert [model["model"] for model in models] == list(few)
    assert all(model["milliseconds"] > 0 and model["megabytes"] > 0 for model in models)
    assert total["rows"] == sum(model["rows"] for model in models[1:])
    assert total["correct"] == sum(model["correct"] for model in models[1:])
    mtimes = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*")}
    fine_tuning.main()  # existing models are measured again, not trained
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*")} == mtimes
