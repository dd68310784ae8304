"""The errors that an export may have, by the dtype of its weights."""

from typing import NamedTuple

import numpy as np


class Tolerance(NamedTuple):
    """The highest error of a value and the highest mean error of all values, see
    `relative_errors`."""

    max_error: float
    mean_error: float

    def problem(self, max_error: float, mean_error: float) -> str | None:
        """Return a message with the first error that is too high and its maximum, or `None` if none
        is."""
        for name, error, allowed in zip(("largest", "mean"), (max_error, mean_error), self):
            if not error <= allowed:  # NaN is too high
                return f"{name} error {error:.1e}, expected at most {allowed:g}"
        return None

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
    return (best - second) / error_scale(logits)[..., 0]
