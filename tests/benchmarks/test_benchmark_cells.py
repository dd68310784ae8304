"""Tests of resumed benchmarks, and of arrangements of processes and threads."""

from dataclasses import asdict
from types import SimpleNamespace

import measure
import measure_cpu
import numpy as np
import pytest
from engines import Parts
from messages import raises
from plan import PLANS, Arrangement, arrangements_on_cpu

# ------------------------------------------------------------------------------------------- resume


def test_resume_keeps_measured_cells_and_rejects_other_options(tmp_path):
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
    with raises(ValueError, seen=("repeats", 3), expected=("repeats", 5)):
        measure_cpu.CpuBenchmark(options, PLANS["cpu"], tmp_path)


def test_once_runs_again_after_interrupt_and_then_reuses_result(tmp_path):
    builds = []

    def make(folder):
        folder.mkdir()
        (folder / "file").write_text("")
        if not builds:
            builds.append("cut short")
            raise KeyboardInterrupt
        builds.append("whole")
        return {"bytes": 7}

    folder = tmp_path / "engine"
    with pytest.raises(KeyboardInterrupt):
        measure.once(folder, make, folder)
    assert [measure.once(folder, make, folder) for _ in range(2)] == [{"bytes": 7}] * 2
    assert builds == ["cut short", "whole"] and [each.name for each in folder.iterdir()] == ["file"]


# ------------------------------------------------------------------------------------- arrangements


def test_cpu_arrangements_depend_on_engine_batch_size_and_threads():
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


class FakeWorker:
    """A stand-in for the process of an engine; a run takes `seconds`."""

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
        # the first run takes longer
        return {"seconds": self.seconds if self.runs > 1 else 100 * self.seconds}

    def close(self):
        self.is_closed = True


def test_engine_keeps_process_of_fastest_arrangement(tmp_path, monkeypatch):
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
        started.append(FakeWorker(arrangement, seconds[arrangement]))
        return started[-1]

    monkeypatch.setattr(benchmark, "start", start)
    workers = benchmark.workers(one, {})
    assert workers["cpu-int8"].arrangement == Arrangement(1, 1)
    assert [each.is_closed for each in started] == [True, False]
    result = benchmark.workers(many, workers)["cpu-int8"]
    assert result.arrangement == Arrangement(2, 1)
    # the process with arrangement (1, 1) is reused
    assert [each.arrangement for each in started[2:]] == [Arrangement(1, 2), Arrangement(2, 1)]
    assert [each.is_closed for each in started] == [True, True, True, False]


def test_batch_in_parts_keeps_row_order():
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


def test_captions_summary_uses_fastest_setting_of_engine():
    def measured(*speeds):
        return {"per_second": {"median": speeds[1], "runs": list(speeds)}, "same": 0.99}

    result = {
        "int8": {
            "engine 2 1 64": measured(8.0, 10.0, 20.0),
            "runtime 1 2 32": measured(4.0, 5.0, 5.0),
        }
    }
    result["int8"]["ctranslate2 2 1 64"] = measured(40.0, 50.0, 50.0)
    result["int8"]["texts 2 1 64"] = measured(7.0, 8.0, 9.0)
    result["int8"]["texts 1 2 32"] = measured(6.0, 7.0, 20.0)
    summary = measure_cpu.captions_summary("cpu-int8", result, 40)
    assert summary["per_second"] == 10 and summary["agreement"] == 0.99
    assert summary["from_texts"] == 8
    theirs = measure_cpu.captions_summary("ctranslate2-int8", result, 40)
    assert theirs["per_second"] == 50 and "from_texts" not in theirs
    assert summary["seconds"] == dict(median=4.0, min=2.0, max=5.0, runs=[5.0, 4.0, 2.0])
    assert summary["arrangement"] == dict(workers=2, threads=1, rows=64, by="engine")
    result["int8"]["workers 1 2 32"] = measured(11.0, 12.0, 13.0)
    assert measure_cpu.captions_summary("cpu-int8", result, 40)["arrangement"]["by"] == "workers"
