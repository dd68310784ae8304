"""Ranges and samples of what matrix multiplications read, and the scales with which it becomes 8 bits.

This module works on arrays alone: `calibration` records them, `precisions` writes the scales.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .quantization import TINY, Quantized, int8_columns

SAMPLED = 256  # rows on which errors are measured
COLUMNS = 4096  # columns of a matrix on which errors are measured
MAX_ERROR = 0.01  # of one scale for all rows; from here on each row keeps a scale, if that loses less


@dataclass(frozen=True)
class Inputs:
    """The range of each of K features, and a uniform sample of all rows.

    Args:
        lowest: (K,), the smallest value of each feature.
        highest: (K,), the largest value of each feature.
        rows: (n, K), at most `SAMPLED`.
        keys: (n,), a random number for each row. The rows with the smallest keys stay in the sample.
    """

    lowest: np.ndarray
    highest: np.ndarray
    rows: np.ndarray
    keys: np.ndarray

    @classmethod
    def sample(cls, rows: np.ndarray, generator: np.random.Generator) -> "Inputs":
        """Return the ranges and a sample of `rows` (N, K). All batches share one `generator`."""
        return cls(rows.min(axis=0), rows.max(axis=0), rows, generator.random(len(rows))).reduce()

    def merge(self, other: "Inputs") -> "Inputs":
        """Return the ranges and a sample of the rows of both."""
        lowest, highest = np.minimum(self.lowest, other.lowest), np.maximum(self.highest, other.highest)
        rows, keys = np.concatenate([self.rows, other.rows]), np.concatenate([self.keys, other.keys])
        return Inputs(lowest, highest, rows, keys).reduce()

    def reduce(self) -> "Inputs":
        """Keep the `SAMPLED` rows with the smallest keys."""
        kept = np.argsort(self.keys)[:SAMPLED]
        return replace(self, rows=self.rows[kept], keys=self.keys[kept])


@dataclass(frozen=True, eq=False)
class Steps:
    """One scale for all rows. The integers are x / (smoothing * scale) + zero, from 0 to 255."""

    smoothing: np.ndarray | None
    scale: np.float32
    zero: np.uint8

    @classmethod
    def cover(cls, inputs: Inputs, smoothing: np.ndarray | None) -> "Steps":
        """Return the steps with which the integers hold all values on the text, and 0."""
        divisor = 1 if smoothing is None else smoothing
        lowest, highest = min(0, (inputs.lowest / divisor).min()), max(0, (inputs.highest / divisor).max())
        scale = np.float32(max((highest - lowest) / 255, TINY))
        return cls(smoothing, scale, np.uint8(np.rint(-lowest / scale)))

    def multiply(self, rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        """Return `rows` x `matrix` as the int8 graph computes it."""
        divisor = 1 if self.smoothing is None else self.smoothing
        zero = np.float32(self.zero)
        integers = np.clip(np.rint(rows / (divisor * self.scale)) + zero, 0, 255) - zero
        weights, scales = self.quantize(matrix)
        return integers @ (weights * (scales * self.scale))

    def quantize(self, matrix: np.ndarray) -> Quantized:
        """Return `int8_columns` of the matrix that the integers are multiplied with."""
        return int8_columns(matrix if self.smoothing is None else matrix * self.smoothing[:, None])


@dataclass(frozen=True)
class Choice:
    """The quantization of rows that some matrices read.

    Args:
        steps: one scale for all rows, or `None` if each row keeps a scale.
        error: the largest `median_error` of the matrices with one scale for all rows.
        row_error: the largest `median_error` of the matrices with a scale for each row.
    """

    steps: Steps | None
    error: float
    row_error: float

    @property
    def exported_error(self) -> float:
        """The error of what is exported."""
        return self.row_error if self.steps is None else self.error


@dataclass
class Calibration:
    """The inputs of matrix multiplications on a text, and their quantization.

    Args:
        inputs: by the name of the module, without the prefix of the model in front of its head.
        choices: by the names of all modules that read the same rows.
        matmuls: the choice for each matrix multiplication, by the name of its first module.
    """

    inputs: dict[str, Inputs] = field(default_factory=dict)
    choices: dict[tuple[str, ...], Choice] = field(default_factory=dict)
    matmuls: dict[str, Choice] = field(default_factory=dict)

    def observe(self, name: str, inputs: Inputs) -> None:
        """Add `inputs` to what the module `name` read."""
        self.inputs[name] = inputs.merge(self.inputs[name]) if name in self.inputs else inputs

    def choose(self, name: str, readers: tuple[str, ...], matrices: Sequence[np.ndarray]) -> Choice:
        """Return the choice for the matrix multiplication `name`. Graphs share it.

        It is the same for all modules `readers`, which read the same rows and have the `matrices` (K, N).
        """
        if readers not in self.choices:
            self.choices[readers] = choose(self.inputs[name], matrices)
        self.matmuls[name] = self.choices[readers]
        return self.choices[readers]

    def summary(self) -> dict[str, Any]:
        """Return the numbers of matrix multiplications and of those with a scale for each row, and both mean errors."""
        choices = self.matmuls.values()
        return {
            "matmuls": len(choices),
            "row_scales": sum(choice.steps is None for choice in choices),
            "error": mean_error([choice.exported_error for choice in choices]),
            "row_error": mean_error([choice.row_error for choice in choices]),
        }

    def facts(self) -> dict[str, Any]:
        """Return the `summary` for the manifest, with both errors of each module that keeps a scale for each row."""
        left_out = {
            name: {"error": significant(choice.error), "row_error": significant(choice.row_error)}
            for name, choice in self.matmuls.items()
            if choice.steps is None
        }
        return {**self.summary(), "left_out": left_out}


def choose(inputs: Inputs, matrices: Sequence[np.ndarray]) -> Choice:
    """Choose one scale for all rows, unless its error reaches `MAX_ERROR` and a scale for each row loses less."""
    steps, error = best_steps(inputs, matrices)
    row_error = largest_error(multiply_rows, inputs.rows, matrices)
    return Choice(None if error >= MAX_ERROR and error > row_error else steps, error, row_error)


def best_steps(inputs: Inputs, matrices: Sequence[np.ndarray]) -> tuple[Steps, float]:
    """Return one scale for all rows and its error. Smooth the features if that halves the error."""
    plain, smooth = Steps.cover(inputs, None), Steps.cover(inputs, smoothing(inputs, matrices))
    plain_error, smooth_error = (largest_error(steps.multiply, inputs.rows, matrices) for steps in (plain, smooth))
    return (smooth, smooth_error) if smooth_error < plain_error / 2 else (plain, plain_error)


def smoothing(inputs: Inputs, matrices: Sequence[np.ndarray]) -> np.ndarray:
    """Return divisors (K,) that move a part of large features to the weights (SmoothQuant, Xiao et al. 2023, equation 4)."""
    largest = np.maximum(-inputs.lowest, inputs.highest).clip(min=1e-5)
    heaviest = np.max([np.maximum(-matrix.min(axis=1), matrix.max(axis=1)) for matrix in matrices], axis=0)
    return np.sqrt(largest / heaviest.clip(min=1e-5))


def multiply_rows(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return `rows` x `matrix` in int8 with a scale for each row: 255 levels where no value is negative, else 127."""
    levels = np.float32(127 if rows.min() < 0 else 255)
    scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True), TINY)
    weights, column_scales = int8_columns(matrix)
    return (np.rint(rows / scales * levels) @ (weights * column_scales)) * (scales / levels)


def largest_error(
    multiply: Callable[[np.ndarray, np.ndarray], np.ndarray], rows: np.ndarray, matrices: Sequence[np.ndarray]
) -> float:
    """Return the largest `median_error` of `multiply` over the first `COLUMNS` of each of `matrices`."""
    samples = [matrix[:, :COLUMNS] for matrix in matrices]
    return max(median_error(multiply(rows, sample), rows @ sample) for sample in samples)


def median_error(products: np.ndarray, exact: np.ndarray) -> float:
    """Return the median over rows of ||products - exact||^2 / ||exact||^2, without rows of zeros.

    A mean would hide what typical rows lose: a few special tokens can be a hundred times as large.
    """
    lost = np.square(products - exact, dtype=np.float64).sum(axis=1)
    sizes = np.square(exact, dtype=np.float64).sum(axis=1)
    return float(np.median(lost[sizes > 0] / sizes[sizes > 0])) if sizes.any() else 0.0


def mean_error(errors: list[float]) -> float:
    """Return the mean to 3 significant digits, 0 for no errors."""
    return significant(float(np.mean(errors or [0])))


def significant(value: float) -> float:
    """Round to 3 significant digits."""
    return float(f"{value:.3g}")
