"""The results of a shard. A call that fails is made again for each half, down to the lines that it
fails for."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import SessionError, UsageError
from .predictions import Predictions
from .rows import Row


class Results(NamedTuple):
    """The results of a shard. `values` has one for each row, in the same order, `None` for a bad
    row or a row without words. `bad` has the number of each bad line in its file, from 0, and what
    is wrong with it. `warnings` are the texts of Python warnings."""

    values: list[Any]
    bad: list[tuple[int, str]]
    warnings: list[str]


def compute(
    predictions: Predictions,
    rows: Sequence[Row],
    first: int,
    update: Callable[[int], object] = lambda count: None,
) -> Results:
    """Return the results of `rows`, which are the lines from the number `first` (from 0) on.

    A row that is too long, or that the task cannot run, becomes a bad line in the results. `update`
    is called with the number of blank and bad rows, then with the number of rows of each batch
    after it ran. Python warnings are collected in the results and not shown.

    Raises:
        UsageError: for options that the task does not take.
        ValueError: if onnxruntime fails, as where memory is short: no line is to blame for that.
    """
    values: list[Any] = [None] * len(rows)
    faults = [row.fault or predictions.length_fault(row.example or {}) for row in rows]
    indices = [
        index for index, row in enumerate(rows) if row.example is not None and not faults[index]
    ]
    update(len(rows) - len(indices))
    indices.sort(key=lambda index: length_key(rows[index]))
    # a task that generates makes batches itself
    size = max(len(indices), 1) if predictions.generates else predictions.batch_size
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            for index, value, fault in try_rows(predictions, rows, batch, first):
                values[index], faults[index] = value, fault
            update(len(batch))
    bad = [(first + index, fault) for index, fault in enumerate(faults) if fault is not None]
    return Results(values, bad, [str(warning.message) for warning in caught])


def length_key(row: Row) -> tuple[int, int]:
    """Return a sort key by which similar rows run together: the lengths of the target prefix and of
    the example."""
    example = row.example or {}
    return len(example.get("target_prefix", "")), len(str(example))


def try_rows(
    predictions: Predictions, rows: Sequence[Row], indices: list[int], first: int
) -> Iterator[tuple[int, Any, str | None]]:
    """Yield (index, result, fault) of each of the rows `indices`. The result or the fault is None.

    All of these rows have an example. `first` is the line number of `rows[0]`. If the task rejects
    a row, its fault says why. Raises UsageError for wrong options, and ValueError if onnxruntime
    fails with a single row.
    """
    read = (rows[index].example for index in indices)
    examples = [example for example in read if example is not None]
    try:
        values = predictions.call(examples, [first + index for index in indices])
    except ValueError as error:
        is_of_a_line = not isinstance(error, UsageError | SessionError)
        if len(indices) == 1 and is_of_a_line:
            yield indices[0], None, " ".join(str(error).split())
            return
        if len(indices) == 1 or isinstance(error, UsageError):
            raise
        middle = len(indices) // 2
        yield from try_rows(predictions, rows, indices[:middle], first)
        yield from try_rows(predictions, rows, indices[middle:], first)
    else:
        yield from ((index, value, None) for index, value in zip(indices, values, strict=True))
