"""The comparison of engines, each loaded in its own process.

Within a cell the engines take turns, round by round, so that a slow minute of the machine affects
all of them. The clock runs from token ids to token ids, both in the engine's own type.
"""

import datetime
import gzip
import json
import os
import platform
import shlex
import shutil
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import workload
from engines import CONTEXT, NO_TIME, Worker, is_installed, one_line
from plan import CHECKPOINTS, Arrangement, Cell, Plan, list_cells

INSTRUCTIONS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
)
# environment variables that change what an engine does, CT2_USE_MKL=1 among them
SETTINGS = ("OMP_", "MKL_", "CT2_")
WARM_UP = 64  # maximum new tokens
TOLERANCE = 1e-3  # maximum difference of hidden states
PADDING = -1  # in the place of a token


def isolated(function, *args):
    """Return the result of `function(*args)` from a fresh process with its own imports and
    memory."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        return pool.submit(function, *args).result()


def once(folder: Path, function, *args) -> dict:
    """Return what `function(*args)` returns, or returned in an earlier finished run.

    The function fills `folder`, which is emptied before. The result is kept in a JSON file beside
    it.
    """
    marker = folder.with_name(f"{folder.name}.json")
    if not marker.exists():
        shutil.rmtree(folder, ignore_errors=True)
        marker.write_text(json.dumps(function(*args)))
    return json.loads(marker.read_text())


def read_texts(path: Path, count: int) -> list[str]:
    """Return the first `count` lines of a file, .gz or plain, that are not blank."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [line.strip() for line in file if line.strip()][:count]


def command_line(script: str) -> str:
    """Return the command line of this process as a call of `script`.

    It has file names instead of paths.
    """
    return shlex.join(
        ["python", f"benchmarks/{script}", *(Path(argument).name for argument in sys.argv[1:])]
    )


class Benchmark:
    """One run of the comparison of engines, which writes a JSON file.

    Args:
        options: the parsed command line.
        plan: the cells and engines of the kind of device.
        root: directory for the files of the engines.
        device: where models run, "cpu" or "cuda", or `None` to run nothing.
    """

    packages = (
        "vanilla-transformer",
        "torch",
        "transformers",
        "onnxruntime",
        "onnx",
        "ctranslate2",
        "numpy",
    )
    preparations = 1  # processes at a time

    def __init__(self, options, plan: Plan, root: Path, device: str):
        self.options, self.plan, self.device, self.began = options, plan, device, time.monotonic()
        self.root = root / ("quick" if options.quick else "whole")
        self.root.mkdir(parents=True, exist_ok=True)
        self.deadline = None if options.minutes is None else self.began + 60 * options.minutes
        self.errors = {}  # (engine, kind): why it has no files
        self.result = {
            "command": command_line("speed.py"),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "options": {
                "threads": options.threads,
                "repeats": options.repeats,
                "quick": options.quick,
            },
            "environment": {
                name: value for name, value in os.environ.items() if name.startswith(SETTINGS)
            },
            "hardware": hardware(),
            "versions": versions(self.packages),
            "models": {},
            "exports": {},
            "cells": [],
        }

    def resume(self):
        """Go on with the result in the output file, if the user asks for it and there is one.

        Raises:
            ValueError: if its machine, versions or options differ.
        """
        if self.options.resume and self.options.out.exists():
            self.result = resumed(json.loads(self.options.out.read_text()), self.result)

    def cells_left(self, shape):
        """Return the cells of `shape` that the result lacks."""
        measured = {to_cell(record) for record in self.result["cells"]}
        return [cell for cell in self.cells(shape) if cell not in measured]

    def write(self):
        part = self.options.out.with_suffix(".part")
        part.write_text(json.dumps(self.result, indent=1) + "\n")
        part.replace(self.options.out)

    def say(self, what):
        print(f"{time.monotonic() - self.began:5.0f} s  {what}", file=sys.stderr)

    def lateness(self, seconds: float = 0) -> str | None:
        """Return text if fewer than `seconds` are left, so that nothing more is started, else
        `None`."""
        is_late = self.deadline is not None and time.monotonic() + seconds >= self.deadline
        return NO_TIME if is_late else None

    def cells(self, shape):
        return list_cells(self.plan, shape, self.options.quick)

    def side_by_side(self, jobs: dict) -> dict:
        """Run each of `jobs`, {key: (function, arguments …)}, in its own process.

        Return {key: result}. `preparations` jobs run at a time. A failed job has the result
        `{"missing": reason}`.
        """

        def done(key):
            self.say(" ".join(key))
            try:
                return isolated(*jobs[key])
            except Exception as error:
                return {"missing": one_line(error)}

        with ThreadPoolExecutor(self.preparations) as pool:
            return dict(zip(jobs, pool.map(done, jobs)))

    def prepare(self, kinds):
        """Make the checkpoints of these kinds of models, and from them the files of every engine.

        The results are "models" and "exports" of the JSON file, and `errors`.
        """
        quick = self.options.quick
        jobs = {}
        for kind in kinds:
            folder = self.root / kind
            jobs["checkpoint", kind] = (
                once,
                folder,
                workload.make_checkpoints,
                kind,
                quick,
                folder,
            )
        for (_, kind), outcome in self.side_by_side(jobs).items():
            self.result["models"][kind] = {**workload.fields(kind, quick), **outcome}
        jobs = {}
        for kind in kinds:
            self.result["exports"].setdefault(kind, {})
            for engine in self.options.engines:
                if error := self.result["models"][kind].get("missing"):
                    self.errors[engine, kind] = f"no checkpoint: {error}"
                elif not is_installed(engine):
                    self.errors[engine, kind] = "not installed"
                elif engine not in CHECKPOINTS and self.is_wanted(engine, kind):
                    folder = self.root / kind
                    jobs["export", kind, engine] = (
                        once,
                        folder / engine,
                        workload.prepare,
                        engine,
                        kind,
                        folder,
                    )
        for (_, kind, engine), outcome in self.side_by_side(jobs).items():
            if "missing" in outcome:
                self.errors[engine, kind] = f"no export: {outcome['missing']}"
            else:
                self.result["exports"][kind][engine] = outcome

    def is_wanted(self, engine, kind) -> bool:
        """Return True if `engine` is measured in any cell of the model `kind`."""
        cells = [
            cell for shape in self.options.shapes for cell in self.cells(shape) if cell.kind == kind
        ]
        return any(self.plan.left_out(engine, cell) is None for cell in cells)

    def measure_shape(self, cells):
        records, workers = {}, {}
        for cell in cells:
            self.say(cell)
            workers = self.workers(cell, workers)
            records[cell] = self.measure(cell, workers)
            self.result["cells"] += records[cell].values()
            self.write()
        self.after_timing(records, workers)
        for worker in workers.values():
            worker.close()

    def after_timing(self, records, workers):
        """Measure what would disturb the timing of a shape; by default nothing.

        `records` are {cell: {engine: record}}, and `workers` {engine: worker}.
        """

    def workers(self, cell, before: dict) -> dict:
        """Return {engine: worker} for `cell`: those `before`, or new ones with all threads."""
        return before or {engine: self.start(engine, cell.kind) for engine in self.options.engines}

    def start(self, engine, kind, arrangement=None):
        if error := self.errors.get((engine, kind)) or self.lateness():
            return Absent(error)
        arrangement = arrangement or Arrangement(1, self.options.threads)
        return Worker(engine, kind, self.root / kind, arrangement, self.device, self.deadline)

    def measure(self, cell: Cell, workers) -> dict[str, dict]:
        """Time the `workers`, {engine: worker}, on `cell`, in turns.

        Return {engine: record}, with its measurements or the reason in "missing".
        """
        ids = self.inputs(cell)
        records = {engine: {**asdict(cell), "engine": engine} for engine in workers}
        self.warm_up(cell, ids, workers, records)
        running = {
            engine: workers[engine] for engine, record in records.items() if "missing" not in record
        }
        rounds = {engine: [] for engine in running}
        for _ in range(self.options.repeats):
            for engine, worker in list(running.items()):
                time.sleep(self.plan.pause)
                answer = one_round(worker, cell, ids)
                if "error" in answer:
                    records[engine]["missing"] = answer["error"]
                    del running[engine]
                else:
                    rounds[engine].append(answer)
        for engine, worker in running.items():
            records[engine] |= self.summary(cell, rounds[engine], worker)
        return records

    def summary(self, cell, rounds, worker) -> dict:
        """Return the fields of a record for `rounds`, the answers of `worker` for `cell`."""
        names = [name for name in ("seconds", "first_token_seconds") if name in rounds[0]]
        spreads = {name: spread([answer[name] for answer in rounds]) for name in names}
        return {
            **spreads,
            "per_second": cell.batch * max(cell.new_tokens, 1) / spreads["seconds"]["median"],
        }

    def inputs(self, cell):
        vocabulary = self.result["models"][cell.kind]["vocab_size"]
        shape, rng = (cell.batch, cell.length), np.random.default_rng(0)
        ids = rng.integers(workload.FIRST_TOKEN, vocabulary - 1, shape)
        if cell.shortest:
            lengths = rng.integers(cell.shortest, cell.length + 1, cell.batch)
            lengths[0] = cell.length
            ids[np.arange(cell.length) >= lengths[:, None]] = PADDING
        return ids

    def warm_up(self, cell, ids, workers, records):
        """Warm up the workers, and mark engines that fail or disagree with the first one as
        missing.

        Rounded engines may disagree. The input is `ids`; `records` are {engine: record}.
        """
        expected = None
        for engine, worker in workers.items():
            answer = {"error": self.reason(engine, cell) or worker.started.get("error")}
            if answer["error"] is None:
                worker.run(ids, min(cell.new_tokens, 1), 1)
                answer = worker.run(ids, min(cell.new_tokens, WARM_UP), cell.beams)
            if "error" in answer:
                records[engine]["missing"] = answer["error"]
                continue
            is_rounded, output = engine in self.plan.rounded, answer["output"]
            if output.dtype.kind == "f":
                output = output[ids != PADDING]
            if expected is None and not is_rounded:
                expected = output
            if expected is not None:
                records[engine] |= compare(output, expected)
            same = records[engine].get("agreement", 1) >= self.plan.agreement
            if (
                not is_rounded
                and cell.beams == 1
                and not (same and records[engine].get("max_difference", 0) < TOLERANCE)
            ):
                records[engine]["missing"] = "its output is not that of the first engine"

    def reason(self, engine, cell):
        """Return why `engine` is not measured on `cell`, or `None` if it is."""
        return self.plan.left_out(engine, cell) or self.lateness()


class Absent:
    """A stand-in for the worker of an engine that is not measured, with the reason as its error."""

    def __init__(self, error):
        self.started = {"error": error}

    def close(self):
        """Do nothing: there is no process to end."""


def resumed(before: dict, now: dict) -> dict:
    """Return the result `before` of an earlier run, with the command and the date of `now`.

    Cells for which an engine had no time left are dropped, so that they are measured again.

    Raises:
        ValueError: if the two differ in machine, versions or options.
    """
    for name in ("options", "environment", "hardware", "versions"):
        if before[name] != now[name]:
            raise ValueError(
                f"the file has the {name} {before[name]}, expected {now[name]} to resume it: "
                "use another --out"
            )
    late = {to_cell(record) for record in before["cells"] if record.get("missing") == NO_TIME}
    cells = [record for record in before["cells"] if to_cell(record) not in late]
    return {
        **before,
        "command": f"{before['command']}; {now['command']}",
        "date": now["date"],
        "cells": cells,
    }


def to_cell(record: dict) -> Cell:
    names = [field.name for field in fields(Cell)]
    return Cell(**{name: record[name] for name in names if name in record})


def one_round(worker, cell, ids) -> dict:
    """Run `ids` on `worker` as `cell` says, and return its answer.

    Without beams it also has the seconds of a run that ends at the first token.
    """
    answer = worker.run(ids, cell.new_tokens, cell.beams)
    if "error" in answer or not cell.new_tokens or cell.beams > 1:
        return answer
    first = worker.run(ids, 1, 1)
    return first if "error" in first else {**answer, "first_token_seconds": first["seconds"]}


def compare(output, expected) -> dict:
    if output.dtype.kind == "f":
        return {"max_difference": float(np.abs(output - expected).max())}
    return {
        "agreement": float(np.mean(output == expected)) if output.shape == expected.shape else 0.0
    }


def spread(values) -> dict:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "runs": values,
    }


def cores() -> int:
    from vanilla_transformer_export.inference.devices import available_cpus

    return available_cpus()


def processor_facts() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }


def instructions() -> list[str]:
    """Return the `INSTRUCTIONS` that this CPU supports."""
    flags = processor_facts().get("flags", "").split()
    return [name for name in INSTRUCTIONS if name in flags]


def hardware() -> dict:
    facts = processor_facts()
    cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return {
        "cpu": facts.get("model name", platform.processor()),
        "cores": cores(),
        "instructions": instructions(),
        "l3_bytes": 1024 * int(cache.read_text().strip().rstrip("K")) if cache.exists() else 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def versions(packages) -> dict:
    result = {"python": platform.python_version()}
    for package in packages:
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            result[package] = "not installed"
    return result
