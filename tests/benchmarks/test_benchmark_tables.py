"""Tests of the tables, pages and plots that benchmarks/ writes from its results."""

import json
from pathlib import Path
from xml.etree import ElementTree

import dtypes
import embeddings
import pytest
import report
import speed
import speed_pages as pages
import speed_plot
import speed_results
import workload
from messages import raises
from plan import PLANS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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


def find_table_rows(text, start):
    """Return the cells of each table row whose first cell is `start`."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines if line[0] == start]


def test_tables_format_measured_cells():
    text = report.tables(RESULT)
    assert "**Translation, greedy**" in text and "**GPT-2 and BERT**" not in text
    assert "`CT2_USE_MKL=1 python benchmarks/speed.py`" in text
    overview, ours, by_length = find_table_rows(text, "ours, cpu int8")
    assert overview == ["ours, cpu int8", "40", "-"]
    # 10 tokens in 0.25 s, at best 0.2 s, at worst 0.5 s. First token after 50 ms. 300 MB, of which
    # imports take 50 MB.
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
    _, theirs = find_table_rows(text, "CTranslate2 int8")
    assert theirs[1:3] == ["10 (5 - 20)", "40 (20 - 80)"]
    assert "- ours, cpu int8: no\n" in text
    assert find_table_rows(text, "seq2seq, ours, cpu int8") == [
        ["seq2seq, ours, cpu int8", "40.0", "4", "20.0 (numpy.dot)", "50%"],
        ["seq2seq, ours, cpu int8", "12.3", "45.6"],
    ]


def test_ratios_compare_equal_batches_and_are_none_if_missing():
    result = {
        (ratio["what"], ratio["engine"], ratio["divided_by"]): ratio["batches"]
        for ratio in speed_results.ratios(RESULT)
    }
    assert result["tokens/s: seq2seq greedy", "cpu-int8", "ctranslate2-int8"] == {1: 4.0, 8: None}
    assert result["memory: seq2seq greedy", "cpu-int8", "ctranslate2-int8"] == {1: 2.0, 8: None}
    assert result["tokens/s: seq2seq greedy", "cpu-int8", "transformers"] == {1: None, 8: None}
    assert result["sequences/s: BERT", "cpu-int8", "ctranslate2-int8"] == {}
    assert find_table_rows(
        report.tables(RESULT), "tokens/s: seq2seq greedy, ours, cpu int8 / CTranslate2 int8"
    )[0][1:] == [
        "4.00",
        "-",
    ]


def test_leads_compare_with_fastest_other_engine_of_same_precision():
    alone, both = {"workers": 1, "threads": 1}, {"workers": 2, "threads": 1}
    cells = [
        cell("ctranslate2-int8", 1, (1.0, 1.0, 1.0), 150, arrangement=alone),  # 10 tokens in 1 s
        cell("openvino-int8", 1, (0.5, 0.5, 0.5), 150, arrangement=both),
        cell("openvino-fp32", 1, (0.1, 0.1, 0.1), 150),
        cell("cpu-int8", 1, (0.25, 0.25, 0.25), 300, arrangement={"workers": 1, "threads": 2}),
        cell("cpu-int4", 1, (0.2, 0.2, 0.2), 300),  # no other engine has int4
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
    result = speed_results.leads({**RESULT, "cells": cells})
    sides = {
        key: {batch: [side["engine"] for side in pair] for batch, pair in each.items()}
        for key, each in result.items()
    }
    assert sides == {
        ("seq2seq, greedy", "cpu-int8"): {
            1: ["cpu-int8", "openvino-int8"],
            128: ["cpu-int8", "ctranslate2-int8"],
        },
        ("BERT, 32 tokens", "cpu-int8"): {1: ["cpu-int8", "openvino-ptq"]},
    }
    text = report.lead_table({**RESULT, "cells": cells})
    [line] = find_table_rows(text, "seq2seq, greedy: ours, cpu int8")
    assert line[1:] == ["2.00 (1 x 2 / OpenVINO int8 weights, 2 x 1)", "0.80 (CTranslate2 int8)"]
    assert find_table_rows(text, "BERT, 32 tokens: ours, cpu int8")[0][1:] == [
        "0.50 (OpenVINO int8, calibrated)",
        "-",
    ]


def test_captions_table_compares_each_precision_and_the_fastest():
    times = {
        "ctranslate2-float32": 4.0,
        "ctranslate2-int8": 2.0,
        "cpu-fp32": 2.5,
        "cpu-calibrated": 3.0,
    }
    cells = [
        cell(engine, 1000, (each, each, each), 100, shape="captions") | {"from_texts": 512.0}
        for engine, each in times.items()
    ]
    text = report.tables({**RESULT, "cells": cells})
    fp32, int8, best = (
        find_table_rows(text, f"captions, greedy: {name}")
        for name in (
            "ours, cpu fp32",
            "ours, cpu int8, calibrated",
            "the fastest of both, any precision",
        )
    )
    assert [fp32[0][1], int8[0][1]] == ["1.60 (CTranslate2 fp32)", "0.67 (CTranslate2 int8)"]
    assert best[0][1] == "0.80 (ours, cpu fp32 / CTranslate2 int8)"
    assert "| from texts |" in text and "| 512 |" in text


def write_and_read_results(tmp_path):
    for name, (cpu, instruction) in {
        "vnni": ("A CPU with VNNI", "avx512_vnni"),
        "avx2": ("A CPU", "avx2"),
    }.items():
        hardware = {**RESULT["hardware"], "cpu": cpu, "instructions": [instruction]}
        (tmp_path / f"cpu-{name}.json").write_text(json.dumps({**RESULT, "hardware": hardware}))
    (tmp_path / "cuda.json").write_text("{}")
    return pages.results(tmp_path)


def test_overviews_have_one_section_per_cpu(tmp_path):
    assert pages.results(tmp_path) == {}
    result = write_and_read_results(tmp_path)
    assert [*result] == ["cpu-avx2", "cpu-vnni"]
    text = pages.overviews(result)
    assert text.count(report.overview(RESULT)) == 2
    first, second = (
        text.index(start)
        for start in ("### AVX2\n\n2 threads, A CPU", "### VNNI\n\n2 threads, A CPU with VNNI")
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


def test_comparison_has_fastest_engine_of_each_program():
    times = {
        "cpu-int4": 0.25,
        "cpu-int8": 0.5,
        "transformers": 4.0,
        "transformers-compile": 2.0,
        "openvino-fp32": 0.125,
    }
    cells = [
        cell(engine, 1, (each, each, each), 100, shape="gpt2") for engine, each in times.items()
    ]
    workloads = pages.all_speeds({**RESULT, "cells": cells})
    assert [*workloads] == ["GPT-2, greedy, batch 1, new tokens/s"]
    [line] = find_table_rows(pages.comparison(workloads), *workloads)
    assert line[1:] == ["40 int4", "5 torch.compile", "-", "**80** fp32", "-"]


def test_picture_has_bar_per_program_relative_to_fastest():
    text = pages.picture({"work": {"ours, cpu int8": 50.0, "OpenVINO fp32": 100.0}})
    root = ElementTree.fromstring(text)
    bars = [int(rect.get("width")) for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert bars == [pages.WIDTH // 2, pages.WIDTH]
    assert "50 int8" in text and "100 fp32" in text


def test_page_is_filled_between_marks_and_wrong_marks_raise():
    begin, end = (mark.format("speeds") for mark in pages.MARKS)
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    assert pages.filled(page, "speeds", "new \\1") == (f"before\n{begin}\nnew \\1\n{end}\nafter\n")
    for wrong in ("no marks", 2 * page, page.replace(end, "")):
        with raises(ValueError, seen=begin, expected="once"):
            pages.filled(wrong, "speeds", "new")


@pytest.mark.parametrize(
    "flags, name",
    [
        (["avx2"], "cpu-avx2"),
        (["avx2", "avx_vnni"], "cpu-vnni"),
        (["avx512_vnni"], "cpu-vnni"),
        (["avx512_vnni", "amx_int8"], "cpu-amx"),
    ],
)
def test_default_result_file_depends_on_cpu_instructions(flags, name, monkeypatch):
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
        ("seq2seq", 4, 128, "cpu-int8 cpu-calibrated", "ctranslate2-int8"),
        *(
            (
                "captions",
                beams,
                1000,
                "cpu-fp32 cpu-int8 cpu-calibrated",
                "ctranslate2-float32 ctranslate2-int8",
            )
            for beams in (1, 5)
        ),
    ],
)
def test_plan_measures_both_sides_of_each_comparison(shape, beams, batch, ours, others):
    plan = PLANS["cpu"]
    cells = [each for each in plan.shapes[shape] if (each.batch, each.beams) == (batch, beams)]
    assert len(cells) == (3 if shape == "encoder-length" else 1)
    for engine in [*ours.split(), *others.split()]:
        assert (
            engine in plan.engines
            and engine in speed_results.LABELS
            and engine in speed_plot.COLORS
        )
        assert [plan.left_out(engine, each) for each in cells] == [None] * len(cells)


def test_export_settings_of_calibrated_and_int4_engines():
    text = Path("text")
    assert workload.export_settings("calibrated", text) == {"dtype": "int8", "calibrate": text}
    assert workload.export_settings("int4", text) == {"dtype": "int4"}


def test_plot_is_drawn_from_result(tmp_path):
    speed_plot.plot(RESULT, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_documentation_matches_measured_results():
    actual = pages.results()
    assert actual
    others = [json.loads(file.read_text()) for file in (embeddings.RESULT, dtypes.RESULT)]
    for page, tables in pages.tables(actual, *others).items():
        page = (BENCHMARKS.parent / page).read_text()
        assert all(pages.filled(page, name, text) == page for name, text in tables.items())
    for name, result in actual.items():
        assert speed_results.processor(result["hardware"]["instructions"]) == name.removeprefix(
            "cpu-"
        )
        assert not result["options"]["quick"] and result["options"]["repeats"] >= 5
        assert (BENCHMARKS / "results" / f"{name}.png").stat().st_size > 10_000
