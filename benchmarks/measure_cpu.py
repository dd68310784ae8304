"""The benchmark on a CPU: each engine in its fastest arrangement of threads, with memory, loading,
many sentences, and the time in which weights can be read."""

import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import serving_models
import serving_offline
import workload
from engines import is_installed
from measure import Absent, Benchmark, isolated, read_texts, spread, to_cell
from plan import arrangements_on_cpu

TRIALS = 2  # runs of each arrangement, to choose the fastest
TRIAL_TOKENS = 16  # maximum new tokens of a trial
TRANSLATOR = Path(__file__).parents[1] / "model_cards/vanilla-seq2seq-tiny-multi30k-en-de"
NO_CAPTIONS = "no captions were given"
OURS = ("engine", "workers", "runtime")
# engine: (dtype, kinds) of `serving_offline`
CAPTIONS = {
    "ctranslate2-float32": ("fp32", ("ctranslate2",)),
    "ctranslate2-int8": ("int8", ("ctranslate2",)),
    "cpu-fp32": ("fp32", OURS),
    "cpu-int8": ("int8", OURS),
    "cpu-calibrated": ("calibrated", OURS),
}


class CpuBenchmark(Benchmark):
    packages = (*Benchmark.packages, "openvino", "nncf", "gguf")

    def __init__(self, options, plan, root):
        super().__init__(options, plan, root, "cpu")
        self.result |= {"load": [], "bandwidth": []}
        self.prepared = set()  # kinds whose files are ready
        self.resume()

    def run(self):
        """Measure the shapes and cells that the output file lacks, and write it."""
        for shape in self.options.shapes:
            if not (cells := self.cells_left(shape)):
                self.say(f"{shape}: the file has it")
                continue
            if shape == "captions":
                for cell in cells:
                    self.result["cells"] += self.measure_captions(cell)
                    self.write()
                continue
            if (kind := cells[0].kind) not in self.prepared:
                self.prepare([kind])
                self.prepared.add(kind)
            if shape == "load":
                self.result["load"] = self.measure_load(cells[0])
            else:
                self.measure_shape(cells)
            if shape in ("seq2seq", "gpt2"):
                self.measure_bandwidth(self.cells(shape)[0])
            self.write()

    def cells_left(self, shape):
        """Return the cells of `shape` that the result lacks; none of "load" if it has that part."""
        return [] if shape == "load" and self.result["load"] else super().cells_left(shape)

    def workers(self, cell, before):
        """Return {engine: worker} in the arrangement of threads that is fastest for `cell`.

        `before` are the workers of the last cell.
        """
        return {
            engine: self.fastest(engine, cell, before.get(engine))
            for engine in self.options.engines
        }

    def fastest(self, engine, cell, before):
        """Return a worker of `engine` in the arrangement that was fastest in `TRIALS` runs of
        `cell`.

        The others are closed. `before` is the worker of the last cell, if any.
        """
        if reason := self.reason(engine, cell) or self.errors.get((engine, cell.kind)):
            if before:
                before.close()
            return Absent(reason)
        kept = [before] if getattr(before, "arrangement", None) else []
        arrangements = arrangements_on_cpu(engine, cell, self.options.threads)
        candidates = kept + [
            self.start(engine, cell.kind, arrangement)
            for arrangement in arrangements
            if arrangement not in [one.arrangement for one in kept]
        ]
        if len(candidates) == 1:
            return candidates[0]
        ids, seconds = self.inputs(cell), {worker: [] for worker in candidates}
        for _ in range(1 + TRIALS):  # the first one warms up
            for worker in candidates:
                time.sleep(self.plan.pause)
                started = worker.started
                answer = (
                    worker.run(ids, min(cell.new_tokens, TRIAL_TOKENS), cell.beams)
                    if "error" not in started
                    else started
                )
                seconds[worker].append(answer.get("seconds", float("inf")))
        best = min(candidates, key=lambda worker: min(seconds[worker][1:]))
        for worker in candidates:
            if worker is not best:
                worker.close()
        return best

    def summary(self, cell, rounds, worker):
        peak = rounds[-1]["peak_memory"]
        memory = {
            "peak_memory": peak,
            "memory_above_import": peak - worker.started["import_memory"],
        }
        return {
            **super().summary(cell, rounds, worker),
            "arrangement": asdict(worker.arrangement),
            **memory,
        }

    def measure_captions(self, cell) -> list[dict]:
        """Measure the shipped translator on sentences of different lengths, and return the records.

        `cell` has the numbers of sentences and beams. Each engine has the fastest of the settings
        of `serving_offline`; an export has the fastest of three methods.
        """
        self.say(cell)
        blank = {engine: {**asdict(cell), "engine": engine} for engine in self.options.engines}
        missing = {
            engine: self.reason(engine, cell) or self.untranslated(engine) for engine in blank
        }
        speeds = {}
        if None in missing.values():
            texts = read_texts(self.options.captions, cell.batch)
            isolated(
                serving_models.prepare, "tiny", TRANSLATOR, self.root, texts, self.options.quick
            )
            run = SimpleNamespace(root=self.root, repeats=self.options.repeats, captions=texts)
            speeds = serving_offline.offline(run, "tiny", cell.beams)
        records = []
        for engine, record in blank.items():
            reason = missing[engine]
            records.append(
                {
                    **record,
                    **(
                        {"missing": reason}
                        if reason
                        else captions_summary(engine, speeds, len(texts))
                    ),
                }
            )
        return records

    def untranslated(self, engine):
        """Return why `engine` does not translate the captions, or `None` if it does."""
        if self.options.captions is None:
            return NO_CAPTIONS
        return None if is_installed(engine) else "not installed"

    def measure_load(self, cell) -> list[dict]:
        """Measure fresh processes that run `cell`: imports, loading, and the first token.

        Return a record for each engine.
        """
        self.say(cell)
        ids, rounds_by_engine = self.inputs(cell), {engine: [] for engine in self.options.engines}
        for _ in range(self.options.repeats):
            for engine, rounds in rounds_by_engine.items():
                reason = self.reason(engine, cell)
                worker = Absent(reason) if reason else self.start(engine, cell.kind)
                answer = (
                    worker.started
                    if "error" in worker.started
                    else worker.run(ids, cell.new_tokens, cell.beams)
                )
                rounds.append(
                    {**worker.started, "first_token_seconds": answer.get("seconds"), **answer}
                )
                worker.close()
        return [
            {"engine": engine, "kind": cell.kind, **load_summary(rounds)}
            for engine, rounds in rounds_by_engine.items()
        ]

    def measure_bandwidth(self, cell):
        """Record how close a step of `cell`, with one row, comes to the memory bandwidth."""
        repeats = self.options.repeats
        for record in self.result["cells"]:
            if (
                not record["engine"].startswith("cpu-")
                or to_cell(record) != cell
                or "missing" in record
            ):
                continue
            steps = record["seconds"]["median"] - record["first_token_seconds"]["median"]
            step_seconds = steps / (cell.new_tokens - 1)
            count = isolated(workload.bytes_per_step, self.root / cell.kind / record["engine"])
            bandwidth = isolated(
                workload.read_bandwidth, count, record["arrangement"]["threads"], repeats
            )
            self.result["bandwidth"].append(
                {
                    "kind": cell.kind,
                    "engine": record["engine"],
                    "bytes_per_step": count,
                    "step_seconds": step_seconds,
                    **bandwidth,
                    "fits_cache": count <= self.result["hardware"]["l3_bytes"],
                    "share": count / step_seconds / bandwidth["bytes_per_second"],
                }
            )


def captions_summary(engine: str, speeds: dict, count: int) -> dict:
    """Return the fields of a record for the fastest setting of `engine` on `count` sentences.

    `speeds` are the measurements of `serving_offline` by dtype and setting.
    """
    dtype, kinds = CAPTIONS[engine]
    name = fastest_setting(speeds[dtype], kinds)
    kind, workers, threads, rows = name.split()
    speed = speeds[dtype][name]
    seconds = spread([count / rate for rate in speed["per_second"]["runs"]])
    summary = {
        "per_second": count / seconds["median"],
        "seconds": seconds,
        "agreement": speed["same"],
        "arrangement": {
            "workers": int(workers),
            "threads": int(threads),
            "rows": int(rows),
            "by": kind,
        },
    }
    if kinds == OURS:
        from_texts = speeds[dtype][fastest_setting(speeds[dtype], ("texts",))]
        summary["from_texts"] = from_texts["per_second"]["median"]
    return summary


def fastest_setting(speeds: dict, kinds: tuple[str, ...]) -> str:
    """Return the setting of one of `kinds` with the largest median speed."""
    names = [name for name in speeds if name.split()[0] in kinds]
    return max(names, key=lambda name: speeds[name]["per_second"]["median"])


def load_summary(rounds) -> dict:
    errors = [load["error"] for load in rounds if "error" in load]
    if errors:
        return {"missing": errors[0]}
    names = ("import_seconds", "load_seconds", "first_token_seconds")
    return {name: spread([load[name] for load in rounds]) for name in names}
