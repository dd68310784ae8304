"""The checks of an open export against its reference, which `verify` and `certify` share."""

import json
import reprlib
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.model import CANDIDATES, OnnxModel, find_target, main_roles
from ..errors import RequestError
from ..heads import EMBED, HEADS
from ..inference.export_info import ExportInfo
from ..runtime import Runtime
from ..specs import alignment
from .compare import (
    MIN_TOKENS,
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
from .reference import FILE, TORCH, Arrays, Reference, manifest_facts, sample

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
        results = outcome(model, self.reference) | searches(model, self.reference)
        return {name: sample(values) for name, values in results.items()}

    @cached_property
    def real(self) -> Arrays:
        """True for values of the outputs and logits in `results` that are not of padding."""
        real = self.reference.real_values(self.model.info)
        return {name: sample(values) for name, values in real.items()}

    def stored(self, source: str) -> Arrays:
        return {name: sample(array) for name, array in self.reference.results[source].items()}

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
    def repeated_tolerance(self) -> Tolerance:
        """The tolerance of a run that repeats another: the same bits on a CPU."""
        return SAME_BITS if self.runtime.device == "cpu" else self.expected_tolerance

    @property
    def row_tolerance(self) -> Tolerance:
        """The tolerance of a row in another batch: the same bits where a target multiplies
        integers, with a scale for each row. In portable int8 the rows of a batch share a scale."""
        has_row_scales = self.runtime.dtype in find_target(self.model.info).integer_dtypes
        return SAME_BITS if has_row_scales else self.tolerance

    @property
    def checks(self) -> dict[str, Callable[[], Report | Comparison]]:
        """The checks of what the graphs compute, by name."""
        checks: dict[str, Callable[[], Report | Comparison]] = {"outputs": self.check_outputs}
        if self.is_recorded:
            checks["recorded outputs"] = self.check_recorded
        if self.model.info.generates:
            checks |= {"greedy search": self.check_greedy, "beam search": self.check_beams}
        if CANDIDATES in self.model.info.specs:
            checks["best tokens"] = self.check_candidates
        if EMBED in HEADS[self.model.info.architecture].tasks:
            checks["vectors"] = self.check_vectors
        if alignment.ROLE in self.model.info.specs:
            checks["alignment"] = self.check_alignment
        if self.model.info.step:  # which has a graph of its own
            checks["served requests"] = self.check_served
        return checks

    @property
    def checks_of_machine(self) -> dict[str, Callable[[], Report]]:
        """The checks of other runs and batches, which depend on the machine more than on the
        export."""
        return {
            "second thread": self.check_thread,
            "rows alone": self.check_rows,
            "served requests": self.check_served,
        }

    # ------------------------------------------------------------------- results of the reference

    def check_outputs(self) -> Report:
        """Compare the outputs of the first run with torch's.

        This starts the first run if no other check did. A difference raises no error: it is in the
        report.
        """
        return self.compare_outputs(self.tolerance, self.results, self.stored(TORCH))

    def check_recorded(self) -> Report:
        """Compare the outputs of the first run with those that the export had when it was
        written."""
        return self.compare_outputs(self.expected_tolerance, self.results, self.expected)

    def compare_outputs(self, tolerance: Tolerance, results: Arrays, expected: Arrays) -> Report:
        report = Report(tolerance)
        report.compare_all("", results, expected, self.real)
        return report

    def check_greedy(self) -> Report:
        report = Report(self.expected_tolerance, min_compared=MIN_TOKENS)
        report.compare_greedy([*self.results["greedy"]], self.expected)
        return report

    def check_beams(self) -> Report:
        """Compare the scores of beam search: several sequences may be the best."""
        report = Report(self.expected_tolerance)
        report.compare_beams(self.results["beam_scores"], self.expected)
        return report

    def check_candidates(self) -> Report:
        """Compare beam search with the graph that returns best tokens with the first run, which had
        logits."""
        first = {**self.expected, **self.results}
        self.model.open_candidates()
        report = Report(self.repeated_tolerance)
        report.compare_beams(searches(self.model, self.reference)["beam_scores"], first)
        return report

    def check_alignment(self) -> Report:
        report, name = Report(self.expected_tolerance), alignment.OUTPUT
        weights = sample(alignment_weights(self.model, self.reference)[name])
        report.compare(name, weights, self.expected[name], np.ones(len(weights), bool))
        return report

    def check_vectors(self) -> Report | Comparison:
        """Compare what the heads beside the graph make of fixed states with what they make with the
        weights that torch read in the checkpoint. Both are in float32, whatever the dtype is."""
        info, expected, report = self.model.info, self.reference.results[TORCH], Report()
        for name, values in head_vectors(info, info.manifest, info.config["hidden_size"]).items():
            if name not in expected:
                return Comparison(True, f"no {name} in {FILE}", "one: export again", is_weak=True)
            pair = np.stack([values, expected[name]]) / (np.abs(expected[name]).max() or 1)
            report.compare(name, pair[:1], pair[1:], np.ones(1, bool))
        return report

    # ----------------------------------------------------------------------------- repeated runs

    def check_profiled(self, directory: Path) -> Report:
        """Compare a run in separate sessions, which capture no CUDA graph, with the first run.

        The sessions write profiles to `directory` when they are closed.
        """
        info, settings = self.model.info, self.model.settings | {"profiles": directory}
        model = OnnxModel(info, self.runtime.threads, **settings).open(main_roles(info))
        return self.compare_repeated(self.run(model))

    def check_thread(self) -> Report:
        """Compare a run in another thread with the first run."""
        with ThreadPoolExecutor(1) as pool:
            return self.compare_repeated(pool.submit(self.run, self.model).result())

    def compare_repeated(self, results: Arrays) -> Report:
        first = {**self.expected, **self.results}
        report = self.compare_outputs(self.repeated_tolerance, results, first)
        if self.model.info.generates:
            report.compare_greedy([*results["greedy"]], first)
            report.compare_beams(results["beam_scores"], first)
        return report

    # ------------------------------------------------------------------------------- other batches

    @cached_property
    def single_rows(self) -> list[Reference]:
        return [self.reference.row(row) for row in range(self.reference.num_rows)]

    @cached_property
    def rows_alone(self) -> Report:
        """The comparison of each row alone, without padding, with the same row in the batch."""
        return self.compare_rows([outcome(self.model, row) for row in self.single_rows])

    def check_rows(self) -> Report:
        return self.rows_alone

    def compare_rows(self, alone: Sequence[Arrays]) -> Report:
        """Compare the outputs of requests of one row each with those of all rows in one batch.

        The requests have the rows of the reference in turn.
        """
        report, batch = Report(self.row_tolerance), outcome(self.model, self.reference)
        for place, outputs in enumerate(alone):
            row = place % len(self.single_rows)
            for name, array in batch.items():
                expected = real_part(self.reference, self.model.info, name, array, row)
                values = real_part(self.single_rows[row], self.model.info, name, outputs[name], 0)
                real = np.ones(len(expected), bool)
                report.compare(f"{name} of request {place}", values, expected, real)
        return report

    def check_served(self) -> Report:
        """Run requests at the same time, as `serve` does, and check their results.

        For a model that generates, compare tokens and log probabilities with `expected`. For other
        models, compare each row's outputs with its outputs in one batch of all rows.
        """
        if not self.model.info.generates:
            return self.compare_rows(served_outputs(self.model, self.single_rows))
        greedy, logprobs = served_sequences(self.model, self.reference)
        report, expected = Report(self.served_tolerance), self.expected
        report.compare_greedy(greedy, expected)
        rows = np.arange(len(logprobs)) % self.reference.num_rows
        expected = {name: expected[name][rows] for name in ("logprobs", "scales")}
        report.compare_scores("log probabilities", logprobs, *expected.values())
        return report

    @property
    def served_tolerance(self) -> Tolerance:
        """The tolerance in other batches: rows of some exports depend on each other a little."""
        tolerance = self.expected_tolerance
        largest = max(tolerance.max_error, 2 * self.rows_alone.max_error)
        return tolerance._replace(max_error=largest)

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

    def speed(self) -> dict[str, float]:
        """Return the tokens per second of greedy search, or the rows per second of other models."""
        if self.model.info.generates:
            seconds = fastest(run_together, self.model, self.reference.rows(self.model.info))
            return {"tokens_per_second": self.results["greedy"].size / seconds}
        seconds = fastest(outcome, self.model, self.reference)
        return {"rows_per_second": self.reference.num_rows / seconds}


def real_part(
    reference: Reference, info: ExportInfo, name: str, values: np.ndarray, row: int
) -> np.ndarray:
    """Return the `values` of one row of the output `name`, without those of padding."""
    return values[row][reference.real_values(info)[name][row]]


def stored_tolerance(reference: Reference, dtype: str) -> Tolerance:
    """Return the tolerance that the export had when its reference was written."""
    return Tolerance(**reference.manifest["variants"][dtype]["tolerance"])


def attempt(check: Callable[..., Report | Comparison], *args: Any) -> Comparison:
    """Return the comparison of `check(*args)`, or a failed one with its error if that is in
    `FAILURES`."""
    try:
        result = check(*args)
    except FAILURES as error:
        return failed(error)
    return result.comparison if isinstance(result, Report) else result


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
