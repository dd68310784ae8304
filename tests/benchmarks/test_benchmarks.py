"""benchmarks/ on a CPU: the tables say what the JSON file says, and a quick run through the real
processes fills every field. No speed is asserted."""

import gzip
import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import intervals
import linear_baseline
import lowercased
import measure
import measure_cpu
import numpy as np
import one_graph
import pytest
import report
import sacrebleu
import scores
import speed
import speed_pages as pages
import training_speed
import workload
from checkpoints import OPINIONS, toy_corpus, write_corpus
from engines import Parts, is_installed
from plan import PLANS, Arrangement, arrangements_on_cpu
from standins import write_text

from vanilla_transformer.training.recipe import Recipe, read_recipe
from vanilla_transformer.training.run import train

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEASURED = {"seconds", "per_second", "peak_memory", "memory_above_import"}


def cell(engine, batch, times, memory, shape="seq2seq", beams=1, **more):
    tokens = batch * 10
    return {
        **dict(
            shape=shape,
            kind=shape,
            engine=engine,
            batch=batch,
            length=32,
            new_tokens=10,
            beams=beams,
            agreement=1.0,
        ),
        "seconds": dict(median=times[1], min=times[0], max=times[2], runs=list(times)),
        "first_token_seconds": dict(median=0.05, min=0.04, max=0.0625, runs=[0.05, 0.04, 0.0625]),
        "per_second": tokens / times[1],
        "peak_memory": memory * 10**6,
        "memory_above_import": (memory - 50) * 10**6,
        **more,
    }


RESULT = {
    "command": "python benchmarks/speed.py",
    "environment": {"CT2_USE_MKL": "1"},
    "date": "2026-01-01",
    "options": {"threads": 2, "repeats": 3, "quick": False},
    "hardware": {
        "cpu": "A CPU", "cores": 2, "instructions": ["avx2"], "l3_bytes": 2**25,
        "memory_bytes": 2**33
    },
    "versions": {"torch": "2.0"},
    "models": {},
    "exports": {"seq2seq": {"cpu-int8": {"seconds": 12.34, "bytes": 45_600_000}}},
    "cells": [
        cell("ctranslate2-int8", 1, (0.5, 1.0, 2.0), 150),  # 10 tokens in 1 s
        cell("ctranslate2-int8", 8, (1.0, 2.0, 4.0), 200),
        cell("cpu-int8", 1, (0.2, 0.25, 0.5), 300, agreement=0.9),
        dict(
            shape="seq2seq", kind="seq2seq", engine="cpu-int8", batch=8, length=32, new_tokens=10,
            beams=1, missing="no"
        ),
        cell("cpu-int8", 1, (1.0, 2.0, 4.0), 100, shape="length"),
    ],
    "load": [],
    "bandwidth": [
        dict(
            kind="seq2seq", engine="cpu-int8", bytes_per_step=40_000_000, step_seconds=0.004,
            reader="numpy.dot", bytes_per_second=2e10, fits_cache=False, share=0.5
        ),
    ],
}  # fmt: skip


def lines_of(text, start):
    """The cells of the table lines that start with `start`."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines if line[0] == start]


def test_a_table_has_the_numbers_of_its_cells():
    text = report.tables(RESULT)
    assert "`CT2_USE_MKL=1 python benchmarks/speed.py`" in text
    overview, ours, by_length = lines_of(text, "ours, cpu int8")
    assert overview == ["ours, cpu int8", "40", "-"]
    # 10 tokens in 0.25 s; at best in 0.2, at worst in 0.5. First token after 50 ms. 300 MB, of them
    # 50 imports.
    assert ours == [
        "ours, cpu int8",
        "40 (20 - 50)",
        "-",
        "50 (40 - 62.5)",
        "300 (250)",
        "-",
        "90.0%",
    ]
    assert by_length == ["ours, cpu int8", "2 (1 - 4)"]
    _, theirs = lines_of(text, "CTranslate2 int8")
    assert theirs[1:3] == ["10 (5 - 20)", "40 (20 - 80)"]
    assert "- ours, cpu int8: no\n" in text
    assert lines_of(text, "seq2seq, ours, cpu int8") == [
        ["seq2seq, ours, cpu int8", "40.0", "4", "20.0 (numpy.dot)", "50%"],
        ["seq2seq, ours, cpu int8", "12.3", "45.6"],
    ]


def test_ratios_are_of_the_same_batch_and_none_where_one_is_missing():
    found = {
        (ratio["what"], ratio["engine"], ratio["divided_by"]): ratio["batches"]
        for ratio in report.ratios(RESULT)
    }
    assert found["tokens/s: seq2seq greedy", "cpu-int8", "ctranslate2-int8"] == {1: 4.0, 8: None}
    assert found["memory: seq2seq greedy", "cpu-int8", "ctranslate2-int8"] == {1: 2.0, 8: None}
    assert found["tokens/s: seq2seq greedy", "cpu-int8", "transformers"] == {1: None, 8: None}
    assert found["sequences/s: BERT", "cpu-int8", "ctranslate2-int8"] == {}
    assert lines_of(
        report.tables(RESULT), "tokens/s: seq2seq greedy, ours, cpu int8 / CTranslate2 int8"
    )[0][1:] == [
        "4.00",
        "-",
    ]


def test_a_lead_is_over_the_fastest_other_engine_of_the_same_precision():
    alone, both = {"workers": 1, "threads": 1}, {"workers": 2, "threads": 1}
    cells = [
        cell("ctranslate2-int8", 1, (1.0, 1.0, 1.0), 150, arrangement=alone),  # 10 tokens in 1 s
        cell("openvino-int8", 1, (0.5, 0.5, 0.5), 150, arrangement=both),
        cell("openvino-fp32", 1, (0.1, 0.1, 0.1), 150),
        cell("cpu-int8", 1, (0.25, 0.25, 0.25), 300, arrangement={"workers": 1, "threads": 2}),
        cell("cpu-int4", 1, (0.2, 0.2, 0.2), 300),  # of which there is no other engine
        cell("ctranslate2-int8", 128, (4.0, 4.0, 4.0), 150, shape="batch"),
        cell("cpu-int8", 128, (5.0, 5.0, 5.0), 150, shape="batch"),
        cell("openvino-ptq", 1, (0.3, 0.3, 0.3), 150, shape="encoder-length", kind="bert"),
        cell("cpu-int8", 1, (0.6, 0.6, 0.6), 150, shape="encoder-length", kind="bert"),
        dict(
            shape="seq2seq",
            kind="seq2seq",
            engine="ctranslate2-int8",
            batch=8,
            beams=1,
            missing="no",
        ),
        cell("cpu-int8", 8, (1.0, 1.0, 1.0), 300),
    ]
    found = report.leads({**RESULT, "cells": cells})
    sides = {
        key: {batch: [side["engine"] for side in pair] for batch, pair in each.items()}
        for key, each in found.items()
    }
    assert sides == {
        ("seq2seq, greedy", "cpu-int8"): {
            1: ["cpu-int8", "openvino-int8"],
            128: ["cpu-int8", "ctranslate2-int8"],
        },
        ("BERT, 32 tokens", "cpu-int8"): {1: ["cpu-int8", "openvino-ptq"]},
    }
    text = report.lead_table({**RESULT, "cells": cells})
    [line] = lines_of(text, "seq2seq, greedy: ours, cpu int8")
    assert line[1:] == ["2.00 (1 x 2 / OpenVINO int8 weights, 2 x 1)", "0.80 (CTranslate2 int8)"]
    assert lines_of(text, "BERT, 32 tokens: ours, cpu int8")[0][1:] == [
        "0.50 (OpenVINO int8, calibrated)",
        "-",
    ]


def test_captions_compare_the_best_precision_of_each_too():
    times = {
        "ctranslate2-float32": 4.0,
        "ctranslate2-int8": 2.0,
        "cpu-fp32": 2.5,
        "cpu-calibrated": 3.0,
    }
    cells = [
        cell(engine, 1000, (each, each, each), 100, shape="captions")
        for engine, each in times.items()
    ]
    text = report.tables({**RESULT, "cells": cells})
    fp32, int8, best = (
        lines_of(text, f"captions, greedy: {name}")
        for name in (
            "ours, cpu fp32",
            "ours, cpu int8, calibrated",
            "the fastest of both, any precision",
        )
    )
    assert [fp32[0][1], int8[0][1]] == ["1.60 (CTranslate2 fp32)", "0.67 (CTranslate2 int8)"]
    assert best[0][1] == "0.80 (ours, cpu fp32 / CTranslate2 int8)"


# -------------------------------------------------------------------------------------------- pages


def results_of(tmp_path):
    for name, (cpu, instruction) in {
        "vnni": ("A CPU with VNNI", "avx512_vnni"),
        "avx2": ("A CPU", "avx2"),
    }.items():
        hardware = {**RESULT["hardware"], "cpu": cpu, "instructions": [instruction]}
        (tmp_path / f"cpu-{name}.json").write_text(json.dumps({**RESULT, "hardware": hardware}))
    (tmp_path / "cuda.json").write_text("{}")
    return pages.results(tmp_path)


def test_results_of_several_processors_stand_below_their_names(tmp_path):
    assert pages.results(tmp_path) == {}
    found = results_of(tmp_path)
    assert [*found] == ["cpu-avx2", "cpu-vnni"]
    text = pages.overviews(found)
    assert text.count(report.overview(RESULT)) == 2
    first, second = (
        text.index(start)
        for start in ("AVX2: 2 threads, A CPU, 2 cores", "VNNI: 2 threads, A CPU with VNNI")
    )
    assert (
        first
        < text.index("[cpu-avx2.json] is that run.")
        < second
        < text.index("[cpu-vnni.json] is that run.")
    )
    assert text.count("each engine with all threads.\ntorch 2.0.") == 2
    arranged = {
        **RESULT,
        "cells": [
            cell("cpu-int8", 1, (1.0, 1.0, 1.0), 1, arrangement={"workers": 1, "threads": 1})
        ],
    }
    assert "each engine in its fastest arrangement of threads." in pages.overviews(
        {"cpu-avx2": arranged}
    )


def test_the_front_page_has_the_fastest_of_each_program(tmp_path):
    times = {
        "cpu-int4": 0.25,
        "cpu-int8": 0.5,
        "transformers": 4.0,
        "transformers-compile": 2.0,
        "openvino-fp32": 1.0,
    }
    cells = [
        cell(engine, 1, (each, each, each), 100, shape="gpt2") for engine, each in times.items()
    ]
    vnni = {
        **RESULT,
        "cells": cells[:1],
        "hardware": {**RESULT["hardware"], "instructions": ["avx512_vnni"]},
    }
    table = pages.highlights({"cpu-avx2": {**RESULT, "cells": cells}, "cpu-vnni": vnni})
    assert "| ours, AVX2 | to compare | ours, VNNI | to compare |" in table
    [line] = lines_of(table, pages.HIGHLIGHTS["gpt2", 1, 1])
    assert line[1:] == ["40 int4", "10 OpenVINO fp32; 5 transformers, torch.compile", "40 int4"]


def test_a_page_is_filled_between_its_marks():
    begin, end = pages.MARKS
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    assert pages.filled(page, "new \\1") == f"before\n{begin}\nnew \\1\n{end}\nafter\n"
    for wrong in ("no marks", 2 * page, page.replace(end, "")):
        with pytest.raises(ValueError, match="expected once"):
            pages.filled(wrong, "new")


@pytest.mark.parametrize(
    "flags, name",
    [(["avx2"], "cpu-avx2"), (["avx2", "avx_vnni"], "cpu-vnni"), (["avx512_vnni"], "cpu-vnni")],
)
def test_the_file_of_results_is_that_of_the_processor(flags, name, monkeypatch):
    monkeypatch.setattr(speed, "instructions", lambda: flags)
    options, _ = speed.parse([])
    assert options.out == BENCHMARKS / "results" / f"{name}.json"
    assert speed.parse(["--device", "cuda"])[0].out == BENCHMARKS / "results" / "cuda.json"


@pytest.mark.parametrize(
    "shape, beams, batch, ours, others",
    [
        *(
            ("seq2seq", 1, batch, "cpu-fp32", "ctranslate2-float32 openvino-fp32")
            for batch in (1, 8, 32)
        ),
        *(
            ("seq2seq", 1, batch, "cpu-int8 cpu-calibrated", "ctranslate2-int8 openvino-int8")
            for batch in (1, 8, 32)
        ),
        *(("seq2seq", 1, batch, "cpu-int4", "openvino-int4") for batch in (1, 8, 32)),
        *(("seq2seq", 4, batch, "cpu-int8", "ctranslate2-int8") for batch in (1, 8, 32)),
        *(
            ("gpt2", 1, batch, "cpu-int8 cpu-int4", "ctranslate2-int8 llamacpp-q8 llamacpp-q4")
            for batch in (1, 8)
        ),
        *(
            ("bert", 1, batch, "cpu-fp32 cpu-int8 cpu-calibrated", "openvino-fp32 openvino-ptq")
            for batch in (1, 8)
        ),
        ("encoder-length", 1, 1, "cpu-int8 cpu-calibrated", "openvino-ptq"),
        ("batch", 1, 128, "cpu-int8 cpu-calibrated", "ctranslate2-int8"),
        (
            "captions",
            1,
            1000,
            "cpu-fp32 cpu-int8 cpu-calibrated",
            "ctranslate2-float32 ctranslate2-int8",
        ),
    ],
)
def test_what_is_to_be_compared_is_measured_for_both_sides(shape, beams, batch, ours, others):
    plan = PLANS["cpu"]
    cells = [each for each in plan.shapes[shape] if (each.batch, each.beams) == (batch, beams)]
    assert len(cells) == (3 if shape == "encoder-length" else 1)
    for engine in [*ours.split(), *others.split()]:
        assert engine in plan.engines and engine in report.LABELS and engine in report.COLORS
        assert [plan.left_out(engine, each) for each in cells] == [None] * len(cells)


def test_special_exports_have_settings_beside_the_dtype():
    text = Path("text")
    assert workload.export_settings("calibrated", text) == {"dtype": "int8", "calibrate": text}
    assert workload.export_settings("int4", text) == {"dtype": "int4"}


# ----------------------------------------------------------------------------------------- going on


def test_a_run_goes_on_with_the_cells_that_its_file_has(tmp_path):
    options = SimpleNamespace(
        minutes=None,
        threads=2,
        repeats=3,
        quick=False,
        engines=[],
        shapes=[],
        out=tmp_path / "out.json",
    )
    options.resume = True
    first = measure_cpu.CpuBenchmark(options, PLANS["cpu"], tmp_path)
    one, beams, eight = first.cells_left("seq2seq")[:3]
    first.result["cells"] = [{**asdict(one), "engine": "cpu-int8", "per_second": 1.0}]
    first.result["cells"] += [
        {**asdict(beams), "engine": engine, "missing": "left out"}
        for engine in ("cpu-int8", "vanilla")
    ]
    first.result["cells"] += [{**asdict(eight), "engine": "cpu-int8", "per_second": 1.0}]
    first.result["cells"] += [
        {**asdict(eight), "engine": "cpu-int4", "missing": "no time was left"}
    ]
    first.write()
    again = measure_cpu.CpuBenchmark(options, PLANS["cpu"], tmp_path)
    assert again.result["cells"] == first.result["cells"][:3]
    assert again.cells_left("seq2seq") == PLANS["cpu"].shapes["seq2seq"][2:]
    assert again.result["command"].count("python benchmarks/speed.py") == 2
    assert again.cells_left("load") == PLANS["cpu"].shapes["load"]
    again.result["load"] = [{"engine": "cpu-int8"}]
    assert again.cells_left("load") == []
    options.resume = False
    assert measure_cpu.CpuBenchmark(options, PLANS["cpu"], tmp_path).result["cells"] == []
    options.resume, options.repeats = True, 5
    with pytest.raises(
        ValueError, match="the file has the options .*'repeats': 3.*, expected .*'repeats': 5"
    ):
        measure_cpu.CpuBenchmark(options, PLANS["cpu"], tmp_path)


def test_files_are_made_once(tmp_path):
    made = []

    def make(folder):
        folder.mkdir()
        (folder / "file").write_text("")
        if not made:
            made.append("cut short")
            raise KeyboardInterrupt
        made.append("whole")
        return {"bytes": 7}

    folder = tmp_path / "engine"
    with pytest.raises(KeyboardInterrupt):
        measure.once(folder, make, folder)
    assert [measure.once(folder, make, folder) for _ in range(2)] == [{"bytes": 7}] * 2
    assert made == ["cut short", "whole"] and [each.name for each in folder.iterdir()] == ["file"]


# ------------------------------------------------------------------------------------- arrangements


def test_arrangements_share_the_threads_that_there_are():
    one, many = (PLANS["cpu"].shapes["seq2seq"][place] for place in (0, 2))
    assert (one.batch, many.batch) == (1, 8)
    both = [Arrangement(1, 2), Arrangement(1, 1)]
    assert (
        arrangements_on_cpu("cpu-int8", one, 2)
        == arrangements_on_cpu("llamacpp-q8", many, 2)
        == both
    )
    for engine in ("ctranslate2-int8", "openvino-int8", "cpu-int8"):
        assert arrangements_on_cpu(engine, many, 2) == [*both, Arrangement(2, 1)]
    assert arrangements_on_cpu("transformers", many, 2) == [Arrangement(1, 2)]
    assert arrangements_on_cpu("cpu-int8", many, 1) == [Arrangement(1, 1)]


class Clocked:
    """In the place of a process, whose run takes `seconds`."""

    def __init__(self, arrangement, seconds):
        self.arrangement, self.seconds, self.started, self.runs, self.is_closed = (
            arrangement,
            seconds,
            {},
            0,
            False,
        )

    def run(self, ids, new_tokens, beams):
        self.runs += 1
        # a first run takes longer
        return {"seconds": self.seconds if self.runs > 1 else 100 * self.seconds}

    def close(self):
        self.is_closed = True


def test_an_engine_keeps_the_process_of_its_fastest_arrangement(tmp_path, monkeypatch):
    options = SimpleNamespace(
        minutes=None, threads=2, repeats=3, quick=True, engines=["cpu-int8"], shapes=["seq2seq"]
    )
    options.resume = False
    benchmark = measure_cpu.CpuBenchmark(options, PLANS["cpu"], tmp_path)
    benchmark.result["models"]["seq2seq"] = {"vocab_size": 100}
    one, many = (PLANS["cpu"].shapes["seq2seq"][place] for place in (0, 2))
    seconds = {Arrangement(1, 2): 2.0, Arrangement(1, 1): 1.0, Arrangement(2, 1): 0.5}
    started = []

    def start(engine, kind, arrangement):
        started.append(Clocked(arrangement, seconds[arrangement]))
        return started[-1]

    monkeypatch.setattr(benchmark, "start", start)
    workers = benchmark.workers(one, {})
    assert workers["cpu-int8"].arrangement == Arrangement(1, 1)
    assert [each.is_closed for each in started] == [True, False]
    found = benchmark.workers(many, workers)["cpu-int8"]
    assert found.arrangement == Arrangement(2, 1)
    # the third one was there
    assert [each.arrangement for each in started[2:]] == [Arrangement(1, 2), Arrangement(2, 1)]
    assert [each.is_closed for each in started] == [True, True, True, False]


def test_the_rows_of_a_batch_come_back_in_their_order():
    model = SimpleNamespace(
        prepare=lambda ids: ids.tolist(),
        run=lambda inputs, new_tokens, beams: [[row[0]] * new_tokens for row in inputs],
        output=lambda result, new_tokens: np.array(result),
    )
    parts = Parts(model, 2)
    ids = np.arange(15).reshape(5, 3)
    assert [len(part) for part in parts.prepare(ids)] == [3, 2]
    assert (
        parts.output(parts.run(parts.prepare(ids), 2, 1), 2).tolist()
        == ids[:, :1].repeat(2, axis=1).tolist()
    )


def test_captions_take_the_fastest_setting_of_an_engine():
    def measured(*speeds):
        return {"per_second": {"median": speeds[1], "runs": list(speeds)}, "same": 0.99}

    found = {
        "int8": {
            "engine 2 1 64": measured(8.0, 10.0, 20.0),
            "runtime 1 2 32": measured(4.0, 5.0, 5.0),
        }
    }
    found["int8"]["ctranslate2 2 1 64"] = measured(40.0, 50.0, 50.0)
    summary = measure_cpu.captions_summary("cpu-int8", found, 40)
    assert summary["per_second"] == 10 and summary["agreement"] == 0.99
    assert summary["seconds"] == dict(median=4.0, min=2.0, max=5.0, runs=[5.0, 4.0, 2.0])
    assert summary["arrangement"] == dict(workers=2, threads=1, rows=64, by="engine")
    found["int8"]["workers 1 2 32"] = measured(11.0, 12.0, 13.0)
    assert measure_cpu.captions_summary("cpu-int8", found, 40)["arrangement"]["by"] == "workers"


def test_the_plot_is_drawn_from_the_result_alone(tmp_path):
    report.plot(RESULT, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_the_documentation_has_what_was_measured():
    found = pages.results()
    for page, text in {
        "README.md": pages.highlights(found),
        "docs/results.md": pages.overviews(found),
    }.items():
        page = (BENCHMARKS.parent / page).read_text()
        assert found and pages.filled(page, text) == page
    for name, result in found.items():
        assert report.processor(result["hardware"]["instructions"]) == name.removeprefix("cpu-")
        assert not result["options"]["quick"] and result["options"]["repeats"] >= 5
        assert (BENCHMARKS / "results" / f"{name}.png").stat().st_size > 10_000


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


def check(record):
    times = [record["seconds"]] + (
        [record["first_token_seconds"]] if record["beams"] == 1 and record["new_tokens"] else []
    )
    for found in times:
        assert len(found["runs"]) == 3 and 0 < found["min"] <= found["median"] <= found["max"]
    assert record.keys() >= MEASURED and 0 < record["memory_above_import"] < record["peak_memory"]
    counted = record["batch"] * max(record["new_tokens"], 1)
    assert record["per_second"] == pytest.approx(counted / record["seconds"]["median"])
    if record["engine"] not in PLANS["cpu"].rounded:
        assert record.get("agreement", 1) == 1 and record.get("max_difference", 0) < 1e-3


@pytest.mark.slow
def test_a_quick_run_measures_every_cell_with_every_engine(tmp_path):
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
            check(record)
    assert [found["engine"] for found in result["bandwidth"]] == ["cpu-int8", "cpu-calibrated"]
    assert all(
        found["share"] > 0 and found["bytes_per_step"] > 10_000 for found in result["bandwidth"]
    )
    assert result["exports"]["seq2seq"]["cpu-int8"].keys() == {"seconds", "bytes"}
    assert "| transformers, eager |" in output and "| ours, cpu int8 |" in output
    assert (tmp_path / "files/quick/seq2seq/cpu-calibrated/manifest.json").is_file()
    assert run_quick(tmp_path / "quick.json", ["seq2seq"], engines, 1, *files, "--resume") == (
        result,
        output,
    )


@pytest.mark.slow
def test_a_quick_run_of_the_other_shapes(tmp_path):
    engines = ["transformers", "vanilla", "portable-fp32", "cpu-fp32", "cpu-int4"]
    shapes = ["gpt2", "bert", "length", "encoder-length", "batch"]
    result, output = run_quick(tmp_path / "quick.json", [*shapes, "load"], engines)
    for found in result["load"]:
        assert found.keys() == {
            "engine",
            "kind",
            "import_seconds",
            "load_seconds",
            "first_token_seconds",
        }
    for record in result["cells"]:
        if "missing" not in record:
            check(record)
    assert {record["shape"] for record in result["cells"] if "missing" not in record} == set(shapes)
    assert {record.get("missing") for record in result["cells"]} == {
        None,
        "left out: growth is measured for fewer engines",
    }
    assert "**GPT-2, greedy, new tokens/s**" in output and "**BERT, sequences/s**" in output


@pytest.mark.slow
def test_a_quick_run_with_the_engines_of_others_in_all_arrangements(tmp_path):
    """Those that are installed: without rounding they give the tokens and the states of
    transformers."""
    engines = [
        "transformers",
        *(name for name in PLANS["cpu"].engines if name.startswith(("openvino", "llamacpp"))),
    ]
    result, output = run_quick(tmp_path / "quick.json", ["seq2seq", "gpt2", "bert"], engines, 2)
    for record in result["cells"]:
        if "missing" not in record:
            check(record)
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
        assert f"| {report.LABELS[engine]} |" in output


@pytest.mark.slow
def test_a_quick_run_of_captions(tmp_path):
    engines = ["transformers", "ctranslate2-int8", "cpu-fp32"]
    (tmp_path / "captions").write_text("A dog runs.\nTwo men stand in a field.\n")
    result, output = run_quick(
        tmp_path / "quick.json", ["captions"], engines, 1, "--captions", tmp_path / "captions"
    )
    other, theirs, ours = result["cells"]
    assert other["missing"] == "left out: many sentences are measured for engines with a queue"
    if is_installed("ctranslate2-int8"):
        assert (
            theirs["per_second"] == pytest.approx(2 / theirs["seconds"]["median"])
            and 0 <= theirs["agreement"] <= 1
        )
    assert ours["agreement"] == 1 and ours["per_second"] == pytest.approx(
        2 / ours["seconds"]["median"]
    )
    assert "**captions, greedy, sentences/s**" in output
    result, _ = run_quick(tmp_path / "quick.json", ["captions"], engines)
    assert [record["missing"] for record in result["cells"][1:]] == ["no captions were given"] * 2


@pytest.mark.slow
def test_a_quick_run_of_training_speed(tmp_path, monkeypatch):
    recipe = read_recipe("multi30k-en-de")
    write_text(recipe, tmp_path)
    settings = {"tokenizer.vocab_size": 60, "model.hidden_size": 16}
    settings |= {"training.tokens_per_update": 256, "training.tokens_per_batch": 128}
    monkeypatch.setattr(training_speed, "TOKENS", 1000)
    monkeypatch.setattr(training_speed, "BATCH_SIZES", (8, 32))
    options = SimpleNamespace(
        recipe="multi30k-en-de", data=tmp_path, set=settings.items(), repeats=2
    )
    found = training_speed.run(options, tmp_path / "state")
    speeds = found["tokens_per_second"]
    tried = [
        f"MarianMTModel, {kind}, batch {size}"
        for kind in ("random", "group_by_length")
        for size in (8, 32)
    ]
    assert [*speeds] == ["ours, our batches", *tried, "MarianMTModel, our batches"]
    assert all(len(spread["runs"]) == 2 and spread["min"] > 0 for spread in speeds.values())
    assert [*found["ratios"]] == ["random", "group_by_length", "our batches"]
    for kind, ratio in found["ratios"].items():
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
    assert abs(found["parameters"]["ours"] / found["parameters"]["MarianMTModel"] - 1) < 0.05


@pytest.mark.slow
def test_a_quick_run_of_one_graph_beside_the_runtime():
    """Both give the same tokens in float32; what is asked for is measured, and no more."""
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
    found = one_graph.run(one_graph.parse([*arguments, "--targets", "portable-fp32", "cpu-int8"]))
    assert [*found["models"]] == ["base", "decoder"]
    for targets in found["models"].values():
        assert [*targets] == ["portable-fp32", "cpu-int8"]
        for target, batches in targets.items():
            assert [*batches] == [1, 8, 32]
            for batch, each in batches.items():
                assert each["speed"] == pytest.approx(
                    each["seconds"]["runtime"] / each["seconds"]["graph"], abs=1e-3
                )
                assert len(each["ratios"]) == 3 and each["new_tokens"] == 4
                assert each["same_rows"] == batch or target == "cpu-int8"


def test_one_graph_is_measured_against_the_runtime_in_turns(monkeypatch):
    """The ratio is that of the medians, and a row counts as the same where all its tokens are."""
    times = iter([0, 2, 2, 5, 5, 9, 9, 15, 15, 16, 16, 17])
    monkeypatch.setattr(one_graph.time, "perf_counter", lambda: next(times))
    made = {
        "graph": lambda: np.array([[0, 5, 6], [0, 7, 8]]),
        "runtime": lambda: np.array([[0, 5, 6], [0, 7, 9]]),
    }
    found = one_graph.measured(made, 3, 1)
    assert (
        found["seconds"] == {"graph": 2, "runtime": 3}
        and found["speed"] == 1.5
        and found["ratios"] == [1.0, 1.5, 1.5]
    )
    assert (found["same_rows"], found["new_tokens"]) == (1, 2)


# ------------------------------------------------------------------------------------------- scores


def test_scores_are_computed_again_from_the_weights_and_compared_with_what_was_said(
    tmp_path, capsys, monkeypatch
):
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
    with pytest.raises(SystemExit, match="1 scores differ"):
        scores.main()


def test_an_interval_of_bleu_is_the_one_that_sacrebleu_prints(tmp_path):
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
    said = subprocess.run(
        [*command, "--confidence", "-w", "4"], check=True, capture_output=True, text=True
    ).stdout
    for printed, metric in zip(
        json.loads(said), (sacrebleu.metrics.BLEU(), sacrebleu.metrics.CHRF()), strict=True
    ):
        mean, half = printed["confidence_mean"], printed["confidence_var"]
        assert half > 1
        assert intervals.corpus_interval(metric, outputs, references) == pytest.approx(
            (mean - half, mean + half), abs=2e-4
        )


def test_an_interval_of_accuracy_is_wilson_s():
    right, count, z = 718, 872, 1.959964
    share = right / count
    center = share + z**2 / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    expected = [(center - half) / (1 + z**2 / count), (center + half) / (1 + z**2 / count)]
    assert intervals.accuracy_interval(right, count) == pytest.approx(expected, abs=1e-6)
    labels = np.arange(count) % 2
    found = scores.intervals(
        SimpleNamespace(task="sequence-classification"),
        None,
        labels ^ (np.arange(count) >= right),
        labels,
    )
    assert found == {"accuracy": intervals.accuracy_interval(right, count)}


def test_an_interval_of_perplexity_is_about_that_of_a_ratio_of_means():
    """By the delta method, of stretches of 12 blocks that are alike; some blocks predict less than
    others."""
    rng = np.random.default_rng(0)
    losses = rng.gamma(2, 1, (32 * 12, 16)) * rng.uniform(0.5, 1.5, (32, 1)).repeat(12, axis=0)
    labels = np.where(np.arange(16) < rng.integers(4, 17, (32 * 12, 1)), 1, -100)
    losses[labels == -100] = 0
    totals, counts = (values.reshape(32, -1).sum(axis=1) for values in (losses, labels != -100))
    mean = totals.sum() / counts.sum()
    error = math.sqrt(((totals - mean * counts) ** 2).sum()) / counts.sum()
    found = scores.intervals(SimpleNamespace(task="causal-lm"), None, losses, labels)
    assert found["nll"] == pytest.approx(
        (mean - 1.96 * error, mean + 1.96 * error), abs=0.2 * error
    )
    assert found["perplexity"] == pytest.approx(tuple(math.exp(bound) for bound in found["nll"]))


def test_a_linear_baseline_learns_from_the_training_rows_and_is_counted_on_the_others(tmp_path):
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
        found = linear_baseline.baseline(data, features)
        assert (found["train"], found["rows"], found["correct"], found["accuracy"]) == (
            len(OPINIONS),
            4,
            3,
            0.75,
        )
        assert found["c"] in linear_baseline.GRID["linearsvc__C"]
        assert found["interval"] == intervals.accuracy_interval(3, 4)


def test_cased_translations_are_scored_on_lower_cased_tokens(tmp_path):
    """Two lines in the form of Multi30k's files; a translation is right whatever its case."""
    targets = ["Ein Mann sagt: „Hallo“.", "Zwei Hunde rennen über eine Wiese."]
    tokens = ["ein mann sagt : &quot; hallo &quot; .", "zwei hunde rennen über eine wiese ."]
    files = {
        "val.en.gz": ["a man", "two dogs"],
        "val.de.gz": targets,
        "val.lc.norm.tok.de.gz": tokens,
    }
    for name, lines in files.items():
        with gzip.open(tmp_path / name, "wt", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def translate(texts, batch_size):
        return [
            {"translation_text": {"a man": "EIN mann sagt: „Hallo“.", "two dogs": said}[text]}
            for text in texts
        ]

    said = targets[1]
    assert lowercased.score(translate, tmp_path, "val") == dict(
        text="val",
        bleu=100.0,
        interval=[100.0, 100.0],
        signature=f"nrefs:1|case:mixed|eff:no|tok:none|smooth:exp|version:{sacrebleu.__version__}",
        lines=2,
        alike=2,
    )
    said = "Zwei Hunde rennen über das Gras."
    expected = sacrebleu.corpus_bleu(
        [tokens[0], "zwei hunde rennen über das gras ."], [tokens], tokenize="none"
    ).score
    assert lowercased.score(translate, tmp_path, "val")["bleu"] == round(expected, 2) < 90
