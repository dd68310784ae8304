"""Comparisons of the results of an export with expected ones: errors by dtype, and near ties."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..inference.export_info import ExportInfo
from .reference import Arrays

MIN_TOKENS = 20  # to compare of greedy search; fewer are a warning


class Tolerance(NamedTuple):
    """The highest error of a value and the highest mean error of all values, see
    `relative_errors`."""

    max_error: float
    mean_error: float

    def is_clear(self, margins: np.ndarray) -> np.ndarray:
        """Return where `margins` of two logits are too large for errors to swap the logits."""
        return margins > 2 * self.max_error

    def clear_lengths(self, margins: np.ndarray) -> np.ndarray:
        """Return how many tokens of each row are before the first near tie, for `margins` (B, T)
        that are 0 after the end."""
        return np.logical_and.accumulate(self.is_clear(margins), axis=1).sum(axis=1)

    def __str__(self) -> str:
        if not self.max_error:
            return "the same bits"
        return f"at most {self.max_error:g}, mean at most {self.mean_error:g}"


# About twice the highest errors that were measured against torch in float32, and more in float32.
# Measured on 100 models of 25 families: small ones with strong random weights, trained ones, and
# random ones of base size. bf16 is torch's own error: in fp16 an export's is as high as torch's.
# int8 has room for a few very large features, beside which 8 bits of an activation are coarse.
TOLERANCES = {
    "fp32": Tolerance(5e-5, 5e-6),
    "fp16": Tolerance(3e-2, 3e-3),
    "bf16": Tolerance(2e-1, 2e-2),
    "int8": Tolerance(1.5, 0.15),
    "int4": Tolerance(3.5, 0.35),
}
# log probabilities among the results, with their names in problems
SCORES = {"beam_scores": "beam scores", "logprobs": "log probabilities"}
RECORDED = ("int8", "int4")  # dtypes whose errors against torch hide others
SAME_BITS = Tolerance(0.0, 0.0)


def expected_tolerance(info: ExportInfo, dtype: str) -> Tolerance:
    """Return the tolerance of what an export gives on another machine: that of the activations for
    weights that are rounded to integers."""
    if dtype not in RECORDED:
        return TOLERANCES[dtype]
    return TOLERANCES["bf16" if info.manifest["activations"] == "bf16" else "fp16"]


class Comparison(NamedTuple):
    """A comparison: whether it is as expected, what was seen, what was expected, the traceback if
    an error ended it, and whether too little was compared."""

    ok: bool
    seen: str
    expected: str = ""
    traceback: str = ""
    is_weak: bool = False

    def __str__(self) -> str:
        return f"{self.seen}, expected {self.expected}" if self.expected else self.seen


@dataclass
class Report:
    """The counts and errors of a comparison.

    `choices` counts tokens of greedy search, sequences of beam search, and the largest of logits: a
    token, label, answer or choice. `ties` are those of them that cannot be compared, as two
    logits differ by less than twice the tolerance. Each difference beyond the tolerance is a line
    of `problems`.
    """

    tolerance: Tolerance = TOLERANCES["fp32"]
    cases: int = 0
    values: int = 0
    max_error: float = 0.0
    error_sum: float = 0.0
    choices: int = 0
    agreeing: int = 0
    ties: int = 0
    is_measured: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def mean_error(self) -> float:
        return self.error_sum / max(self.values, 1)

    @property
    def failures(self) -> list[str]:
        """All problems, and the mean error of all values if it is too high."""
        return self.problems + too_high("mean", self.mean_error, self.tolerance.mean_error)

    def summary(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "values": self.values,
            "max_error": self.max_error,
            "mean_error": self.mean_error,
            "tokens": self.choices,
            "agreeing_tokens": self.agreeing,
            "ties": self.ties,
            "failures": len(self.failures),
        }

    def __str__(self) -> str:
        return (
            f"{self.cases} cases: {self.seen} (tolerance: {self.tolerance}); "
            f"{len(self.failures)} failures"
        )

    @property
    def seen(self) -> str:
        """The counts and errors, as one line."""
        parts = []
        if self.is_measured:
            parts.append(f"largest error {self.max_error:.1e}")
        if self.values:
            parts.append(f"mean {self.mean_error:.1e} of {self.values} values")
        if self.choices:
            compared = self.choices - self.ties
            parts.append(f"compared {compared} of {self.choices} choices, {self.agreeing} equal")
        return ", ".join(parts)

    @property
    def comparison(self) -> Comparison:
        """The verdict. If only tokens were compared, it is weak if they are few."""
        if failures := self.failures:
            return Comparison(False, "; ".join(failures))
        if self.is_measured:
            return Comparison(True, self.seen, str(self.tolerance))
        is_weak = self.choices - self.ties < min(MIN_TOKENS, self.choices)
        return Comparison(True, self.seen, "all before a near tie or the end", is_weak=is_weak)

    # --------------------------------------------------------------------------------- comparisons

    def compare_all(
        self, results: Mapping[str, Any], expected: Arrays, real: Arrays, title: str = ""
    ) -> None:
        """Compare `results` with `expected` by name: the tokens of greedy search, scores, and all
        other values where `real` is True. `title` begins the names of outputs in problems."""
        for name, values in results.items():
            if name == "greedy":
                self.compare_greedy(values, expected)
            elif name in SCORES:
                self.compare_scores(name, values, expected)
            else:
                self.compare(title + name, values, expected[name], real.get(name))

    def compare(
        self,
        name: str,
        values: np.ndarray,
        expected: np.ndarray,
        real: np.ndarray | None = None,
    ) -> None:
        """Add the errors of `values` against `expected`, both (B, ..., C), and their choices if the
        `name` ends with "logits".

        Only places where the boolean `real` (B, ...) is True count, by default all. If an error
        there is not finite, that is a problem, and nothing is counted.
        """
        if values.shape != expected.shape:
            self.problems.append(f"{name} has shape {values.shape}, expected {expected.shape}")
            return
        if real is None:
            real = np.ones(len(values), bool)
        values, expected = (real_vectors(array, real) for array in (values, expected))
        errors = relative_errors(values, expected)
        if not np.isfinite(errors).all():
            self.problems.append(f"{name}: some values are not finite")
            return
        errors = errors[np.isfinite(expected)]
        self.values += errors.size
        self.error_sum += float(errors.sum())
        self.check(name, float(errors.max(initial=0)))
        if name.endswith("logits") and values.shape[-1] > 1:
            self.compare_choices(name, values, expected)

    def check(self, name: str, max_error: float) -> None:
        self.is_measured = True
        self.max_error = max(self.max_error, max_error)
        problems = too_high("largest", max_error, self.tolerance.max_error)
        self.problems += [f"{name}: {problem}" for problem in problems]

    def compare_choices(self, name: str, logits: np.ndarray, expected: np.ndarray) -> None:
        """Count how often `logits` and `expected`, both (N, V), have the same largest logit.

        Choices that differ are ties if the margin in `expected` is small, else a problem.
        """
        differs = logits.argmax(axis=-1) != expected.argmax(axis=-1)
        ties = differs & ~self.tolerance.is_clear(relative_margins(expected))
        self.count(name, len(logits), int((~differs).sum()), int(ties.sum()))

    def count(self, name: str, choices: int, agreeing: int, ties: int) -> None:
        self.choices += choices
        self.agreeing += agreeing
        self.ties += ties
        if wrong := choices - agreeing - ties:
            self.problems.append(f"{name}: {wrong} of {choices - ties} choices differ")

    def compare_greedy(self, rows: Sequence[np.ndarray], expected: Arrays) -> None:
        """Compare the tokens of each of `rows` (T,) with those of greedy search in `expected`.

        If there are more `rows` than in `expected`, these start again. A row is compared up to its
        first near tie or its end.
        """
        lengths = self.tolerance.clear_lengths(expected["greedy_margins"])
        for place, row in enumerate(rows):
            tokens = expected["greedy"][place % len(lengths)]
            clear = lengths[place % len(lengths)]
            same = (row[:clear] == tokens[: len(row)][:clear]).sum()
            self.count(f"tokens of row {place}", len(tokens), int(same), len(tokens) - int(clear))

    def compare_scores(self, name: str, scores: np.ndarray, expected: Arrays) -> None:
        """Add the largest error of log probabilities, of tokens (N, T) or of sequences (N,), whose
        logits have the `scales` in `expected`. Rows of `expected` are repeated for more scores.

        A log probability is the difference of two numbers, each with the error of a logit, so the
        tolerance is that of half its error.
        """
        rows = np.arange(len(scores)) % len(expected[name])
        exact, scales = expected[name][rows], expected["scales"][rows]
        with np.errstate(invalid="ignore"):  # both are minus infinity outside a shortlist
            errors = np.where(scores == exact, 0, np.abs(scores - exact))
        errors /= 2 * (scales if scores.ndim > 1 else scales.max())
        self.check(SCORES[name], float(errors.max()))


def too_high(kind: str, error: float, allowed: float) -> list[str]:
    """Return a message about an error of this `kind` and its maximum, or none if it is allowed."""
    is_allowed = error <= allowed  # NaN is not
    return [] if is_allowed else [f"{kind} error {error:.1e}, expected at most {allowed:g}"]


def real_vectors(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return the vectors (N, C) of `values` (B, ..., C) where the boolean `real` (B, ...) is True.

    If `real` has the shape of `values`, as for logits of a place or a choice, all that is not real
    in a vector is minus infinity, like a token outside a shortlist.
    """
    if values.shape == real.shape:
        values, real = np.where(real, values, -np.inf), np.asarray(real.any(axis=-1))
    return values[real]


def relative_errors(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the error of each of `values` (..., C), relative to the largest of its vector of
    `expected`, or to 1 if that is smaller.

    Sums that a vector's largest value comes from round all of its values by as much. Minus infinity
    marks the tokens outside a shortlist: its error is 0 where both have it. All other errors that
    are not finite are infinite."""
    is_excluded = np.isneginf(values) & np.isneginf(expected)
    with np.errstate(invalid="ignore"):
        errors = np.abs(values - expected) / error_scale(expected)
    return np.where(is_excluded, 0.0, np.where(np.isfinite(errors), errors, np.inf))


def error_scale(expected: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of the finite values of each vector of (..., C), at least 1, as
    (..., 1)."""
    sizes = np.where(np.isfinite(expected), np.abs(expected), 0)
    return np.maximum(1, sizes.max(axis=-1, keepdims=True, initial=0))


def relative_margins(logits: np.ndarray) -> np.ndarray:
    """Return by how much the best of the logits (..., V) exceeds the second, on the scale of
    `relative_errors`: two logits within their tolerances may change places below twice it."""
    second, best = np.moveaxis(np.partition(logits, -2, axis=-1)[..., -2:], -1, 0)
    with np.errstate(invalid="ignore"):  # of a sample without tokens of a shortlist
        return (best - second) / error_scale(logits)[..., 0]
