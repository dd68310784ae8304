"""The checks of an open export."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.model import OnnxModel, find_target, main_roles
from ..engine.offline import generate
from ..runtime import Runtime
from .comparison import (
    Comparison,
    compare_all,
    compare_beams,
    compare_logprobs,
    compare_tokens,
    compare_values,
    together,
    value_errors,
)
from .kernels import Kernels, count_copies, describe_kernels
from .outcomes import (
    next_logits,
    outcome,
    outputs,
    served_outputs,
    served_sequences,
)
from .reference import TORCH, Arrays, Reference, real_values
from .tolerances import TOLERANCES, Tolerance

SAME_BITS = Tolerance(0.0, 0.0)
REPEATS = 3  # of a measurement, the fastest counts


@dataclass(frozen=True)
class Subject:
    """An open export, with the reference that its results are compared with."""

    runtime: Runtime
    reference: Reference

    @property
    def model(self) -> OnnxModel:
        return self.runtime.model

    @property
    def generates(self) -> bool:
        return self.model.info.generates

    @cached_property
    def results(self) -> Arrays:
        """The results of the first run."""
        return outcome(self.model, self.reference)

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance for the dtype of the weights that the export was written with."""
        variant = self.reference.manifest["variants"][self.runtime.dtype]
        return Tolerance(**variant["tolerance"])

    @property
    def is_recorded(self) -> bool:
        """True if the reference has results of the export itself, whose weights are integers."""
        return self.runtime.dtype in self.reference.results

    @property
    def expected(self) -> Arrays:
        """The results that the export had when it was written, or torch's. What one machine
        computes with integer weights is nearer to another machine than to torch."""
        return self.reference.results[self.runtime.dtype if self.is_recorded else TORCH]

    @property
    def expected_tolerance(self) -> Tolerance:
        if not self.is_recorded:
            return self.tolerance
        activations = self.model.info.manifest["activations"]
        return TOLERANCES["bf16" if activations == "bf16" else "fp16"]

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
    def checks(self) -> dict[str, Callable[[], Comparison]]:
        """The checks of this kind of model, by name."""
        checks = {"outputs": self.check_outputs}
        if self.is_recorded:
            checks["recorded outputs"] = self.check_recorded
        if self.generates:
            checks |= {"greedy search": self.check_greedy, "beam search": self.check_beams}
        return checks | {
            "second thread": self.check_thread,
            "rows alone": self.check_rows,
            "served requests": self.check_served,
        }

    # ------------------------------------------------------------------- results of the reference

    def check_outputs(self) -> Comparison:
        """Compare the outputs of the first run with torch's.

        This starts the first run if no other check did. A difference raises no error: it is in the
        comparison.
        """
        return compare_values(self.reference.results[TORCH], self.results, self.tolerance)

    def check_recorded(self) -> Comparison:
        """Compare the outputs of the first run with those that the export had when it was
        written."""
        return compare_values(self.expected, self.results, self.expected_tolerance)

    def check_greedy(self) -> Comparison:
        return compare_tokens(self.expected, [*self.results["greedy"]], self.expected_tolerance)

    def check_beams(self) -> Comparison:
        return compare_beams(self.expected, self.results, self.expected_tolerance)

    # ----------------------------------------------------------------------------- repeated runs

    def check_profiled(self, directory: Path) -> Comparison:
        """Compare a run in separate sessions, which capture no CUDA graph, with the first run.

        The sessions write profiles to `directory` when they are closed.
        """
        info, threads, changes = self.model.info, self.runtime.threads, self.model.changes
        device = self.runtime.device
        model = OnnxModel(info, threads, device=device, profiles=directory, changes=changes)
        model.open(main_roles(info))
        return self.compare_repeated(outcome(model, self.reference))

    def check_thread(self) -> Comparison:
        """Compare a run in another thread with the first run."""
        with ThreadPoolExecutor(1) as pool:
            return self.compare_repeated(pool.submit(outcome, self.model, self.reference).result())

    def compare_repeated(self, results: Arrays) -> Comparison:
        first = {**self.expected, **self.results}
        return compare_all(first, results, self.repeated_tolerance)

    # ------------------------------------------------------------------------------- other batches

    @cached_property
    def single_rows(self) -> list[Reference]:
        return [self.reference.row(row) for row in range(self.reference.num_rows)]

    @cached_property
    def batch(self) -> Arrays:
        """The values of all rows of the reference in one batch."""
        return self.values(self.reference)

    @cached_property
    def row_pairs(self) -> tuple[Arrays, Arrays]:
        """The values of each row in the batch, and alone without padding."""
        return self.pair_rows([self.values(row) for row in self.single_rows])

    def check_rows(self) -> Comparison:
        """Compare each row alone, without padding, with the same row in the batch."""
        return compare_values(*self.row_pairs, self.row_tolerance)

    def check_served(self) -> Comparison:
        """Run requests at the same time, as `serve` does, and check their results.

        For a model that generates, compare tokens and log probabilities with `expected`. For other
        models, compare each row's outputs with its outputs in one batch of all rows.
        """
        if not self.generates:
            served = served_outputs(self.model, self.single_rows)
            return compare_values(*self.pair_rows(served), self.row_tolerance)
        greedy, scored = served_sequences(self.model, self.reference)
        tokens = [np.array(sequence.tokens) for sequence in greedy]
        tolerance = self.served_tolerance
        return together(
            [
                compare_tokens(self.expected, tokens, tolerance),
                compare_logprobs(self.expected, scored, tolerance),
            ]
        )

    @property
    def served_tolerance(self) -> Tolerance:
        """The tolerance in other batches: rows of some exports depend on each other a little."""
        batch, alone = self.row_pairs
        largest = max(value_errors(alone[name], batch[name]).max(initial=0) for name in batch)
        tolerance = self.expected_tolerance
        return tolerance._replace(max_error=max(tolerance.max_error, 2 * float(largest)))

    def pair_rows(self, values: Sequence[Arrays]) -> tuple[Arrays, Arrays]:
        """Return two dicts by request: the values of its row in the batch of all rows, and its own.

        `values` has those of each request alone. The requests have the rows of the reference in
        turn.
        """
        in_batch: Arrays = {}
        alone: Arrays = {}
        for place, single in enumerate(values):
            row = place % len(self.single_rows)
            in_batch |= self.select(place, self.reference, self.batch, row)
            alone |= self.select(place, self.single_rows[row], single, 0)
        return in_batch, alone

    def values(self, reference: Reference) -> Arrays:
        """Return the outputs or logits for the inputs of `reference`."""
        if not self.generates:
            return outputs(self.model, reference)
        return {"logits": next_logits(self.model, reference, reference.inputs["tokens"])}

    def select(self, place: int, reference: Reference, values: Arrays, row: int) -> Arrays:
        """Return the values of one row, without those of padding, for request number `place`."""
        if self.generates:
            return {f"request {place}": values["logits"][row]}
        feeds = reference.feeds
        return {
            f"{tensor.name} of request {place}": values[tensor.name][row][
                real_values(tensor, feeds)[row]
            ]
            for tensor in self.model.info.specs["encoder"].outputs
        }

    # -------------------------------------------------------------------------------- the machine

    def check_kernels(self, kernels: Kernels) -> Comparison:
        """Describe the kernels that ran, and check them.

        On a CPU any are right. On a GPU each graph but the encoder must be on one provider, without
        copies between host and device.
        """
        seen = describe_kernels(kernels)
        if self.runtime.device == "cpu":
            return Comparison(bool(kernels), seen, "")
        replayed = kernels.keys() - {"encoder"}
        is_whole = all(
            len(kernels[role]) == 1 and not count_copies(kernels, role) for role in replayed
        )
        return Comparison(is_whole, seen, "decoders on one provider, 0 Memcpy")

    def speed(self) -> dict[str, float]:
        """Return the tokens per second of greedy search, or the rows per second of other models."""
        if self.generates:
            seconds = fastest(generate, self.model, self.reference.rows(self.model.info))
            return {"tokens_per_second": self.results["greedy"].size / seconds}
        seconds = fastest(self.values, self.reference)
        return {"rows_per_second": self.reference.num_rows / seconds}


def fastest(function: Callable[..., Any], *args: Any) -> float:
    """Return the seconds of the fastest of `REPEATS` calls."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function(*args)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
