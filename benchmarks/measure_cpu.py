"""The benchmark on a CPU: with memory, loading, and the time in which weights can be read."""

from dataclasses import asdict

import workload
from measure import Absent, Benchmark, isolated, spread


class CpuBenchmark(Benchmark):
    def __init__(self, options, plan, root):
        super().__init__(options, plan, root, "cpu")
        self.result |= {"load": [], "bandwidth": []}

    def run(self):
        """All shapes; the file has what is done."""
        for shape in self.options.shapes:
            cells = self.cells(shape)
            if cells[0].kind not in self.result["models"]:
                self.prepare([cells[0].kind])
            if shape == "load":
                self.result["load"] = self.measure_load(cells[0])
            else:
                self.measure_shape(cells)
            if shape in ("seq2seq", "gpt2"):
                self.measure_bandwidth(cells[0])
            self.write()

    def summary(self, cell, rounds, worker):
        peak = rounds[-1]["peak_memory"]
        memory = {"peak_memory": peak, "memory_above_import": peak - worker.started["import_memory"]}
        return {**super().summary(cell, rounds, worker), **memory}

    def measure_load(self, cell) -> list[dict]:
        """Fresh processes: imports, loading, the first token."""
        self.say(cell)
        ids, found = self.inputs(cell), {engine: [] for engine in self.options.engines}
        for _ in range(self.options.repeats):
            for engine, rounds in found.items():
                reason = self.reason(engine, cell)
                worker = Absent(reason) if reason else self.start(engine, cell.kind)
                answer = worker.started if "error" in worker.started else worker.run(ids, cell.new_tokens, cell.beams)
                rounds.append({**worker.started, "first_token_seconds": answer.get("seconds"), **answer})
                worker.close()
        return [{"engine": engine, "kind": cell.kind, **load_summary(rounds)} for engine, rounds in found.items()]

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


def is_record_of(record, cell):
    return all(record[name] == value for name, value in asdict(cell).items())


def load_summary(rounds) -> dict:
    errors = [found["error"] for found in rounds if "error" in found]
    if errors:
        return {"missing": errors[0]}
    names = ("import_seconds", "load_seconds", "first_token_seconds")
    return {name: spread([found[name] for found in rounds]) for name in names}
