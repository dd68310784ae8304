"""The checks of an open export against its reference, which `verify` and `certify` share."""

import json
import reprlib
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.model import CANDIDATES, OnnxModel, find_target, main_roles
from ..errors import RequestError
from ..heads import EMBED, HEADS
from ..runtime import Runtime
from ..specs import alignment
from .compare import (
    SAME_BITS,
    Comparison,
    Report,
    Tolerance,
    expected_tolerance,
)
from .kernels import Kernels, count_copies, describe_kernels
from .outcome import (
    alignment_weights,
    head_vectors,
    outcome,
    run_together,
    searches,
    served_outputs,
    served_sequences,
)
from .reference import FILE, TORCH, Arrays, Reference, manifest_facts, sampled

# errors of a check, after which the others still run; the last are of a manifest that lacks fields
FAILURES = (ValueError, OSError, RuntimeError, RequestError, LookupError, TypeError)
REPEATS = 3  # of a measurement, the fastest counts


@dataclass(frozen=True)
class Subject:
    """An open export, with the reference that its results are compared with, and the tolerance of
    its errors against torch."""

    runtime: Runtime
    reference: Reference
    tolerance: Tolerance

    @property
    def model(self) -> OnnxModel:
        return self.runtime.model

    @cached_property
    def results(self) -> Arrays:
        """The results of the first run."""
        return self.run(self.model)

    def run(self, model: OnnxModel) -> Arrays:
        return sampled(outcome(model, self.reference) | searches(model, self.reference))

    @cached_property
    def real(self) -> Arrays:
        """True for values of the outputs and logits in `results` that are not of padding."""
        return sampled(self.reference.real_values(self.model.info))

    def stored(self, source: str) -> Arrays:
        return sampled(self.reference.results[source])

    @property
    def is_recorded(self) -> bool:
        """True if the reference has results of the export itself, whose weights are integers."""
        return self.runtime.dtype in self.reference.results

    @property
    def expected(self) -> Arrays:
        """The results that the export had when it was written, or torch's. What one machine
        computes with integer weights is nearer to another machine than to torch."""
        return self.stored(self.runtime.dtype if self.is_recorded else TORCH)

    @property
    def expected_tolerance(self) -> Tolerance:
        """The tolerance of what is compared with `expected`."""
        if not self.is_recorded:
            return self.tolerance
        return expected_tolerance(self.model.info, self.runtime.dtype)

    @property
    def row_tolerance(self) -> Tolerance:
        """The tolerance of a row in another batch: the same bits where a target multiplies
        integers, with a scale for each row. In portable int8 the rows of a batch share a scale."""
        has_row_scales = self.runtime.dtype in find_target(self.model.info).integer_dtypes
        return SAME_BITS if has_row_scales else self.tolerance

    @property
    def checks(self) -> dict[str, Callable[[], Comparison]]:
        """The checks of what the graphs compute, by name."""
        info = self.model.info
        checks = (
            ("outputs", True, self.check_outputs),
            ("recorded outputs", self.is_recorded, lambda: self.compare_first(self.real)),
            ("greedy search", info.generates, lambda: self.compare_first(["greedy"])),
            ("beam search", info.generates, lambda: self.compare_first(["beam_scores"])),
            ("best tokens", CANDIDATES in info.specs, self.check_candidates),
            ("vectors", EMBED in HEADS[info.architecture].tasks, self.check_vectors),
            ("alignment", alignment.ROLE in info.specs, self.check_alignment),
            # a decode step has a graph of its own
            ("served requests", bool(info.step), self.check_served),
        )
        return {name: check for name, applies, check in checks if applies}

    @property
    def checks_of_machine(self) -> dict[str, Callable[[], Comparison]]:
        """The checks of other runs and batches, which depend on the machine more than on the
        export."""
        return {
            "second thread": self.check_thread,
            "rows alone": lambda: self.rows_alone.comparison,
            "served requests": self.check_served,
        }

    def compare(self, tolerance: Tolerance, results: Arrays, expected: Arrays) -> Comparison:
        report = Report(tolerance)
        report.compare_all(results, expected, self.real)
        return report.comparison

    # ------------------------------------------------------------------- results of the reference

    def check_outputs(self) -> Comparison:
        """Compare the outputs of the first run with torch's."""
        outputs = {name: self.results[name] for name in self.real}
        return self.compare(self.tolerance, outputs, self.stored(TORCH))

    def compare_first(self, names: Iterable[str]) -> Comparison:
        """Compare the results `names` of the first run with `expected`."""
        results = {name: self.results[name] for name in names}
        return self.compare(self.expected_tolerance, results, self.expected)

    def check_candidates(self) -> Comparison:
        """Compare beam search with the graph that returns best tokens with the first run, which had
        logits."""
        _ = self.results
        self.model.open_candidates()
        scores = searches(self.model, self.reference)["beam_scores"]
        return self.compare_repeated({"beam_scores": scores})

    def check_alignment(self) -> Comparison:
        weights = sampled(alignment_weights(self.model, self.reference))
        return self.compare(self.expected_tolerance, weights, self.expected)

    def check_vectors(self) -> Comparison:
        """Compare what the heads beside the graph make of fixed states with what they make with the
        weights that torch read in the checkpoint. Both are in float32, whatever the dtype is."""
        info, expected, report = self.model.info, self.reference.results[TORCH], Report()
        for name, values in head_vectors(info, info.manifest, info.config["hidden_size"]).items():
            if name not in expected:
                return Comparison(True, f"no {name} in {FILE}", "one: export again", is_weak=True)
            pair = np.stack([values, expected[name]]) / (np.abs(expected[name]).max() or 1)
            report.compare(name, pair[:1], pair[1:])
        return report.comparison

    # ----------------------------------------------------------------------------- repeated runs

    def check_profiled(self, directory: Path) -> Comparison:
        """Compare a run in separate sessions, which capture no CUDA graph, with the first run.

        The sessions write profiles to `directory` when they are closed.
        """
        info, settings = self.model.info, self.model.settings | {"profiles": directory}
        model = OnnxModel(info, self.runtime.threads, **settings).open(main_roles(info))
        return self.compare_repeated(self.run(model))

    def check_thread(self) -> Comparison:
        """Compare a run in another thread with the first run."""
        with ThreadPoolExecutor(1) as pool:
            return self.compare_repeated(pool.submit(self.run, self.model).result())

    def compare_repeated(self, results: Arrays) -> Comparison:
        """Compare `results` of another run with the first run: the same bits on a CPU."""
        tolerance = SAME_BITS if self.runtime.device == "cpu" else self.expected_tolerance
        return self.compare(tolerance, results, {**self.expected, **self.results})

    # ------------------------------------------------------------------------------- other batches

    @cached_property
    def single_rows(self) -> list[Reference]:
        return [self.reference.row(row) for row in range(self.reference.num_rows)]

    @cached_property
    def rows_alone(self) -> Report:
        """The comparison of each row alone, without padding, with the same row in the batch."""
        return self.compare_rows([outcome(self.model, row) for row in self.single_rows])

    def compare_rows(self, alone: Sequence[Arrays]) -> Report:
        """Compare the outputs of requests of one row each with those of all rows in one batch.

        The requests have the rows of the reference in turn.
        """
        report, info = Report(self.row_tolerance), self.model.info
        batch, real = outcome(self.model, self.reference), self.reference.real_values(info)
        for place, outputs in enumerate(alone):
            row = place % len(self.single_rows)
            real_alone = self.single_rows[row].real_values(info)
            for name, array in batch.items():
                values, expected = outputs[name][real_alone[name]], array[row][real[name][row]]
                report.compare(f"{name} of request {place}", values, expected)
        return report

    def check_served(self) -> Comparison:
        """Run requests at the same time, as `serve` does, and check their results.

        For a model that generates, compare tokens and log probabilities with `expected`. For other
        models, compare each row's outputs with its outputs in one batch of all rows.
        """
        if not self.model.info.generates:
            return self.compare_rows(served_outputs(self.model, self.single_rows)).comparison
        results = served_sequences(self.model, self.reference)
        # rows of some exports depend on each other a little
        tolerance = self.expected_tolerance
        largest = max(tolerance.max_error, 2 * self.rows_alone.max_error)
        return self.compare(tolerance._replace(max_error=largest), results, self.expected)

    # -------------------------------------------------------------------------------- the machine

    def check_kernels(self, kernels: Kernels) -> Comparison:
        """Describe the kernels that ran, and check them.

        On a CPU any are right. On a GPU each graph but the encoder must be on one provider, without
        copies between host and device.
        """
        seen = describe_kernels(kernels)
        if self.runtime.device == "cpu":
            return Comparison(bool(kernels), seen)
        replayed = kernels.keys() - {"encoder"}
        is_whole = all(
            len(kernels[role]) == 1 and not count_copies(kernels, role) for role in replayed
        )
        return Comparison(is_whole, seen, "decoders on one provider, 0 Memcpy")

    def measure_speed(self, speeds: dict[str, dict[str, float]]) -> Comparison:
        """Measure the tokens per second of greedy search, or the rows per second of other models.
        Store the number by dtype and unit in `speeds`."""
        if self.model.info.generates:
            unit, count = "tokens_per_second", self.results["greedy"].size
            seconds = fastest(run_together, self.model, self.reference.rows(self.model.info))
        else:
            unit, count = "rows_per_second", self.reference.num_rows
            seconds = fastest(outcome, self.model, self.reference)
        speeds[self.runtime.dtype] = {unit: count / seconds}
        return Comparison(True, f"{count / seconds:.0f} {unit.replace('_', ' ')}")


def stored_tolerance(reference: Reference, dtype: str) -> Tolerance:
    """Return the tolerance that the export had when its reference was written."""
    return Tolerance(**reference.manifest["variants"][dtype]["tolerance"])


def attempt(check: Callable[..., Comparison], *args: Any) -> Comparison:
    """Return `check(*args)`, or a failed comparison with its error if that is in `FAILURES`."""
    try:
        return check(*args)
    except FAILURES as error:
        return failed(error)


def failed(error: Exception) -> Comparison:
    text = repr(error) if isinstance(error, LookupError | TypeError) else str(error)
    trace = "".join(traceback.format_exception(error))
    return Comparison(False, " ".join(text.split()), "no error", trace)


def compare_manifests(manifest: dict[str, Any], reference: Reference) -> Comparison:
    """Compare the facts of the manifest with the reference, which may have more fields."""
    # as JSON, in which a tuple is a list
    seen = json.loads(json.dumps(manifest_facts(manifest)))
    for name, value in seen.items():
        if value != (expected := reference.manifest.get(name)):
            return Comparison(False, f"{name} is {reprlib.repr(value)}", reprlib.repr(expected))
    return Comparison(True, f"{len(seen)} fields", "those of the reference")


def fastest(function: Callable[..., Any], *args: Any) -> float:
    """Return the seconds of the fastest of `REPEATS` calls."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function(*args)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
