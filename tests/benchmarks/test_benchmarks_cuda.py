"""Tests of the CUDA benchmarks on a machine without a GPU.

On the CPU in float32 all engines generate the same tokens. Results have every row, with a reason
where nothing was measured. No speed is asserted.
"""

import importlib.metadata
import json
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import engines
import gpu
import measure
import measure_cuda
import numpy as np
import pytest
import report
import speed
import torch
import workload
from checkpoints import EOS, build
from messages import raises
from plan import PLANS, Arrangement, list_cells
from torch_graph import GraphDecoder

ROOT = Path(__file__).parents[2]
PLAN = PLANS["cuda"]
IDS = np.random.default_rng(0).integers(workload.FIRST_TOKEN, 498, (3, 8))
TORCH_ENGINES = ("transformers", "vanilla", "torch-graph")


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Write the small checkpoints of each kind and return their folder."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("seq2seq", "gpt2"):
        workload.make_checkpoints(kind, True, root / kind)
    return root


@pytest.fixture
def grad():
    """Turn gradients on again after the test; engines turn them off for the whole process."""
    yield
    torch.set_grad_enabled(True)


def run(engine, kind, root, new_tokens, beams=1):
    model = engines.ENGINES[engine](engine, kind, root / kind, Arrangement(1, 1), "cpu")
    return engines.timed(model, model.prepare(IDS), new_tokens, beams)["output"]


# -------------------------------------------------------------------------------------- the engines


@pytest.mark.parametrize("name", ["seq2seq", "seq2seq-untied", "causal", "causal-learned"])
def test_graph_decoder_matches_model_for_successive_prompts(name):
    model = build(name)
    model.generation_config.eos_token_id, model.lm_head.bias.data[EOS] = None, -100
    graph_decoder, actual = GraphDecoder(model, 3, 8, 9), []
    for ids in torch.randint(4, 48, (3, 3, 8)):
        expected = model.generate(ids, max_new_tokens=9, do_sample=False)[:, -9:]
        assert torch.equal(graph_decoder.generate(ids), expected)
        actual += expected.tolist()
    assert len({tuple(row) for row in actual}) > 3, "what is said depends on the prompt"


@pytest.mark.parametrize("new_tokens", [1, 6])
@pytest.mark.parametrize("kind", ["seq2seq", "gpt2"])
def test_torch_engines_generate_same_tokens(roots, grad, kind, new_tokens):
    first, *others = (run(engine, kind, roots, new_tokens) for engine in TORCH_ENGINES)
    assert first.shape == (3, new_tokens) and all(
        np.array_equal(result, first) for result in others
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seq2seq", "gpt2"])
def test_cuda_export_generates_tokens_of_transformers(roots, grad, kind):
    workload.prepare("cuda-fp32", kind, roots / kind)
    for beams in (1, 4):
        assert np.array_equal(
            run("cuda-fp32", kind, roots, 6, beams), run("transformers", kind, roots, 6, beams)
        )


# -------------------------------------------------------------------------------- kernels and bytes

Event = namedtuple("Event", "name_, nanoseconds, annotation")
Event.name, Event.duration_ns = lambda event: event.name_, lambda event: event.nanoseconds
Event.is_user_annotation = lambda event: event.annotation


def test_kernel_and_copy_times_are_summed_and_missing_kernels_raise():
    events = [
        Event("gemm", 3000, False),
        Event("Memcpy DtoH (Device -> Pageable)", 500, False),
        Event("step", 10**6, True),
    ]
    events += [Event("void at::native::softmax", 2000, False), Event("Memset (Device)", 100, False)]
    assert gpu.totals(events) == pytest.approx({"kernel_seconds": 5e-6, "copy_seconds": 6e-7})
    with raises(RuntimeError, seen="kernel"):
        gpu.totals(events[1:3])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_device_facts_are_none_and_profiling_raises(roots, grad):
    assert gpu.device_facts() is None
    model = engines.ENGINES["vanilla"]("vanilla", "gpt2", roots / "gpt2", Arrangement(1, 1), "cpu")
    with raises(RuntimeError, seen="GPU"):
        engines.profiled(model, model.prepare(IDS), 2, 1)
    assert gpu.copy_bandwidth("cpu", True) > 1e6


def test_step_bytes_count_weights_and_cache(roots):
    """The expected values are counted by hand: width 64, feed-forward 128 (GPT-2: 256), 2 layers,
    vocabulary 499, all linear layers with a bias."""
    square, norm, head = 64 * 65, 128, 64 * 499 + 499
    decoder = 4 * square + 2 * square + (64 * 129 + 128 * 65 - 64 + 64) + 3 * norm
    values = gpu.step_values("seq2seq", roots / "seq2seq")
    assert values == {
        "weights": 2 * decoder + head,
        "per_token": 2 * 2 * 64,
        "per_source": 2 * 2 * 64,
    }
    record = {"batch": 3, "length": 8, "new_tokens": 6}
    # Cached: the start token, half of the new tokens, and the source.
    assert gpu.step_bytes(values, record, 2) == 2 * (values["weights"] + 3 * 256 * (1 + 3 + 8))
    values = gpu.step_values("gpt2", roots / "gpt2")
    assert values["per_source"] == 0 and gpu.step_bytes(values, record, 2) == 2 * (
        values["weights"] + 3 * 256 * (8 + 3)
    )


# ------------------------------------------------------------------------------- rows of the result


@pytest.fixture
def in_process(monkeypatch):
    """Run the isolated functions of benchmarks in this process."""
    for module in (measure, measure_cuda):
        monkeypatch.setattr(module, "isolated", lambda function, *args: function(*args))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def benchmark(tmp_path, *arguments):
    out = tmp_path / "cuda.json"
    speed.main(["--device", "cuda", "--threads", "1", "--out", str(out), *arguments])
    return json.loads(out.read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_every_row_has_a_reason_why_it_is_missing(in_process, tmp_path, capsys):
    result = benchmark(tmp_path)
    check_rows(result)
    rows = [*result["cells"], *result["verify"], *result["bleu"], *result["steps"]]
    assert (
        result["device"] is None
        and result["exports"] == {}
        and all("seconds" not in row for row in rows)
    )
    assert {row["missing"] for row in rows if not row["missing"].startswith("left out")} == {
        "no GPU was at hand"
    }
    printed = capsys.readouterr().out
    assert (
        "No GPU, nothing was measured; " in printed and "No plot: nothing was measured." in printed
    )
    assert "- transformers, eager: no GPU was at hand" in printed and "(goal: 8)" in printed


def check_rows(result):
    cells = [
        cell
        for shape in PLAN.shapes
        for cell in list_cells(PLAN, shape, result["options"]["quick"])
    ]
    assert [
        (row["engine"], row["batch"], row["beams"], row["kind"]) for row in result["cells"]
    ] == [(engine, cell.batch, cell.beams, cell.kind) for cell in cells for engine in PLAN.engines]
    assert all(("missing" in row) != ("per_second" in row) for row in result["cells"])
    greedy = [
        row
        for row in result["cells"]
        if row["beams"] == 1 and row["new_tokens"] and not row["shortest"]
    ]
    assert [(row["engine"], row["batch"]) for row in result["steps"]] == [
        (row["engine"], row["batch"]) for row in greedy
    ]
    kinds = ("seq2seq", "bert", "gpt2")
    exports = [
        (kind, engine) for kind in kinds for engine in PLAN.engines if engine.startswith("cuda-")
    ]
    assert [(row["kind"], row["engine"]) for row in result["verify"]] == exports
    assert [row["engine"] for row in result["bleu"]] == ["torch", "cuda-fp16", "cuda-bf16"]


def test_committed_cuda_results_have_all_rows_and_a_report():
    result = json.loads((ROOT / "benchmarks/results/cuda.json").read_text())
    check_rows(result)
    assert not result["options"]["quick"]
    assert "| ours, cuda fp16 |" in report.tables(result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_measurement_starts_after_time_limit(in_process, tmp_path, grad):
    arguments = [
        "--quick",
        "--minutes",
        "0",
        "--shapes",
        "gpt2",
        "--engines",
        "vanilla",
        "transformers-compile",
    ]
    result = benchmark(tmp_path, *arguments)
    assert result["device"] == "cpu" and result["exports"] == {}
    assert {row["missing"] for row in result["cells"] if row["engine"] == "vanilla"} == {
        "no time was left"
    }
    assert [row["missing"][:8] for row in result["cells"] if row["batch"] == 2][1] == "left out"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_resumed_run_measures_what_an_earlier_piece_had_no_time_for(
    in_process, tmp_path, grad, monkeypatch
):
    arguments = ["--quick", "--shapes", "bert", "mixed", "--engines", "cuda-fp32", "transformers"]
    first = benchmark(tmp_path, *arguments, "--minutes", "0")
    assert {row["missing"] for row in first["cells"]} == {"no time was left"}
    done = {"kind": "bert", "engine": "cuda-fp32", "cases": 12, "failures": 0}
    done |= {"max_error": 1e-6, "tokens": 0, "agreeing_tokens": 0}
    for row in first["cells"]:
        if row["shape"] == "bert":
            del row["missing"]
            row |= {"per_second": 7.0, "seconds": TIMES, "max_difference": 0.0}
    (tmp_path / "cuda.json").write_text(json.dumps(first | {"verify": [done]}))
    measured = []
    for name, attribute in (("prepare", "prepare"), ("measure_shape", "measure_shape")):
        monkeypatch.setattr(
            measure.Benchmark,
            attribute,
            lambda self, cells, name=name: measured.append((name, cells)),
        )
    second = benchmark(tmp_path, *arguments, "--minutes", "5", "--resume")
    mixed = list_cells(PLAN, "mixed", True)
    assert measured == [("prepare", ["bert"]), ("measure_shape", mixed)]
    assert [row["shape"] for row in second["cells"]] == 2 * len(list_cells(PLAN, "bert", True)) * [
        "bert"
    ]
    assert second["verify"] == [done] and second["command"].count("speed.py") == 2
    with raises(ValueError, seen="repeats", expected="--out"):
        benchmark(tmp_path, *arguments, "--repeats", "1", "--resume")


def test_large_models_are_not_made_in_the_last_minutes(in_process, tmp_path, monkeypatch, grad):
    monkeypatch.setattr(measure.Benchmark, "prepare", None)  # is not called
    result = benchmark(tmp_path, "--quick", "--shapes", "t5", "--minutes", "3")
    reasons = {row["missing"] for row in result["cells"] if row["engine"] in OF_T5}
    assert reasons == {"no time was left"}
    assert result["models"]["t5"]["d_model"] == 64 and result["verify"] == []


OF_T5 = ("transformers", "cuda-bf16")


def test_shapes_of_others_and_mixed_lengths_come_after_ours():
    assert list(PLAN.shapes) == ["seq2seq", "bert", "gpt2", "mixed", "bart", "t5"]
    for shape in ("bart", "t5"):
        cells = PLAN.shapes[shape]
        sizes = {(cell.shortest, cell.length, cell.new_tokens, cell.beams) for cell in cells}
        assert [cell.batch for cell in cells] == [32, 64, 128] and sizes == {(260, 440, 128, 1)}
        measured = [name for name in PLAN.engines if PLAN.left_out(name, cells[0]) is None]
        assert measured == ["transformers", "cuda-bf16"]


def test_rows_of_mixed_length_have_all_lengths_and_padding_is_no_token():
    [cell] = PLAN.shapes["mixed"]
    models = {"models": {"bert": {"vocab_size": 499}}}
    ids = measure.Benchmark.inputs(SimpleNamespace(result=models), cell)
    lengths = (ids != measure.PADDING).sum(axis=1)
    assert lengths.max() == lengths[0] == 128 and lengths.min() == 8 and len(set(lengths)) > 90
    filled, mask = engines.ids_and_mask(ids)
    assert mask.sum(axis=1).tolist() == lengths.tolist() and filled.min() >= 0
    assert (filled[mask == 1] >= workload.FIRST_TOKEN).all() and not filled[mask == 0].any()


def test_encoder_of_transformers_reads_mixed_lengths_in_parts(tmp_path, grad, monkeypatch):
    """Each row is compared with the row alone."""
    workload.make_checkpoints("bert", True, tmp_path / "bert")
    monkeypatch.setattr(engines, "MIXED_ROWS", 2)
    model = engines.Transformers(
        "transformers", "bert", tmp_path / "bert", Arrangement(1, 1), "cpu"
    )
    ids = np.random.default_rng(0).integers(workload.FIRST_TOKEN, 498, (5, 8))
    lengths = [3, 8, 1, 5, 8]
    ids[np.arange(8) >= np.array(lengths)[:, None]] = measure.PADDING
    states = model.output(model.run(model.prepare(ids), 0, 1), 0)
    for row, length in enumerate(lengths):
        alone = model.output(model.run(model.prepare(ids[row : row + 1, :length]), 0, 1), 0)
        np.testing.assert_allclose(states[row, :length], alone[0], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_shapes_of_others_generate_tokens_of_transformers(tmp_path, grad, kind, monkeypatch):
    workload.make_checkpoints(kind, True, tmp_path / kind)
    workload.prepare("cuda-fp32", kind, tmp_path / kind)
    padded = np.where(np.arange(8) < np.array([[8], [5], [2]]), IDS, measure.PADDING)
    monkeypatch.setattr(sys.modules[__name__], "IDS", padded)
    first, second = (run(engine, kind, tmp_path, 6) for engine in ("cuda-fp32", "transformers"))
    assert np.array_equal(first, second) and len({tuple(row) for row in first.tolist()}) == 3


def test_cells_with_a_goal_come_first_and_are_measured_for_both_engines():
    cells = PLAN.shapes["seq2seq"]
    goal_cells = {(cells[0].batch, 1), (32, 4), (128, 1)}
    assert goal_cells <= {(cell.batch, cell.beams) for cell in cells[:6]}
    for (_, engine, other), goals in report.GOALS.items():
        if not engine.startswith("cuda-"):
            continue
        beams = 4 if 32 in goals else 1
        cell = next(cell for cell in cells if cell.batch in goals and cell.beams == beams)
        assert PLAN.left_out(engine, cell) is PLAN.left_out(other, cell) is None
    assert PLAN.left_out("torch-graph", cells[1]) and PLAN.left_out(
        "transformers-compile", replace(cells[0], batch=8)
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_quick_run_measures_all_engines_that_run_on_cpu(tmp_path):
    texts = [tmp_path / "text.en", tmp_path / "text.de"]
    texts[0].write_text("A dog runs.\nTwo men.\n")
    texts[1].write_text("Ein Hund rennt.\nZwei Männer.\n")
    engines = ["cuda-fp32", *TORCH_ENGINES]
    command = [
        sys.executable,
        ROOT / "benchmarks/speed.py",
        "--device",
        "cuda",
        "--quick",
        "--repeats",
        "3",
        "--threads",
        "1",
    ]
    command += [
        "--minutes",
        "20",
        "--out",
        tmp_path / "quick.json",
        "--shapes",
        "seq2seq",
        "bert",
        "--engines",
        *engines,
    ]
    done = subprocess.run([*command, "--texts", *texts], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "quick.json").read_text())
    for record in result["cells"]:
        if "missing" in record:
            assert record["engine"] == "torch-graph" and record["missing"].startswith("left out")
            continue
        assert len(record["seconds"]["runs"]) == 3 and "found no GPU" in record["kernels_missing"]
        assert record["agreement"] == 1 if record["new_tokens"] else record["max_difference"] < 1e-3
    for step in result["steps"]:
        assert "missing" in step or step.keys() >= {
            "bytes_per_step",
            "step_seconds",
            "fits_cache",
            "share",
        }
    assert [(row["kind"], row["failures"]) for row in result["verify"]] == [
        ("seq2seq", 0),
        ("bert", 0),
    ]
    bleu, *others = result["bleu"]
    assert 0 < bleu["bleu"] <= 100 and bleu["sentences"] == 2
    assert [other["missing"] for other in others] == 2 * ["no GPU was at hand"]
    assert (
        "No GPU, all on the CPU in float32" in done.stdout
        and "found no GPU, expected one to profile" in done.stdout
    )


# --------------------------------------------------------------------------------------- the report

TIMES = dict(min=0.1, median=0.2, max=0.4, runs=[0.1, 0.2, 0.4])
RECORD = dict(
    shape="seq2seq",
    kind="seq2seq",
    length=32,
    new_tokens=64,
    beams=1,
    seconds=TIMES,
    first_token_seconds=TIMES,
)


def test_report_has_kernels_goals_and_bleu():
    result = json.loads((ROOT / "benchmarks/results/cuda.json").read_text())
    ours = {
        **RECORD,
        "engine": "cuda-fp16",
        "batch": 1,
        "per_second": 900.0,
        "kernel_seconds": 0.15,
        "agreement": 0.5,
    }
    theirs = {
        **RECORD,
        "engine": "transformers",
        "batch": 1,
        "per_second": 100.0,
        "kernels_missing": "not seen",
    }
    result |= {"cells": [ours, theirs], "device": "cuda", "copy_bandwidth": 4.25e12}
    result["hardware"] |= {"gpu": "A GPU", "cuda": "13.0"}
    step = dict(
        kind="seq2seq",
        engine="cuda-fp16",
        batch=1,
        bytes_per_step=80e6,
        step_seconds=5e-4,
        fits_cache=True,
        share=0.4,
    )
    verified = dict(
        kind="seq2seq",
        engine="cuda-fp16",
        cases=12,
        max_error=2e-3,
        agreeing_tokens=99,
        tokens=100,
        failures=0,
    )
    scores = [
        dict(engine="torch", bleu=37.96),
        dict(engine="cuda-fp16", bleu=37.9),
        dict(engine="cuda-bf16", missing="no"),
    ]
    text = report.tables({**result, "steps": [step], "verify": [verified], "bleu": scores})
    assert "A GPU, CUDA 13.0, copies 4.25 TB/s; " in text
    assert "150 (75%)" in text and "\n- transformers, eager, kernels: not seen" in text
    assert (
        "| tokens/s: seq2seq greedy, ours, cuda fp16 / transformers, eager | 9.00 (goal: 8) |"
        in text
    )
    assert "| seq2seq, ours, cuda fp16 | 0.5 (80.0 MB, fits the cache; 40%) |" in text
    assert "| seq2seq, ours, cuda fp16 | 12 | 2.0e-03 | 99 of 100 | 0 |" in text
    assert (
        "| cuda-fp16 | 37.90 | -0.06 |" in text
        and "| cuda-bf16 | - | - |\n\n- cuda-bf16: no" in text
    )


# ---------------------------------------------------------------------- import without installation


def test_checkout_is_importable_without_installation(tmp_path):
    lines = [
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})",
        f"from pathlib import Path; from checkout import make_importable; "
        f"make_importable(Path({str(tmp_path)!r}))",
        "import vanilla_transformer_export.heads as heads; from importlib.metadata import version",
        "print(Path(heads.__file__).resolve()); print(version('vanilla-transformer'))",
    ]
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == [
        str(ROOT / "export/heads.py"),
        importlib.metadata.version("vanilla-transformer"),
    ]
