"""The results of benchmarks/speed.py as a picture: bars for each batch and lines for growth."""

from pathlib import Path

from speed_results import GROWTH, LABELS, SPEEDS, by_engine, growth, records

COLORS = {
    "transformers": "#555555",
    "transformers-compile": "#aaaaaa",
    "ctranslate2-float32": "#d95f02",
    "ctranslate2-int8": "#fdae61",
    "openvino-fp32": "#1b7837",
    "openvino-int8": "#5aae61",
    "openvino-ptq": "#a6dba0",
    "openvino-int4": "#d9f0d3",
    "llamacpp-f32": "#8c510a",
    "llamacpp-q8": "#bf812d",
    "llamacpp-q4": "#dfc27d",
    "vanilla": "#c6dbef",
    "portable-fp32": "#9ecae1",
    "cpu-fp32": "#4292c6",
    "cpu-int8": "#08519c",
    "cpu-calibrated": "#08306b",
    "cpu-int4": "#54278f",
    "cuda-fp32": "#9ecae1",
    "cuda-fp16": "#08519c",
    "cuda-bf16": "#4292c6",
    "torch-graph": "#d95f02",
}


def plot(result: dict, out: Path) -> None:
    """Write a picture of `result` to `out`: bars for each batch and lines for growth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = [
        (
            ", ".join([*titles, f"batch {batch}"]),
            [record for record in records(result, *key) if record["batch"] == batch],
        )
        for key, titles in SPEEDS.items()
        for batch in sorted({record["batch"] for record in records(result, *key)})
    ]
    lines = [shape for shape in GROWTH if growth(result, shape)]
    columns, count = 3, len(bars) + len(lines)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.5 * columns, 2.8 * rows), layout="constrained", squeeze=False
    )
    for axis, (title, cells) in zip(axes.flat, bars):
        draw_bars(axis, title, cells)
    for axis, shape in zip(axes.flat[len(bars) :], lines):
        draw_lines(axis, *GROWTH[shape], growth(result, shape))
    for axis in axes.flat[count:]:
        axis.axis("off")
    machine = result["hardware"]
    name = machine.get("gpu") or f"{machine['cpu']}, {result['options']['threads']} threads"
    figure.suptitle(f"{name}; median, slowest and fastest round")
    figure.savefig(out, dpi=110)
    plt.close(figure)


def draw_bars(axis, title, cells):
    cells = [record for record in cells if "missing" not in record][::-1]
    speeds = [record["per_second"] for record in cells]
    ends = [
        [
            abs(speed * record["seconds"]["median"] / record["seconds"][end] - speed)
            for speed, record in zip(speeds, cells)
        ]
        for end in ("max", "min")
    ]
    axis.barh(
        [LABELS[record["engine"]] for record in cells],
        speeds,
        color=[COLORS[record["engine"]] for record in cells],
    )
    axis.errorbar(
        speeds, range(len(cells)), xerr=ends, fmt="none", ecolor="black", elinewidth=1, capsize=2
    )
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=7)


def draw_lines(axis, title, field, line_records):
    for engine, cells in by_engine(
        [record for record in line_records if "missing" not in record], field
    ).items():
        values = [
            cell["per_second"] if field == "batch" else cell["seconds"]["median"]
            for cell in cells.values()
        ]
        axis.plot(list(cells), values, marker="o", label=LABELS[engine], color=COLORS[engine])
    axis.set_xscale("log", base=2)
    values = sorted({record[field] for record in line_records})
    axis.set_xticks(values, values)
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=7)
