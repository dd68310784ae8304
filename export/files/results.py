"""The results of a shard. A call that fails is made again for each half, down to the lines that it
fails for."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import SessionError, UsageError
from ..inference.inputs import batches
from .predictions import Predictions
from .rows import Row


class Place(NamedTuple):
    """Of a shard: the numbers of its file, of itself in it and of its `first` line, and the
    `digest` of that and its lines."""

    file: int
    number: int
    first: int
    digest: str


class Found(NamedTuple):
    """What is found for a shard: of each row its result, `None` of one without words or a bad one;
    the number of each bad one, with what is wrong with it; and how many warnings there were."""

    results: list[Any]
    bad: list[tuple[int, str]]
    warnings: int


def results_of(
    predictions: Predictions, rows: Sequence[Row], first: int, told: Callable[[int], object]
) -> Found:
    """What `predictions` gives for `rows`. `first` is the number of the first, and `told` is called
    with how many are done, batch by batch.

    Raises:
        UsageError: for options that the task does not take.
        ValueError: for what onnxruntime cannot compute, as where memory is short: no line is to
            blame for that.
    """
    results: list[Any] = [None] * len(rows)
    faults = [row.fault for row in rows]
    places = [place for place, row in enumerate(rows) if row.example is not None]
    told(len(rows) - len(places))
    texts = [str(rows[place].example) for place in places]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for batch in batches(texts, rows_together(predictions, len(places))):
            for place, result, fault in tried(
                predictions, rows, [places[index] for index in batch], first
            ):
                results[place], faults[place] = result, fault
            told(len(batch))
    bad = [(first + place, fault) for place, fault in enumerate(faults) if fault is not None]
    return Found(results, bad, len(warned))


def rows_together(predictions: Predictions, count: int) -> int:
    """How many are given to the task at once: what generates in workers runs best with many."""
    if predictions.kind.method == "translate":  # which makes batches of sentences itself
        return max(count, 1)
    if predictions.kind.method != "generate":
        return predictions.batch_size
    options = {
        name: value
        for name, value in predictions.options.items()
        if name not in ("src_lang", "tgt_lang")
    }
    return predictions.runtime.runtime.rows_together(count, predictions.batch_size, options)


def tried(
    predictions: Predictions, rows: Sequence[Row], places: list[int], first: int
) -> Iterator[tuple[int, Any, str | None]]:
    """Of each of `places` its result, or what is wrong with it."""
    examples = [example for place in places if (example := rows[place].example) is not None]
    try:
        found = predictions.call(examples, first + places[0])
    except ValueError as error:
        is_of_a_line = not isinstance(error, UsageError | SessionError)
        if len(places) == 1 and is_of_a_line:
            yield places[0], None, " ".join(str(error).split())
            return
        if len(places) == 1 or isinstance(error, UsageError):
            raise
        middle = len(places) // 2
        yield from tried(predictions, rows, places[:middle], first)
        yield from tried(predictions, rows, places[middle:], first)
    else:
        yield from ((place, result, None) for place, result in zip(places, found, strict=True))
