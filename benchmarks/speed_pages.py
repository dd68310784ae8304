"""The figures in README.md and docs/: `python benchmarks/speed_pages.py` writes them there from
benchmarks/results/, between the comments that name this file and a table, and draws
docs/speed.svg."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import dtypes
import embeddings
import report
import speed_results

ROOT = Path(__file__).parents[1]
MARKS = "<!-- benchmarks/speed_pages.py {} -->", "<!-- /benchmarks/speed_pages.py {} -->"
HIGHLIGHTS_MACHINE = "cpu-amx"  # that of embeddings.json too
# (shape, beams, batch): its name in README.md
HIGHLIGHTS = {
    ("bert", 1, 8): "BERT base, 128 tokens, batch 8: sequences/s",
    ("seq2seq", 4, 8): "the paper's base model, 4 beams, batch 8: tokens/s",
    ("captions", 5, 1000): "the small translator, 5 beams, 1,000 captions: sentences/s",
    ("gpt2", 1, 1): "GPT-2 small, greedy, batch 1: tokens/s",
}
EMBEDDING = "all-MiniLM-L6-v2, 512 captions: embeddings/s"
# engine of embeddings.py: its name in the first table of README.md
PROOF = {
    "torch": "sentence-transformers, torch",
    "openvino": "sentence-transformers, OpenVINO in bf16",
    "portable-int8": "ours, int8 for browsers, in standard ONNX operators",
    "runtime-fp32": "ours, fp32",
    "runtime-int8": "ours, int8 for CPUs",
}
PROOF_HEADER = (
    "all-MiniLM-L6-v2, 512 captions",
    "largest difference from torch",
    "largest change by other texts of the batch",
    "texts/s",
)
# program: the beginnings of its engines in `speed_results.LABELS` and `embeddings.ENGINES`
PROGRAMS = {
    "ours": ("ours, cpu ", "`TextRuntime.embed`, "),
    "transformers": ("transformers, ", "sentence-transformers, torch "),
    "CTranslate2": ("CTranslate2 ",),
    "OpenVINO": ("OpenVINO ", "sentence-transformers, OpenVINO "),
    "llama.cpp": ("llama.cpp ",),
}
PACKAGES = ("torch", "transformers", "onnxruntime", "ctranslate2", "openvino")

Speeds = dict[str, float]  # by the name of the engine in a table


def results(folder: Path = speed_results.RESULTS) -> dict[str, dict]:
    """Return {file name: result} of each CPU in `folder`."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("cpu-*.json"))}


def tables(
    by_machine: dict[str, dict], embedded: dict, by_checkpoint: dict[str, dict]
) -> dict[str, dict[str, str]]:
    """Return the tables by page and name; `embedded` is the result of embeddings.py, and
    `by_checkpoint` that of dtypes.py."""
    highlights = comparison(highlight_speeds(by_machine[HIGHLIGHTS_MACHINE], embedded))
    return {
        "README.md": {"proof": proof(embedded), "highlights": highlights},
        "docs/speed.md": {
            "engines": overviews(by_machine),
            "embeddings": embeddings.table(embedded),
        },
        "docs/results.md": {"dtypes": dtypes.table(by_checkpoint)},
    }


def proof(embedded: dict) -> str:
    """Return the first table of README.md: our exports beside sentence-transformers."""
    rows = [
        [
            name,
            f"{record['max_difference']:.0e}" if engine != "torch" else "-",
            f"{record['max_change_by_batch']:.0e}" if record["max_change_by_batch"] else "**none**",
            report.number(record["per_second"]),
        ]
        for engine, name in PROOF.items()
        for record in [embedded["engines"][engine]]
    ]
    return report.table(PROOF_HEADER, rows)


def highlight_speeds(result: dict, embedded: dict) -> dict[str, Speeds]:
    """Return the rows of README.md: {name of the workload: speeds}."""
    embedders = {
        embeddings.ENGINES[engine]: record["per_second"]
        for engine, record in embedded["engines"].items()
        if engine != "portable-int8"  # whose vectors depend on their batch
    }
    return {EMBEDDING: embedders} | {name: speeds(result, *key) for key, name in HIGHLIGHTS.items()}


def all_speeds(result: dict) -> dict[str, Speeds]:
    """Return {name: speeds} of each workload that was measured on a CPU."""
    return {
        f"{name}, batch {batch}, {unit}": speeds(result, *key, batch)
        for key, (name, unit) in speed_results.SPEEDS.items()
        for batch in sorted({record["batch"] for record in speed_results.records(result, *key)})
    }


def speeds(result: dict, shape: str, beams: int, batch: int) -> Speeds:
    return {
        speed_results.LABELS[record["engine"]]: record["per_second"]
        for record in speed_results.records(result, shape, beams)
        if record["batch"] == batch and "per_second" in record
    }


def comparison(workloads: dict[str, Speeds]) -> str:
    """Return a table with a row for each workload and a column for each program.

    A cell has the speed and the precision of the program's fastest engine; the fastest cell is in
    bold.
    """
    rows = [[name, *program_cells(measured)] for name, measured in workloads.items()]
    return report.table(["", *PROGRAMS], rows)


def program_cells(measured: Speeds) -> list[str]:
    best = {program: fastest(measured, starts) for program, starts in PROGRAMS.items()}
    top = max(speed for speed, _ in best.values())
    return [format_cell(speed, detail, speed == top) for speed, detail in best.values()]


def fastest(measured: Speeds, starts: Iterable[str]) -> tuple[float, str]:
    """Return the highest speed of the engines whose names begin with one of `starts`, and the rest
    of that name: (0.0, "") if there is none."""
    candidates = [
        (speed, name.removeprefix(start))
        for name, speed in measured.items()
        for start in starts
        if name.startswith(start)
    ]
    return max(candidates, default=(0.0, ""))


def format_cell(speed: float, detail: str, is_best: bool) -> str:
    if not speed:
        return "-"
    number = report.number(speed)
    return f"**{number}** {detail}" if is_best else f"{number} {detail}"


# ------------------------------------------------------------------------------------------ picture

BAR, GAP, LEFT, WIDTH = 14, 26, 110, 560  # pixels
COLORS = ("#08519c", "#555555", "#d95f02", "#1b7837", "#8c510a")  # of PROGRAMS


def picture(workloads: dict[str, Speeds]) -> str:
    """Return an SVG with bars of each program's fastest engine, relative to the fastest of all."""
    parts, y = [], 0
    for name, measured in workloads.items():
        y += GAP
        parts.append(f'<text x="0" y="{y - 6}" font-weight="bold">{name}</text>')
        best = {program: fastest(measured, starts) for program, starts in PROGRAMS.items()}
        top = max(speed for speed, _ in best.values())
        for (program, (speed, detail)), color in zip(best.items(), COLORS, strict=True):
            if speed:
                parts.append(
                    bar(y, program, f"{report.number(speed)} {detail}", speed / top, color)
                )
                y += BAR
    size = f'width="{LEFT + WIDTH + 170}" height="{y + 10}"'
    style = 'font-family="sans-serif" font-size="12" fill="#777777"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    return "\n".join([head, *parts, "</svg>\n"])


def bar(y: int, program: str, text: str, share: float, color: str) -> str:
    width = round(share * WIDTH)
    return (
        f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{program}</text>'
        f'<rect x="{LEFT}" y="{y + 1}" width="{width}" height="{BAR - 2}" fill="{color}"/>'
        f'<text x="{LEFT + width + 4}" y="{y + 11}">{text}</text>'
    )


# -------------------------------------------------------------------------------------------- pages


def overviews(by_machine: dict[str, dict]) -> str:
    """Return the speeds of all engines, a section for each CPU, with a link to the rest."""
    return "\n\n".join(overview(name, result) for name, result in by_machine.items())


def overview(name: str, result: dict) -> str:
    versions = {package: result["versions"].get(package, "not installed") for package in PACKAGES}
    packages = ", ".join(
        f"{package} {version}"
        for package, version in versions.items()
        if version != "not installed"
    )
    arranged = any("arrangement" in record for record in result["cells"])
    threads = "in its fastest arrangement of threads" if arranged else "with all threads"
    setting = (
        f"{result['options']['threads']} threads, {report.machine(result)}, each engine {threads}."
    )
    parts = [
        f"### {speed_results.processor(result['hardware']['instructions']).upper()}",
        f"{setting}\n{packages}.",
        comparison(all_speeds(result)),
        report.overview(result),
        f"[benchmarks/results/{name}.json][{name}.json] is that run.",
        f"![The same, with slowest and fastest rounds][{name}.png]",
        f"[{name}.json]: ../benchmarks/results/{name}.json\n"
        f"[{name}.png]: ../benchmarks/results/{name}.png",
    ]
    return "\n\n".join(parts)


def filled(page: str, name: str, text: str) -> str:
    """Return `page` with `text` between the marks of the table `name`.

    Raises:
        ValueError: unless the marks occur once.
    """
    begin, end = (mark.format(name) for mark in MARKS)
    changed, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}",
        lambda _: f"{begin}\n{text}\n{end}",
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"the page has {begin} with its end {count} times, expected once")
    return changed


def main(root: Path = ROOT) -> None:
    by_machine = results(root / "benchmarks/results")
    files = embeddings.RESULT, dtypes.RESULT
    embedded, by_checkpoint = (json.loads(file.read_text()) for file in files)
    for page, texts in tables(by_machine, embedded, by_checkpoint).items():
        content = (root / page).read_text()
        for name, text in texts.items():
            content = filled(content, name, text)
        (root / page).write_text(content)
        print(f"{page}: {', '.join(by_machine)}")
    workloads = highlight_speeds(by_machine[HIGHLIGHTS_MACHINE], embedded)
    (root / "docs/speed.svg").write_text(picture(workloads))


if __name__ == "__main__":
    main()
