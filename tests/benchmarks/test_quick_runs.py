"""Tests of quick runs of benchmarks/ with the real processes; no speed is asserted."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import one_graph
import pytest
import report
import speed_results
import training_speed
from engines import is_installed
from plan import PLANS
from standins import write_text

from vanilla_transformer.training.recipe import read_recipe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEASURED = {"seconds", "per_second", "peak_memory", "memory_above_import"}


def run_quick(out, shapes, engines, threads=1, *more):
    command = [
        sys.executable,
        BENCHMARKS / "speed.py",
        "--quick",
        "--repeats",
        "3",
        "--threads",
        str(threads),
        "--out",
        out,
    ]
    command += ["--shapes", *shapes, "--engines", *engines, *more]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text()), done.stdout


def check_record(record):
    times = [record["seconds"]] + (
        [record["first_token_seconds"]] if record["beams"] == 1 and record["new_tokens"] else []
    )
    for result in times:
        assert len(result["runs"]) == 3 and 0 < result["min"] <= result["median"] <= result["max"]
    assert record.keys() >= MEASURED and 0 < record["memory_above_import"] < record["peak_memory"]
    counted = record["batch"] * max(record["new_tokens"], 1)
    assert record["per_second"] == pytest.approx(counted / record["seconds"]["median"])
    if record["engine"] not in PLANS["cpu"].rounded:
        assert record.get("agreement", 1) == 1 and record.get("max_difference", 0) < 1e-3


@pytest.mark.slow
def test_quick_run_measures_every_cell_with_every_engine(tmp_path):
    engines, files = (
        ["transformers", "ctranslate2-int8", "cpu-int8", "cpu-calibrated"],
        ["--files", tmp_path / "files"],
    )
    result, output = run_quick(tmp_path / "quick.json", ["seq2seq"], engines, 1, *files)
    assert result["options"] == {"threads": 1, "repeats": 3, "quick": True}
    assert result["environment"]["OMP_NUM_THREADS"] == "1"
    assert result["hardware"].keys() == {"cpu", "cores", "instructions", "l3_bytes", "memory_bytes"}
    assert result["versions"]["torch"] and result["models"]["seq2seq"]["parameters"] > 10_000
    assert [record["engine"] for record in result["cells"]] == 4 * engines
    installed = importlib.util.find_spec("ctranslate2") is not None
    for record in result["cells"]:
        if record["engine"] == "ctranslate2-int8" and not installed:
            assert record["missing"] == "not installed"
        else:
            check_record(record)
    assert [actual["engine"] for actual in result["bandwidth"]] == ["cpu-int8", "cpu-calibrated"]
    assert all(
        actual["share"] > 0 and actual["bytes_per_step"] > 10_000 for actual in result["bandwidth"]
    )
    assert result["exports"]["seq2seq"]["cpu-int8"].keys() == {"seconds", "bytes"}
    assert "| transformers, eager |" in output and "| ours, cpu int8 |" in output
    assert (tmp_path / "files/quick/seq2seq/cpu-calibrated/manifest.json").is_file()
    assert run_quick(tmp_path / "quick.json", ["seq2seq"], engines, 1, *files, "--resume") == (
        result,
        output,
    )


@pytest.mark.slow
def test_quick_run_of_other_shapes(tmp_path):
    engines = ["transformers", "vanilla", "portable-fp32", "cpu-fp32", "cpu-int4"]
    shapes = ["gpt2", "bert", "modernbert", "length", "encoder-length", "batch"]
    result, output = run_quick(tmp_path / "quick.json", [*shapes, "load"], engines)
    for actual in result["load"]:
        assert actual.keys() == {
            "engine",
            "kind",
            "import_seconds",
            "load_seconds",
            "first_token_seconds",
        }
    for record in result["cells"]:
        if "missing" not in record:
            check_record(record)
    assert {record["shape"] for record in result["cells"] if "missing" not in record} == set(shapes)
    assert {record.get("missing") for record in result["cells"]} == {
        None,
        "left out: growth is measured for fewer engines",
    }
    assert "**GPT-2, greedy, new tokens/s**" in output and "**BERT, sequences/s**" in output


@pytest.mark.slow
def test_quick_run_of_openvino_and_llamacpp_in_all_arrangements(tmp_path):
    """Only installed engines run.

    Without quantization their tokens and states match transformers.
    """
    engines = [
        "transformers",
        *(name for name in PLANS["cpu"].engines if name.startswith(("openvino", "llamacpp"))),
    ]
    result, output = run_quick(tmp_path / "quick.json", ["seq2seq", "gpt2", "bert"], engines, 2)
    for record in result["cells"]:
        if "missing" not in record:
            check_record(record)
            assert record["arrangement"] in [
                {"workers": rows, "threads": each} for rows, each in ((1, 2), (1, 1), (2, 1))
            ]
        else:
            assert record["missing"].startswith("left out: ") or not is_installed(record["engine"])
    for engine in engines:
        missing = {
            record.get("missing", "measured")
            for record in result["cells"]
            if record["engine"] == engine
        }
        assert ("measured" if is_installed(engine) else "not installed") in missing
        assert f"| {speed_results.LABELS[engine]} |" in output


@pytest.mark.slow
def test_quick_run_of_captions(tmp_path):
    engines = ["transformers", "ctranslate2-int8", "cpu-fp32"]
    (tmp_path / "captions").write_text("A dog runs.\nTwo men stand in a field.\n")
    result, output = run_quick(
        tmp_path / "quick.json", ["captions"], engines, 1, "--captions", tmp_path / "captions"
    )
    assert [record["beams"] for record in result["cells"]] == [1, 1, 1, 5, 5, 5]
    for cells in (result["cells"][:3], result["cells"][3:]):
        check_captions(*cells)
    assert "**captions, greedy, sentences/s**" in output
    assert "**captions, beam 5, sentences/s**" in output
    result, _ = run_quick(tmp_path / "quick.json", ["captions"], engines)
    missing = [record["missing"] for record in result["cells"] if record["engine"] != engines[0]]
    assert missing == ["no captions were given"] * 4


def check_captions(other, theirs, ours):
    assert other["missing"] == "left out: many sentences are measured for engines with a queue"
    if is_installed("ctranslate2-int8"):
        assert (
            theirs["per_second"] == pytest.approx(2 / theirs["seconds"]["median"])
            and 0 <= theirs["agreement"] <= 1
        )
    assert ours["agreement"] == 1 and ours["from_texts"] > 0
    assert ours["per_second"] == pytest.approx(2 / ours["seconds"]["median"])


@pytest.mark.slow
def test_quick_run_of_beams_without_openvino(tmp_path):
    script = Path(report.__file__).with_name("openvino_beams.py")
    command = [sys.executable, script, "--quick", "--files", tmp_path, "--repeats", "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    versions, *batches = map(json.loads, run.stdout.splitlines())
    assert [*versions] == ["cpu-fp32", "cpu-int8", "cpu-calibrated"]
    assert [record["batch"] for record in batches] == [1, 8, 32]
    for record in batches:
        assert record["cpu-fp32"]["same_rows"] == 1 and record["cpu-int8"]["tokens_per_second"] > 0


@pytest.mark.slow
def test_quick_run_of_training_speed(tmp_path, monkeypatch):
    recipe = read_recipe("multi30k-en-de")
    write_text(recipe, tmp_path)
    settings = {"tokenizer.vocab_size": 60, "model.hidden_size": 16}
    settings |= {"training.tokens_per_update": 256, "training.tokens_per_batch": 128}
    monkeypatch.setattr(training_speed, "TOKENS", 1000)
    monkeypatch.setattr(training_speed, "BATCH_SIZES", (8, 32))
    options = SimpleNamespace(
        recipe="multi30k-en-de", data=tmp_path, set=settings.items(), repeats=2
    )
    result = training_speed.run(options, tmp_path / "state")
    speeds = result["tokens_per_second"]
    tried = [
        f"MarianMTModel, {kind}, batch {size}"
        for kind in ("random", "group_by_length")
        for size in (8, 32)
    ]
    assert [*speeds] == ["ours, our batches", *tried, "MarianMTModel, our batches"]
    assert all(len(spread["runs"]) == 2 and spread["min"] > 0 for spread in speeds.values())
    assert [*result["ratios"]] == ["random", "group_by_length", "our batches"]
    for kind, ratio in result["ratios"].items():
        runs = [
            ours / other
            for ours, other in zip(
                speeds["ours, our batches"]["runs"], speeds[ratio["over"]]["runs"]
            )
        ]
        assert ratio["over"].startswith(f"MarianMTModel, {kind}") and ratio["runs"] == runs
        fastest = max(
            speed["median"]
            for name, speed in speeds.items()
            if name.startswith(f"MarianMTModel, {kind}")
        )
        assert speeds[ratio["over"]]["median"] == fastest
    assert abs(result["parameters"]["ours"] / result["parameters"]["MarianMTModel"] - 1) < 0.05


@pytest.mark.slow
def test_quick_run_of_one_graph_and_runtime():
    """Both generate the same tokens in float32. Only requested models and targets are measured."""
    arguments = [
        "--quick",
        "--repeats",
        "3",
        "--new-tokens",
        "4",
        "--models",
        "base",
        "decoder",
        "--threads",
        "1",
    ]
    result = one_graph.run(one_graph.parse([*arguments, "--targets", "portable-fp32", "cpu-int8"]))
    assert [*result["models"]] == ["base", "decoder"]
    for targets in result["models"].values():
        assert [*targets] == ["portable-fp32", "cpu-int8"]
        for target, batches in targets.items():
            assert [*batches] == [1, 8, 32]
            for batch, each in batches.items():
                assert each["speed"] == pytest.approx(
                    each["seconds"]["runtime"] / each["seconds"]["graph"], abs=1e-3
                )
                assert len(each["ratios"]) == 3 and each["new_tokens"] == 4
                assert each["same_rows"] == batch or target == "cpu-int8"


def test_one_graph_and_runtime_are_timed_alternately(monkeypatch):
    """The speed is the ratio of the medians. A row is the same if all its tokens are equal."""
    times = iter([0, 2, 2, 5, 5, 9, 9, 15, 15, 16, 16, 17])
    monkeypatch.setattr(one_graph.time, "perf_counter", lambda: next(times))
    calls = {
        "graph": lambda: np.array([[0, 5, 6], [0, 7, 8]]),
        "runtime": lambda: np.array([[0, 5, 6], [0, 7, 9]]),
    }
    result = one_graph.measured(calls, 3, 1)
    assert (
        result["seconds"] == {"graph": 2, "runtime": 3}
        and result["speed"] == 1.5
        and result["ratios"] == [1.0, 1.5, 1.5]
    )
    assert (result["same_rows"], result["new_tokens"]) == (1, 2)
