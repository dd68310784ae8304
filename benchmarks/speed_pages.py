"""The speeds in README.md and docs/results.md, from the results of all processors: `python
benchmarks/speed_pages.py` writes them there, between the comments that name this file and a
table."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import embeddings
import report

ROOT = Path(__file__).parents[1]
URL = "https://github.com/vanilla-transformer/vanilla-transformer"
MARKS = "<!-- benchmarks/speed_pages.py {} -->", "<!-- /benchmarks/speed_pages.py {} -->"
# (shape, beams, batch): its name in README.md
HIGHLIGHTS = {
    ("seq2seq", 4, 1): "base seq2seq, beam 4, batch 1, tokens per second",
    ("gpt2", 1, 1): "GPT-2 small, greedy, batch 1, tokens per second",
    ("bert", 1, 8): "BERT base, batch 8, sequences per second",
}
PROGRAMS = ("CTranslate2", "OpenVINO", "llama.cpp", "transformers")
PACKAGES = ("torch", "transformers", "onnxruntime", "ctranslate2", "openvino")


def results(folder: Path = report.RESULTS) -> dict[str, dict]:
    """Return {file name: result} of each CPU in `folder`."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("cpu-*.json"))}


def tables(by_machine: dict[str, dict]) -> dict[str, dict[str, str]]:
    """Return the tables by page and name."""
    return {
        "README.md": {"highlights": comparison(complete(by_machine, HIGHLIGHTS), HIGHLIGHTS)},
        "docs/results.md": {
            "comparison": comparison(by_machine, all_workloads(by_machine)),
            "engines": overviews(by_machine),
            "embeddings": embeddings.table(json.loads(embeddings.RESULT.read_text())),
        },
    }


def all_workloads(by_machine: dict[str, dict]) -> dict[tuple[str, int, int], str]:
    """Return the name of each workload that was measured on some CPU."""
    return {
        (*key, batch): f"{name}, batch {batch}, {unit}"
        for key, (name, unit) in report.SPEEDS.items()
        for batch in sorted(
            {
                record["batch"]
                for result in by_machine.values()
                for record in report.records(result, *key)
            }
        )
    }


def complete(by_machine: dict[str, dict], workloads: Iterable) -> dict[str, dict]:
    """Return the results of the CPUs on which all `workloads` were measured."""
    return {
        name: result
        for name, result in by_machine.items()
        if all(compared(result, key) != ("-", "-") for key in workloads)
    }


def comparison(by_machine: dict[str, dict], workloads: dict[tuple[str, int, int], str]) -> str:
    """Return a table with a row for each of `workloads`.

    For each CPU it has our fastest export, and the fastest engine of each program.
    """
    names = [
        name
        for result in by_machine.values()
        for name in (f"ours, {kind(result)}", "other engines")
    ]
    rows = [
        [what, *(cell for result in by_machine.values() for cell in compared(result, key))]
        for key, what in workloads.items()
    ]
    return report.table(["2 CPU threads", *names], rows)


def compared(result: dict, key: tuple[str, int, int]) -> tuple[str, str]:
    """Return (our speed, those of the others) in `result` as text.

    `key` is a workload: shape, beams and batch.
    """
    shape, beams, batch = key
    records = [
        record for record in report.records(result, shape, beams) if record["batch"] == batch
    ]
    measured = {record["engine"]: record for record in records if "per_second" in record}
    ours = format_names(measured, [name for name in measured if name.startswith("cpu-")])
    others = [
        format_names(
            measured, [name for name in measured if report.LABELS[name].startswith(program)]
        )
        for program in PROGRAMS
    ]
    return ours or "-", "; ".join(filter(None, others)) or "-"


def format_names(measured: dict, names: list[str]) -> str:
    """Return the speed and the name of the fastest of the engines `names`, `""` if none was
    measured.

    `measured` is {engine: record}.
    """
    best = report.fastest(measured, names)
    return (
        f"{report.number(best['per_second'])} "
        f"{report.LABELS[best['engine']].removeprefix('ours, cpu ')}"
        if best
        else ""
    )


def overviews(by_machine: dict[str, dict]) -> str:
    """Return the speeds of all engines, a table for each CPU, with a link to the rest."""
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
        f"{kind(result)}: {result['options']['threads']} threads, {report.machine(result)}, each "
        f"engine {threads}."
    )
    parts = [
        f"{setting}\n{packages}.",
        report.overview(result),
        f"[benchmarks/results/{name}.json][{name}.json] is that run.",
        f"![The same, with slowest and fastest rounds][{name}.png]",
        f"[{name}.json]: {URL}/blob/main/benchmarks/results/{name}.json\n"
        f"[{name}.png]: {URL}/raw/main/benchmarks/results/{name}.png",
    ]
    return "\n\n".join(parts)


def kind(result: dict) -> str:
    return report.processor(result["hardware"]["instructions"]).upper()


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
    for page, texts in tables(by_machine).items():
        content = (root / page).read_text()
        for name, text in texts.items():
            content = filled(content, name, text)
        (root / page).write_text(content)
        print(f"{page}: {', '.join(by_machine)}")


if __name__ == "__main__":
    main()
