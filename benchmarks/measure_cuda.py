"""The benchmark on a GPU: with the time in kernels, the bytes a step must read, `verify` and
BLEU."""

import gpu
import quality
import workload
from engines import NO_TIME
from measure import Benchmark, cores, isolated
from plan import OF_OTHERS

NO_GPU = "no GPU was at hand"
NO_TEXT = "no texts were given"
TRANSLATORS = ("torch", "cuda-fp16", "cuda-bf16")
# seconds that must be left to make the files of a large model
PREPARATION = {"bart": 60, "t5": 240}


def takes_long(row: dict) -> bool:
    """Return True for the row of BLEU that torch computes on the CPU."""
    return row["engine"] == "torch"


class CudaBenchmark(Benchmark):
    """The benchmark of a GPU.

    Without a GPU nothing runs, and every row says so; `--quick` then runs what a CPU can, in
    float32.
    """

    packages = ("vanilla-transformer", "torch", "transformers", "onnxruntime-gpu", "onnx", "numpy")

    def __init__(self, options, plan, root):
        self.preparations = max(1, cores() // 2)  # an export uses about two cores
        facts = isolated(gpu.device_facts)
        device = "cuda" if facts else "cpu" if options.quick else None
        super().__init__(options, plan, root, device)
        self.result["hardware"] |= facts or {"gpu": None}
        self.result |= {
            "device": device,
            "copy_bandwidth": None,
            "verify": [],
            "bleu": [],
            "steps": [],
        }
        self.resume()

    def run(self):
        """Time the shapes, then check the exports. Each result is in the file as soon as it is
        there, and a resumed run measures what the file lacks."""
        if self.device is not None and self.result["copy_bandwidth"] is None:
            self.result["copy_bandwidth"] = isolated(
                gpu.copy_bandwidth, self.device, self.options.quick
            )
        self.write()
        kinds = []
        for shape in self.options.shapes:
            kind = self.cells(shape)[0].kind
            if kind not in kinds:
                kinds.append(kind)
                self.prepare_kind(kind)
            if cells := self.cells_left(shape):
                self.measure_shape(cells)
                self.count_bytes(shape)
                self.write()
        self.check(kinds)
        self.write()

    def prepare_kind(self, kind):
        """Make the files of a kind of model, if it can be measured before the time is up."""
        reason = NO_GPU if self.device is None else self.lateness(PREPARATION.get(kind, 0))
        if reason is None:
            self.prepare([kind])
            return
        self.result["models"].setdefault(kind, workload.fields(kind, self.options.quick))
        self.errors |= {(engine, kind): reason for engine in self.options.engines}

    def check(self, kinds):
        """Run `verify` for every export of these kinds of models, and measure BLEU, as far as the
        result lacks them and time is left. What torch computes on the CPU comes last."""
        self.result["verify"] = [
            self.row("verify", {"kind": kind, "engine": engine})
            for kind in kinds
            if kind not in OF_OTHERS
            for engine in self.options.engines
            if engine.startswith("cuda-")
        ]
        self.result["bleu"] = [self.row("bleu", {"engine": engine}) for engine in TRANSLATORS]
        self.write()
        for row in sorted(self.result["verify"] + self.result["bleu"], key=takes_long):
            if row.get("missing") == NO_TIME and self.lateness() is None:
                del row["missing"]
                name = " ".join(row.values())
                [answer] = self.side_by_side({("check", name): self.job(**row)}).values()
                row |= answer
                self.write()

    def row(self, part: str, row: dict) -> dict:
        """Return `row` with what an earlier run measured for it, or with why it is missing."""
        for before in self.result[part]:
            if row.items() <= before.items() and "missing" not in before:
                return before
        if part == "bleu":
            reason = self.untranslated(row["engine"])
        else:
            reason = self.errors.get((row["engine"], row["kind"]))
        return {**row, "missing": reason or NO_TIME}

    def job(self, engine: str, kind: str | None = None) -> tuple:
        """Return the function and arguments that check a row: BLEU without `kind`, else
        `verify`."""
        if kind is None:
            return quality.bleu, engine, *self.options.texts
        return quality.verified, engine, self.root / kind, self.device

    def untranslated(self, engine):
        """Return why `engine` has no BLEU, or `None` if it has."""
        if self.device is None or (self.device == "cpu" and engine != "torch"):
            return NO_GPU
        return None if self.options.texts else NO_TEXT

    def after_timing(self, records, workers):
        """Add the seconds in kernels to `records`, {cell: {engine: record}}, with `workers` by
        engine.

        This comes last because the profiler slows down later runs in a process.
        """
        for cell, by_engine in records.items():
            self.say(f"kernels of {cell}")
            for engine, record in by_engine.items():
                if "missing" in record:
                    continue
                if reason := self.lateness():
                    answer = {"error": reason}
                else:
                    answer = workers[engine].profile(self.inputs(cell), cell.new_tokens, cell.beams)
                record |= {"kernels_missing": answer["error"]} if "error" in answer else answer
            self.write()

    def count_bytes(self, shape):
        """Record, for the cells of `shape`, how close a step comes to the copy bandwidth.

        Only greedy search is counted.
        """
        counts = [
            record
            for record in self.result["cells"]
            if record["shape"] == shape and record["beams"] == 1 and not record.get("shortest")
        ]
        if not counts or not counts[0]["new_tokens"]:
            return
        kind = counts[0]["kind"]
        self.result["steps"] = [step for step in self.result["steps"] if step["kind"] != kind]
        measured = any("missing" not in record for record in counts)
        values = isolated(gpu.step_values, kind, self.root / kind) if measured else None
        for record in counts:
            step = {name: record[name] for name in ("kind", "engine", "batch")}
            step |= (
                {"missing": record["missing"]} if "missing" in record else self.step(values, record)
            )
            self.result["steps"].append(step)

    def step(self, values, record):
        size = 4 if self.device == "cpu" or record["engine"].endswith("fp32") else 2
        count = gpu.step_bytes(values, record, size)
        steps = record["seconds"]["median"] - record["first_token_seconds"]["median"]
        seconds = steps / (record["new_tokens"] - 1)
        return {
            "bytes_per_step": count,
            "step_seconds": seconds,
            "fits_cache": count <= self.result["hardware"].get("gpu_l2_bytes", 0),
            "share": count / seconds / self.result["copy_bandwidth"],
        }
