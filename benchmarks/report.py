"""The results of benchmarks/speed.py as tables and as a plot.

`python benchmarks/report.py benchmarks/results/cpu-avx2.json`, or another file there, reads the
JSON file only. Values are medians, followed by the slowest and the fastest round.
"""

import importlib.util
import json
import sys
from pathlib import Path

from speed_plot import plot
from speed_results import GROWTH, LABELS, SPEEDS, by_engine, growth, leads, ratios, records

# title of a table: its keys of `SPEEDS`
OVERVIEWS = {
    "Translation, greedy": [("seq2seq", 1), ("captions", 1)],
    "Translation, beams": [("seq2seq", 4), ("captions", 5)],
    "GPT-2 and BERT": [("gpt2", 1), ("bert", 1)],
}
# figures of others, which are not measured here
PUBLISHED = {
    "bart": "\n\nTensorRT-LLM on an H100, as published, batch 32, 64 and 128: 10,662, 16,209 and "
    "23,518 executed tokens/s."
}
# (what, engine, the engine it is divided by): {batch: what it is to reach}
GOALS = {
    ("tokens/s: seq2seq greedy", "cuda-fp16", "transformers"): {1: 8},
    ("tokens/s: seq2seq greedy", "cuda-fp16", "transformers-compile"): {1: 2},
    ("tokens/s: seq2seq greedy", "cuda-fp16", "torch-graph"): {128: 0.6},
    ("tokens/s: seq2seq beam 4", "cuda-fp16", "transformers"): {32: 9},
}
BLEU_GOAL = 0.1  # maximum difference in BLEU
MEGA = 1e6


def tables(result: dict) -> str:
    """Return the whole report of `result`, the JSON of a benchmark, in markdown."""
    parts = [setting(result), overview(result)]
    parts += [speed_table(result, ", ".join(titles), *key) for key, titles in SPEEDS.items()]
    parts += [growth_table(result, shape) for shape in GROWTH]
    parts += [
        lead_table(result),
        ratio_table(result),
        verify_table(result),
        bleu_table(result),
        step_table(result),
    ]
    parts += [bandwidth_table(result), load_table(result), export_table(result)]
    return "\n\n".join(part for part in parts if part)


def overview(result: dict) -> str:
    """Return the tables of docs/speed.md: the speed of each engine for each shape and batch.

    `result` is the JSON of a benchmark.
    """
    parts = [overview_table(result, title, keys) for title, keys in OVERVIEWS.items()]
    return "\n\n".join(part for part in parts if part)


def overview_table(result: dict, title: str, keys: list[tuple[str, int]]) -> str:
    columns = {
        f"{SPEEDS[key][0]}, {batch}": {
            record["engine"]: record for record in records(result, *key) if record["batch"] == batch
        }
        for key in keys
        for batch in sorted({record["batch"] for record in records(result, *key)})
    }
    rows = []
    for engine, label in LABELS.items():
        cells = [by_engine_name.get(engine, {}) for by_engine_name in columns.values()]
        if any("per_second" in cell for cell in cells):
            rows.append([label, *map(speed_cell, cells)])
    return markdown(title, ["", *columns], rows) if rows else ""


def speed_cell(record: dict) -> str:
    return number(record["per_second"]) if "per_second" in record else "-"


def setting(result):
    options = result["options"]
    command = " ".join(
        [*(f"{name}={value}" for name, value in result["environment"].items()), result["command"]]
    )
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"{gpu(result)}{machine(result)}; {options['threads']} threads, "
        f"median of {options['repeats']} rounds (slowest - fastest), {result['date']}. "
        f"{packages}.\n"
        f"`{command}`"
    )


def machine(result):
    hardware = result["hardware"]
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores ({', '.join(hardware['instructions'])}; L3 "
        f"{hardware['l3_bytes'] / 2**20:.0f} MB), "
        f"{hardware['memory_bytes'] / 2**30:.0f} GB"
    )


def gpu(result):
    """Return the GPU part of the title of `result`, `""` for a benchmark of CPUs."""
    if "device" not in result:
        return ""
    if result["device"] == "cuda":
        machine = result["hardware"]
        return (
            f"{machine['gpu']}, CUDA {machine['cuda']}, copies "
            f"{result['copy_bandwidth'] / 1e12:.2f} TB/s; "
        )
    return (
        "No GPU, all on the CPU in float32; "
        if result["device"]
        else "No GPU, nothing was measured; "
    )


def markdown(title, header, rows):
    return f"**{title}**\n\n{table(header, rows)}"


def table(header, rows):
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speed_table(result, title, shape, beams):
    shape_records = records(result, shape, beams)
    if not shape_records:
        return ""
    batches = sorted({record["batch"] for record in shape_records})
    header = ["", *(f"batch {batch}" for batch in batches)]
    is_encoder = shape in ("bert", "mixed", "modernbert", "modernbert-512")
    has_first = not is_encoder and shape != "captions" and beams == 1
    header += [f"first token, ms, batch {batches[0]}"] if has_first else []
    has_texts, has_memory, has_kernels = (
        any(name in record for record in shape_records)
        for name in ("from_texts", "peak_memory", "kernel_seconds")
    )
    header += ["from texts"] if has_texts else []
    header += [f"memory, MB (above imports), batch {batch}" for batch in batches if has_memory]
    header += [f"in kernels, ms, batch {batch}" for batch in batches if has_kernels]
    has_arrangements = any("arrangement" in record for record in shape_records)
    header += ["workers x threads"] if has_arrangements else []
    header += ["error" if is_encoder else "same tokens"]
    rows = []
    for engine, cells in by_engine(shape_records, "batch").items():
        row = [LABELS[engine], *(speed(cells[batch]) for batch in batches)]
        row += [milliseconds(cells[batches[0]], "first_token_seconds")] if has_first else []
        row += [from_texts(cells[batches[0]])] if has_texts else []
        row += [memory(cells[batch]) for batch in batches if has_memory]
        row += [kernels(cells[batch]) for batch in batches if has_kernels]
        row += (
            [", ".join(arrangement(cells[batch]) for batch in batches)] if has_arrangements else []
        )
        rows.append([*row, likeness(cells.values())])
    published = PUBLISHED.get(shape, "")
    return markdown(title, header, rows) + notes(shape_records) + published


def growth_table(result, shape):
    title, field = GROWTH[shape]
    grown = growth(result, shape)
    if not grown:
        return ""
    values = sorted({record[field] for record in grown})
    show = speed if field == "batch" else seconds
    rows = [
        [LABELS[engine], *(show(cells[value]) if value in cells else "-" for value in values)]
        for engine, cells in by_engine(grown, field).items()
    ]
    return markdown(title, ["", *map(str, values)], rows) + notes(grown)


def speed(record):
    if "missing" in record:
        return "-"
    slowest, fastest = (
        record["per_second"] * record["seconds"]["median"] / record["seconds"][end]
        for end in ("max", "min")
    )
    return f"{number(record['per_second'])} ({number(slowest)} - {number(fastest)})"


def from_texts(record):
    return number(record["from_texts"]) if "from_texts" in record else "-"


def seconds(record):
    return "-" if "missing" in record else " ".join(spread(record["seconds"], 1))


def milliseconds(record, field):
    return "-" if "missing" in record else " ".join(spread(record[field], 1000))


def spread(times, scale):
    return number(
        scale * times["median"]
    ), f"({number(scale * times['min'])} - {number(scale * times['max'])})"


def number(value):
    """Return `value` as text with three significant digits and no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def memory(record):
    if "missing" in record:
        return "-"
    return f"{record['peak_memory'] / MEGA:.0f} ({record['memory_above_import'] / MEGA:.0f})"


def arrangement(record):
    value = record.get("arrangement")
    return f"{value['workers']} x {value['threads']}" if value else "-"


def kernels(record):
    """Return the time in kernels of a `record`, and its share of the time without a profiler, as
    text."""
    if "kernel_seconds" not in record:
        return "-"
    share = record["kernel_seconds"] / record["seconds"]["median"]
    return f"{number(1000 * record['kernel_seconds'])} ({100 * share:.0f}%)"


def likeness(cells):
    """Return how much the records `cells` of an engine agree with the first engine, as text.

    It is the share of tokens, or the largest error of hidden states.
    """
    cells = list(cells)
    agreements = [(cell["agreement"], cell["batch"]) for cell in cells if "agreement" in cell]
    differences = [cell["max_difference"] for cell in cells if "max_difference" in cell]
    if agreements:
        agreeing = sum(share * rows for share, rows in agreements)
        return f"{100 * agreeing / sum(rows for _, rows in agreements):.1f}%"
    return f"{max(differences):.1e}" if differences else "-"


def notes(cells):
    """Return the reason for each `-` in a table of the records `cells`, once for each engine."""
    reasons = {}
    for record in cells:
        for field, what in (("missing", ""), ("kernels_missing", ", kernels")):
            if field in record:
                reasons[f"\n- {LABELS[record['engine']]}{what}: {record[field]}"] = None
    return "\n".join(["", "".join(reasons)]) if reasons else ""


def lead_table(result):
    pairs_by_engine = leads(result)
    if not pairs_by_engine:
        return ""
    batches = sorted({batch for pairs in pairs_by_engine.values() for batch in pairs})
    rows = []
    for (what, engine), pairs in pairs_by_engine.items():
        cells = [
            lead(*pairs[batch], engine == "any") if batch in pairs else "-" for batch in batches
        ]
        rows.append([f"{what}: {LABELS.get(engine, 'the fastest of both, any precision')}", *cells])
    title = (
        "ours over the fastest other engine of the same precision (our workers x threads / that "
        "engine and its)"
    )
    return markdown(title, ["", *(f"batch {batch}" for batch in batches)], rows)


def lead(ours, other, is_named):
    mine = ([LABELS[ours["engine"]]] if is_named else []) + (
        [arrangement(ours)] if "arrangement" in ours else []
    )
    theirs = [LABELS[other["engine"]]] + ([arrangement(other)] if "arrangement" in other else [])
    sides = " / ".join(", ".join(side) for side in (mine, theirs) if side)
    return f"{ours['per_second'] / other['per_second']:.2f} ({sides})"


def ratio_table(result):
    filled = [ratio for ratio in ratios(result) if ratio["batches"]]
    if not filled:
        return ""
    batches = sorted({batch for ratio in filled for batch in ratio["batches"]})
    rows = []
    for ratio in filled:
        goals = GOALS.get((ratio["what"], ratio["engine"], ratio["divided_by"]), {})
        name = f"{ratio['what']}, {LABELS[ratio['engine']]} / {LABELS[ratio['divided_by']]}"
        rows.append(
            [name, *(goal_cell(ratio["batches"].get(batch), goals.get(batch)) for batch in batches)]
        )
    return markdown("ratios", ["", *(f"batch {batch}" for batch in batches)], rows)


def goal_cell(value, goal):
    return ("-" if value is None else f"{value:.2f}") + ("" if goal is None else f" (goal: {goal})")


def verify_table(result):
    reports = result.get("verify", [])
    if not reports:
        return ""
    rows = []
    for report in reports:
        cells = ["-"] * 4
        if "missing" not in report:
            agreeing = f"{report['agreeing_tokens']} of {report['tokens']}"
            cells = [
                str(report["cases"]),
                f"{report['max_error']:.1e}",
                agreeing,
                str(report["failures"]),
            ]
        rows.append([f"{report['kind']}, {LABELS[report['engine']]}", *cells])
    return markdown(
        "verify", ["", "cases", "largest error", "top choices that agree", "failures"], rows
    ) + notes(reports)


def bleu_table(result):
    scores_by_engine = result.get("bleu", [])
    if not scores_by_engine:
        return ""
    scores = {score["engine"]: score.get("bleu") for score in scores_by_engine}
    rows = []
    for engine, score in scores.items():
        is_known = score is not None and scores["torch"] is not None
        rows.append(
            [
                engine,
                "-" if score is None else f"{score:.2f}",
                f"{score - scores['torch']:+.2f}" if is_known else "-",
            ]
        )
    reasons = dict.fromkeys(
        f"\n- {score['engine']}: {score['missing']}"
        for score in scores_by_engine
        if "missing" in score
    )
    title = f"BLEU of the shipped model (goal: {BLEU_GOAL} from torch at most)"
    return markdown(title, ["", "BLEU", "from torch"], rows) + (
        "\n" + "".join(reasons) if reasons else ""
    )


def step_table(result):
    step_records = result.get("steps", [])
    batches = sorted({step["batch"] for step in step_records})
    rows = []
    for kind in dict.fromkeys(step["kind"] for step in step_records):
        for engine, steps in by_engine(
            [step for step in step_records if step["kind"] == kind], "batch"
        ).items():
            rows.append(
                [f"{kind}, {LABELS[engine]}", *(step_cell(steps.get(batch)) for batch in batches)]
            )
    title = (
        "one step, ms, with what it must read and the share of the copy bandwidth at which it does"
    )
    return markdown(title, ["", *(f"batch {batch}" for batch in batches)], rows) if rows else ""


def step_cell(step):
    if step is None or "missing" in step:
        return "-"
    cached = ", fits the cache" if step["fits_cache"] else ""
    return (
        f"{number(1000 * step['step_seconds'])} ({step['bytes_per_step'] / MEGA:.1f} MB{cached}; "
        f"{100 * step['share']:.0f}%)"
    )


def bandwidth_table(result):
    if not result.get("bandwidth"):
        return ""
    rows = [
        [
            f"{record['kind']}, {LABELS[record['engine']]}",
            f"{record['bytes_per_step'] / MEGA:.1f}",
            number(1000 * record["step_seconds"]),
            f"{record['bytes_per_second'] / 1e9:.1f} "
            f"({record['reader']}{', fits the cache' if record['fits_cache'] else ''})",
            f"{100 * record['share']:.0f}%",
        ]
        for record in result["bandwidth"]
    ]
    header = [
        "batch 1",
        "weights read, MB",
        "ms a step",
        "this machine reads so many bytes at, GB/s",
        "share of that",
    ]
    return markdown("one step and the time in which its weights can be read", header, rows)


def load_table(result):
    if not result.get("load"):
        return ""
    names = ("import_seconds", "load_seconds", "first_token_seconds")
    rows = [
        [f"{record['kind']}, {LABELS[record['engine']]}"]
        + (["-"] * 3 if "missing" in record else [milliseconds(record, name) for name in names])
        for record in result["load"]
    ]
    return markdown("fresh process, ms", ["", "imports", "load", "first token"], rows) + notes(
        result["load"]
    )


def export_table(result):
    rows = [
        [f"{kind}, {LABELS[engine]}", number(facts["seconds"]), f"{facts['bytes'] / MEGA:.1f}"]
        for kind, engines in result["exports"].items()
        for engine, facts in engines.items()
    ]
    return markdown("export, once", ["", "seconds", "MB"], rows) if rows else ""


def main(file: Path) -> None:
    result = json.loads(file.read_text())
    print(tables(result))
    if not any("per_second" in record for record in result["cells"]):
        print("\nNo plot: nothing was measured.")
    elif importlib.util.find_spec("matplotlib"):
        plot(result, file.with_suffix(".png"))
    else:
        print("\nNo plot: matplotlib is not installed.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
