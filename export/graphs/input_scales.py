"""Ranges and samples of what matrix multiplications read, and the scales with which it becomes 8
bits.

This module works on arrays alone: `calibration` records them, `precisions` writes the scales.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .quantization import TINY, Quantized, int8_columns

SAMPLED = 256  # rows on which errors are measured
MEASURED_COLUMNS = 4096  # columns of a matrix on which errors are measured
# error of one scale for all rows from which each row gets its own scale, if that is better
MAX_ERROR = 0.01


@dataclass(frozen=True)
class InputStatistics:
    """The range of each of K features in two random halves of all rows, and a uniform sample of all
    rows.

    Args:
        lowest: (2, K), the smallest value of each feature in each half, infinite in a half without
            rows.
        highest: (2, K), the largest value of each feature in each half.
        rows: (n, K), at most `SAMPLED`.
        halves: (n,), 0 or 1, the half of each row.
        keys: (n,), a random number for each row. The rows with the smallest keys stay in the
            sample.
    """

    lowest: np.ndarray
    highest: np.ndarray
    rows: np.ndarray
    halves: np.ndarray
    keys: np.ndarray

    @classmethod
    def sample(cls, rows: np.ndarray, generator: np.random.Generator) -> "InputStatistics":
        """Return the ranges and a sample of `rows` (N, K). All batches share one `generator`."""
        halves, keys = generator.integers(2, size=len(rows)), generator.random(len(rows))
        parts = [rows[halves == half] for half in (0, 1)]
        lowest = np.stack([part.min(axis=0, initial=np.inf) for part in parts])
        highest = np.stack([part.max(axis=0, initial=-np.inf) for part in parts])
        return cls(lowest, highest, rows, halves, keys).reduce()

    def merge(self, other: "InputStatistics") -> "InputStatistics":
        """Return the statistics of both together: the ranges of all values and a sample of all
        rows."""
        lowest, highest = (
            np.minimum(self.lowest, other.lowest),
            np.maximum(self.highest, other.highest),
        )
        names = ("rows", "halves", "keys")
        sample = [np.concatenate([getattr(self, name), getattr(other, name)]) for name in names]
        return InputStatistics(lowest, highest, *sample).reduce()

    def reduce(self) -> "InputStatistics":
        """Return these statistics with only the `SAMPLED` rows that have the smallest keys."""
        kept = np.argsort(self.keys)[:SAMPLED]
        return replace(self, rows=self.rows[kept], halves=self.halves[kept], keys=self.keys[kept])


@dataclass(frozen=True, eq=False)
class Steps:
    """The int8 quantization of the inputs of matrices, with one scale for all rows.

    An input x becomes the integer x / (smoothing * scale) + zero, from 0 to 255. `smoothing` (K,)
    has a factor for each feature."""

    smoothing: np.ndarray | None
    scale: np.float32
    zero: np.uint8

    @classmethod
    def cover(
        cls, lowest: np.ndarray, highest: np.ndarray, smoothing: np.ndarray | None
    ) -> "Steps":
        """Return the `Steps` whose integers represent 0 and all values from `lowest` to `highest`.

        These are the limits (K,) of each feature, before they are divided by `smoothing` (K,).
        """
        divisor = 1 if smoothing is None else smoothing
        smallest, largest = min(0, (lowest / divisor).min()), max(0, (highest / divisor).max())
        scale = np.float32(max((largest - smallest) / 255, TINY))
        return cls(smoothing, scale, np.uint8(np.rint(-smallest / scale)))

    def multiply(self, rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        """Return `rows` (n, K) x `matrix` (K, N) with the errors that the int8 graph makes."""
        divisor = 1 if self.smoothing is None else self.smoothing
        zero = np.float32(self.zero)
        with np.errstate(over="ignore"):  # values far outside the range
            integers = np.clip(np.rint(rows / (divisor * self.scale)) + zero, 0, 255) - zero
        weights, scales = self.quantize(matrix)
        return integers @ (weights * (scales * self.scale))

    def quantize(self, matrix: np.ndarray) -> Quantized:
        """Return `matrix` (K, N), multiplied by `smoothing`, as int8 and a scale for each column.

        The int8 graph multiplies the integers of its inputs by these columns.
        """
        return int8_columns(matrix if self.smoothing is None else matrix * self.smoothing[:, None])


@dataclass(frozen=True)
class Choice:
    """The quantization of rows that some matrices read.

    Args:
        steps: one scale for all rows, or `None` if each row keeps a scale.
        error: that of one scale for all rows, by `held_out_products`.
        row_error: the largest `relative_error` of the matrices with a scale for each row.
    """

    steps: Steps | None
    error: float
    row_error: float

    @property
    def exported_error(self) -> float:
        """The error of the exported matrix multiplication: `row_error` if each row keeps a scale,
        else `error`."""
        return self.row_error if self.steps is None else self.error


@dataclass
class Calibration:
    """The inputs of matrix multiplications on a text, and their quantization.

    Args:
        inputs: by the name of the module, without the prefix of the model in front of its head.
        choices: by the names of all modules that read the same rows.
        matmuls: the choice for each matrix multiplication, by the name of its first module.
    """

    inputs: dict[str, InputStatistics] = field(default_factory=dict)
    choices: dict[tuple[str, ...], Choice] = field(default_factory=dict)
    matmuls: dict[str, Choice] = field(default_factory=dict)

    def observe(self, name: str, inputs: InputStatistics) -> None:
        """Add `inputs` to the statistics of what the module `name` read."""
        self.inputs[name] = inputs.merge(self.inputs[name]) if name in self.inputs else inputs

    def choose(self, name: str, modules: tuple[str, ...], matrices: Sequence[np.ndarray]) -> Choice:
        """Return the choice for the matrix multiplication whose first module is `name`.

        It is made once for all `modules`, which read the same rows and have the `matrices` (K, N).
        All graphs share it.
        """
        if modules not in self.choices:
            self.choices[modules] = choose(self.inputs[name], matrices)
        self.matmuls[name] = self.choices[modules]
        return self.choices[modules]

    def facts(self) -> dict[str, Any]:
        """Return what the manifest says about the calibration.

        The keys are matmuls and row_scales, the numbers of matrix multiplications and of those with
        a scale for each row. Error and row_error are means, as exported and if all had row scales.
        `left_out` is {module: {"error", "row_error"}} of modules that keep a scale for each row.
        """
        choices = self.matmuls.values()
        left_out = {
            name: {"error": significant(choice.error), "row_error": significant(choice.row_error)}
            for name, choice in self.matmuls.items()
            if choice.steps is None
        }
        return {
            "matmuls": len(choices),
            "row_scales": len(left_out),
            "error": mean_error([choice.exported_error for choice in choices]),
            "row_error": mean_error([choice.row_error for choice in choices]),
            "left_out": left_out,
        }


# ranges (K,) of the features, and matrices (K, N) -> one scale for all rows
MakeSteps = Callable[[np.ndarray, np.ndarray, Sequence[np.ndarray]], Steps]


def choose(inputs: InputStatistics, matrices: Sequence[np.ndarray]) -> Choice:
    """Return the choice between one scale for all rows and a scale per row, for `matrices` (K, N)
    that read `inputs`.

    One scale is chosen unless its error reaches `MAX_ERROR` and is larger than that of row scales.
    It has the smoothing of `smooth_steps` if that at least halves the error. An error is the
    largest `relative_error` of the matrices.
    """
    columns = [matrix[:, :MEASURED_COLUMNS] for matrix in matrices]
    exact = [inputs.rows @ matrix for matrix in columns]

    def largest_error(products: Iterable[np.ndarray]) -> float:
        return max(map(relative_error, products, exact))

    plain_error, smooth_error = (
        largest_error(held_out_products(make, inputs, matrices, columns))
        for make in (plain_steps, smooth_steps)
    )
    make_steps: MakeSteps = plain_steps
    error = plain_error
    if smooth_error < plain_error / 2:
        make_steps, error = smooth_steps, smooth_error
    row_error = largest_error(multiply_rows(inputs.rows, matrix) for matrix in columns)
    if error >= MAX_ERROR and error > row_error:
        return Choice(None, error, row_error)
    steps = make_steps(inputs.lowest.min(axis=0), inputs.highest.max(axis=0), matrices)
    return Choice(steps, error, row_error)


def plain_steps(lowest: np.ndarray, highest: np.ndarray, matrices: Sequence[np.ndarray]) -> Steps:
    return Steps.cover(lowest, highest, None)


def smooth_steps(lowest: np.ndarray, highest: np.ndarray, matrices: Sequence[np.ndarray]) -> Steps:
    """Return `Steps` with the smoothing of SmoothQuant (Xiao et al. 2023, equation 4, alpha 0.5).

    `lowest` and `highest` (K,) are the limits of each input feature, and `matrices` (K, N) the
    weights. Smoothing divides large features by a factor and multiplies their weights by it."""
    largest = np.maximum(-lowest, highest).clip(min=1e-5)
    heaviest = np.max(
        [np.maximum(-matrix.min(axis=1), matrix.max(axis=1)) for matrix in matrices], axis=0
    )
    return Steps.cover(lowest, highest, np.sqrt(largest / heaviest.clip(min=1e-5)))


def held_out_products(
    make_steps: MakeSteps,
    inputs: InputStatistics,
    matrices: Sequence[np.ndarray],
    columns: Sequence[np.ndarray],
) -> Iterator[np.ndarray]:
    """Yield the products of the sampled rows and the `columns` of each matrix.

    Each half of the rows has the steps of the other half. On the rows that the steps come from, no
    value is clipped: a text that is too short would look best. `make_steps` makes the scales from
    some rows of `inputs`. `matrices` are those of `choose`, and `columns` their first columns.
    """
    steps = [
        make_steps(lowest, highest, matrices)
        for lowest, highest in zip(inputs.lowest, inputs.highest)
    ]
    for matrix in columns:
        product = np.empty((len(inputs.rows), matrix.shape[1]), np.float32)
        for half, of_half in enumerate(steps):
            held_out = inputs.halves != half
            product[held_out] = of_half.multiply(inputs.rows[held_out], matrix)
        yield product


def multiply_rows(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return the product of `rows` (n, K) and `matrix` (K, N) as int8 arithmetic computes it; all
    are float32.

    `rows` are rounded with a scale for each row, and `matrix` with one for each column. The largest
    absolute value of a row becomes 255, or 127 if `rows` have a negative value.
    """
    levels = np.float32(127 if rows.min() < 0 else 255)
    scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True), TINY)
    weights, column_scales = int8_columns(matrix)
    return (np.rint(rows / scales * levels) @ (weights * column_scales)) * (scales / levels)


def relative_error(approximations: np.ndarray, exact: np.ndarray) -> float:
    """Return ||approximations - exact||^2 / ||exact||^2, both (n, N).

    It is that of all rows together, or the median over rows if that is larger. Rows of zeros have
    no error. A few special tokens can be a hundred times as large as other rows: only the median
    shows what those lose. Only the error of all rows shows values that are clipped in fewer than
    half of them.
    """
    lost = np.square(approximations - exact, dtype=np.float64).sum(axis=1)
    sizes = np.square(exact, dtype=np.float64).sum(axis=1)
    if not sizes.any():
        return 0.0
    return float(max(np.median(lost[sizes > 0] / sizes[sizes > 0]), lost.sum() / sizes.sum()))


def mean_error(errors: list[float]) -> float:
    """Return the mean of `errors` to 3 significant digits, 0 for no errors."""
    return significant(float(np.mean(errors or [0])))


def significant(value: float) -> float:
    """Return `value` rounded to 3 significant digits."""
    return float(f"{value:.3g}")
