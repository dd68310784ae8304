"""Speed and memory on the CPU, measured: `python benchmarks/speed.py` writes benchmarks/results/cpu.json and reports it.

transformers, CTranslate2 and our exports run the same seeded weights on the same inputs for the same forced number of tokens.
Each engine is loaded in a process of its own; within a cell they take turns, round by round, so that a slow minute of the
machine hits all of them. The clock runs from token ids to token ids, both in the engine's own type.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import report
import workload
from engines import CHECKPOINTS, CONTEXT, ENGINES, QUANTIZED, Worker, is_installed, one_line

PACKAGES = ("vanilla-transformer", "torch", "transformers", "onnxruntime", "onnx", "ctranslate2", "numpy")
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
SETTINGS = ("OMP_", "MKL_", "CT2_")  # environment variables that change what an engine does, CT2_USE_MKL=1 among them
PAUSE = 0.1  # seconds in front of each run, in which the threads of the engine before it stop spinning
WARM_UP = 64  # new tokens at most
TOLERANCE = 1e-3  # of hidden states


@dataclass(frozen=True)
class Cell:
    """`batch` rows of `length` tokens, with `beams` and `new_tokens` to generate (none: an encoder)."""

    shape: str
    kind: str
    batch: int
    length: int
    new_tokens: int
    beams: int = 1

    def __str__(self):
        return f"{self.shape}: batch {self.batch}, length {self.length}, new tokens {self.new_tokens}, beams {self.beams}"


# In the order of their size, since the most memory a process ever had is what is reported.
SHAPES = {
    "seq2seq": [Cell("seq2seq", "seq2seq", batch, 32, 64, beams) for batch in (1, 8, 32) for beams in (1, 4)],
    "gpt2": [Cell("gpt2", "gpt2", batch, 32, 64) for batch in (1, 8)],
    "bert": [Cell("bert", "bert", batch, 128, 0) for batch in (1, 8)],
    "length": [Cell("length", "seq2seq", 1, 32, new_tokens) for new_tokens in (128, 512, 2048)],
    "encoder-length": [Cell("encoder-length", "bert", 1, length, 0) for length in (128, 512, 2048)],
    "batch": [Cell("batch", "seq2seq", 128, 32, 64)],  # beside those of seq2seq
    "load": [Cell("load", "seq2seq", 1, 32, 1)],
}
GROWTH = ("length", "encoder-length", "batch")
GROWTH_ENGINES = ("transformers", "ctranslate2-float32", "ctranslate2-int8", "cpu-fp32", "cpu-int8")
LARGE_ENGINES = ("transformers", "ctranslate2-int8", "cpu-int8")


def left_out(engine: str, cell: Cell) -> str | None:
    """Why a cell is not measured, so that all of them take about an hour."""
    rows = cell.batch * cell.beams
    if cell.shape in GROWTH and engine not in GROWTH_ENGINES:
        return "left out: growth is measured for five engines"
    if (rows > 32 or cell.length > 512) and engine not in LARGE_ENGINES:
        return "left out: more than 32 rows, or 512 tokens, are measured for three engines"
    if cell.new_tokens > 512 and engine not in QUANTIZED:
        return "left out: more than 512 new tokens are measured with 8 bits"
    if engine == "transformers-compile" and (rows > 8 or cell.beams > 1 or cell.shape == "load"):
        return "left out: it compiles again for every batch, measured for greedy search of up to 8 rows"
    return None


def cells_of(shape: str, quick: bool) -> list[Cell]:
    if not quick:
        return SHAPES[shape]
    small = [
        replace(cell, batch=min(cell.batch, 2), length=min(cell.length, 8), new_tokens=min(cell.new_tokens, 4))
        for cell in SHAPES[shape]
    ]
    return list(dict.fromkeys(small))


def isolated(function, *args):
    """The result of `function(*args)` in a fresh process: its imports and its memory are not this one's."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        return pool.submit(function, *args).result()


class Benchmark:
    """One run: `result` is what becomes the JSON file, `root` a directory for models."""

    def __init__(self, options, root: Path):
        self.options, self.root, self.began = options, root, time.monotonic()
        self.errors = {}  # (engine, kind): why it has no files
        self.result = {
            "command": shlex.join(["python", "benchmarks/speed.py", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "options": {"threads": options.threads, "repeats": options.repeats, "quick": options.quick},
            "environment": {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)},
            "hardware": hardware(),
            "versions": versions(),
            **{name: {} for name in ("models", "exports")},
            **{name: [] for name in ("cells", "load", "bandwidth")},
        }

    def run(self):
        """All shapes; the file has what is done."""
        for shape in self.options.shapes:
            cells = cells_of(shape, self.options.quick)
            self.prepare(cells[0].kind)
            if shape == "load":
                self.result["load"] = self.measure_load(cells[0])
            else:
                self.measure_shape(cells)
            if shape in ("seq2seq", "gpt2"):
                self.measure_bandwidth(cells[0])
            self.write()

    def write(self):
        self.options.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def measure_shape(self, cells):
        workers = {engine: self.start(engine, cells[0].kind) for engine in self.options.engines}
        for cell in cells:
            self.say(cell)
            self.result["cells"] += self.measure(cell, workers)
            self.write()
        for worker in workers.values():
            worker.close()

    def say(self, what):
        print(f"{time.monotonic() - self.began:5.0f} s  {what}", file=sys.stderr)

    def prepare(self, kind):
        """The files of every engine for one model, once."""
        if kind in self.result["models"]:
            return
        parameters = isolated(workload.make_checkpoints, kind, self.options.quick, self.root / kind)
        self.result["models"][kind] = {**workload.fields(kind, self.options.quick), "parameters": parameters}
        exports = self.result["exports"][kind] = {}
        for engine in self.options.engines:
            if not is_installed(engine):
                self.errors[engine, kind] = "not installed"
            elif engine not in CHECKPOINTS:
                self.say(f"export of {kind} for {engine}")
                try:
                    exports[engine] = isolated(workload.prepare, engine, kind, self.root / kind)
                except Exception as error:
                    self.errors[engine, kind] = f"no export: {one_line(error)}"

    def start(self, engine, kind):
        if error := self.errors.get((engine, kind)):
            return Absent(error)
        return Worker(engine, kind, self.root / kind, self.options.threads)

    def measure(self, cell: Cell, workers) -> list[dict]:
        """A record for each engine: what it measured, or `missing`, why it did not."""
        ids = self.inputs(cell)
        records = {engine: {**asdict(cell), "engine": engine} for engine in workers}
        self.warm_up(cell, ids, workers, records)
        running = {engine: workers[engine] for engine, record in records.items() if "missing" not in record}
        times = {engine: {"seconds": [], "first_token_seconds": []} for engine in running}
        for _ in range(self.options.repeats):
            for engine, worker in list(running.items()):
                time.sleep(PAUSE)
                answer = worker.run(ids, cell.new_tokens, cell.beams)
                if "error" in answer:
                    records[engine]["missing"] = answer["error"]
                    del running[engine]
                    continue
                times[engine]["seconds"].append(answer["seconds"])
                records[engine]["peak_memory"] = answer["peak_memory"]
                if cell.new_tokens and cell.beams == 1:
                    times[engine]["first_token_seconds"].append(worker.run(ids, 1, 1)["seconds"])
        for engine, worker in running.items():
            counted = cell.batch * max(cell.new_tokens, 1)
            records[engine] |= {name: spread(values) for name, values in times[engine].items() if values}
            records[engine]["per_second"] = counted / records[engine]["seconds"]["median"]
            records[engine]["memory_above_import"] = records[engine]["peak_memory"] - worker.started["import_memory"]
        return list(records.values())

    def inputs(self, cell):
        vocabulary = self.result["models"][cell.kind]["vocab_size"]
        shape = (cell.batch, cell.length)
        return np.random.default_rng(0).integers(workload.FIRST_TOKEN, vocabulary - 1, shape)

    def warm_up(self, cell, ids, workers, records):
        """What is not quantized must say what the first such engine says, or is not measured."""
        expected = None
        for engine, worker in workers.items():
            answer = {"error": left_out(engine, cell) or worker.started.get("error")}
            if answer["error"] is None:
                worker.run(ids, min(cell.new_tokens, 1), 1)
                answer = worker.run(ids, min(cell.new_tokens, WARM_UP), cell.beams)
            if "error" in answer:
                records[engine]["missing"] = answer["error"]
                continue
            if expected is None and engine not in QUANTIZED:
                expected = answer["output"]
            if expected is not None:
                records[engine] |= compare(answer["output"], expected)
            exact = records[engine].get("agreement", 1) == 1 and records[engine].get("max_difference", 0) < TOLERANCE
            if not exact and engine not in QUANTIZED and cell.beams == 1:
                records[engine]["missing"] = "its output is not that of the first engine"

    def measure_load(self, cell) -> list[dict]:
        """Fresh processes: imports, loading, the first token."""
        self.say(cell)
        ids, found = self.inputs(cell), {engine: [] for engine in self.options.engines}
        for _ in range(self.options.repeats):
            for engine, rounds in found.items():
                reason = left_out(engine, cell)
                worker = Absent(reason) if reason else self.start(engine, cell.kind)
                answer = worker.started if "error" in worker.started else worker.run(ids, cell.new_tokens, cell.beams)
                rounds.append({**worker.started, "first_token_seconds": answer.get("seconds"), **answer})
                worker.close()
        return [{"engine": engine, "kind": cell.kind, **summary(rounds)} for engine, rounds in found.items()]

    def measure_bandwidth(self, cell):
        """How close a step of the first cell, batch 1, comes to the time in which its weights can be read at all."""
        threads, repeats = self.options.threads, self.options.repeats
        for record in self.result["cells"]:
            if not record["engine"].startswith("cpu-") or not is_record_of(record, cell) or "missing" in record:
                continue
            steps = record["seconds"]["median"] - record["first_token_seconds"]["median"]
            step_seconds = steps / (cell.new_tokens - 1)
            count = isolated(workload.bytes_per_step, self.root / cell.kind / record["engine"])
            found = isolated(workload.read_bandwidth, count, threads, repeats)
            self.result["bandwidth"].append(
                {
                    "kind": cell.kind,
                    "engine": record["engine"],
                    "bytes_per_step": count,
                    "step_seconds": step_seconds,
                    **found,
                    "fits_cache": count <= self.result["hardware"]["l3_bytes"],
                    "share": count / step_seconds / found["bytes_per_second"],
                }
            )


class Absent:
    """In the place of a worker that cannot be started."""

    def __init__(self, error):
        self.started = {"error": error}

    def close(self):
        """There is no process to end."""


def is_record_of(record, cell):
    return all(record[name] == value for name, value in asdict(cell).items())


def compare(output, expected) -> dict:
    if output.dtype.kind == "f":
        return {"max_difference": float(np.abs(output - expected).max())}
    return {"agreement": float(np.mean(output == expected)) if output.shape == expected.shape else 0.0}


def spread(values) -> dict:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": values}


def summary(rounds) -> dict:
    errors = [found["error"] for found in rounds if "error" in found]
    if errors:
        return {"missing": errors[0]}
    names = ("import_seconds", "load_seconds", "first_token_seconds")
    return {name: spread([found[name] for found in rounds]) for name in names}


def hardware() -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return {
        "cpu": facts.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "l3_bytes": 1024 * int(cache.read_text().strip().rstrip("K")) if cache.exists() else 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def versions() -> dict:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="ENGINE", help=", ".join(ENGINES)
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds measured after a warm-up (5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine (2)")
    parser.add_argument("--quick", action="store_true", help="tiny models: tries everything, measures nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu.json", help="the JSON file")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root:
        Benchmark(options, Path(root)).run()
    report.main(options.out)


if __name__ == "__main__":
    main()
