"""The benchmark on a GPU: with the time in kernels, the bytes a step must read, `verify` and
BLEU."""

import gpu
import quality
import workload
from measure import Benchmark, cores, isolated

NO_GPU = "no GPU was at hand"
NO_TEXT = "no texts were given"
TRANSLATORS = ("torch", "cuda-fp16", "cuda-bf16")


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

    def run(self):
        """Build and check everything, then time the shapes; each finished part is written to the
        file."""
        self.write()
        kinds = list(dict.fromkeys(self.cells(shape)[0].kind for shape in self.options.shapes))
        if self.device is None:
            self.result["models"] = {
                kind: workload.fields(kind, self.options.quick) for kind in kinds
            }
            self.errors = {
                (engine, kind): NO_GPU for engine in self.options.engines for kind in kinds
            }
        else:
            self.result["copy_bandwidth"] = isolated(
                gpu.copy_bandwidth, self.device, self.options.quick
            )
            self.prepare(kinds)
        self.check(kinds)
        self.write()
        for shape in self.options.shapes:
            self.measure_shape(self.cells(shape))
            self.count_bytes(shape)
            self.write()

    def check(self, kinds):
        """Run `verify` for every export of these kinds of models, and measure BLEU."""
        exports = [
            (kind, engine)
            for kind in kinds
            for engine in self.options.engines
            if engine.startswith("cuda-")
        ]
        jobs = {
            ("verify", *key): (quality.verified, key[1], self.root / key[0], self.device)
            for key in exports
        }
        jobs |= {
            ("bleu", engine): (quality.bleu, engine, *(self.options.texts or ()))
            for engine in TRANSLATORS
        }
        reasons = {
            ("verify", kind, engine): self.errors.get((engine, kind)) for kind, engine in exports
        }
        reasons |= {("bleu", engine): self.untranslated(engine) for engine in TRANSLATORS}
        done = self.side_by_side({key: job for key, job in jobs.items() if reasons[key] is None})
        reports = {key: done.get(key) or {"missing": reasons[key]} for key in jobs}
        self.result["verify"] = [
            {"kind": kind, "engine": engine, **reports["verify", kind, engine]}
            for kind, engine in exports
        ]
        self.result["bleu"] = [
            {"engine": engine, **reports["bleu", engine]} for engine in TRANSLATORS
        ]

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
            if record["shape"] == shape and record["beams"] == 1
        ]
        if not counts[0]["new_tokens"]:
            return
        kind = counts[0]["kind"]
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
