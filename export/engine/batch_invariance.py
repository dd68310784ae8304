"""Batch invariance: the numbers of rows for which no row's bits depend on the others."""

from typing import Protocol

import numpy as np

from ..inference.inputs import check_inputs
from ..specs.graph_spec import GraphSpec, concrete_shape

PROBED_LENGTHS, PROBED_ROWS = (8, 24), (2, 5)
UNLIMITED = 2**31


class RowGraph(Protocol):
    """A graph that reads full sequences and can be run on several rows.

    `spec` are its inputs and outputs, `config` is the model's config.json, and `max_positions` the
    maximum length of a row.
    """

    spec: GraphSpec
    config: dict
    max_positions: int

    def run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]: ...


def invariant_rows(graph: RowGraph, architecture: str) -> tuple[int, int]:
    """Return the smallest and largest number of rows that may run together.

    In between, the number of rows does not change the bits of a row's result. It is measured by
    runs of `graph`, because kernels differ between machines. `architecture` is the name of the
    model class.
    """
    min_rows = 1
    for length in PROBED_LENGTHS:
        size = min(length, graph.max_positions), max(PROBED_ROWS)
        feeds = check_inputs(graph.spec.inputs, random_feeds(graph, *size), architecture)
        alone, doubled = (run_rows_apart(graph, feeds, copies) for copies in (1, 2))
        for rows in PROBED_ROWS:
            together = graph.run({name: values[:rows] for name, values in feeds.items()})
            if has_same_bits(alone, together):
                continue
            if not has_same_bits(doubled, together):
                return 1, 1
            min_rows = 2
    return min_rows, UNLIMITED


def run_rows_apart(
    graph: RowGraph, feeds: dict[str, np.ndarray], copies: int
) -> list[list[np.ndarray]]:
    """Return `[outputs of row 0, outputs of row 1, …]`, where each row runs without the others.

    It runs as a batch of `copies` copies of itself. `feeds` are the inputs of all rows by name.
    """
    num_rows = len(next(iter(feeds.values())))
    rows = [
        graph.run({name: values[[row] * copies] for name, values in feeds.items()})
        for row in range(num_rows)
    ]
    return [[values[0] for values in outputs] for outputs in rows]


def has_same_bits(rows: list[list[np.ndarray]], together: list[np.ndarray]) -> bool:
    return all(
        np.array_equal(rows[place][output], row)
        for output, values in enumerate(together)
        for place, row in enumerate(values)
    )


def random_feeds(graph: RowGraph, length: int, rows: int) -> dict[str, np.ndarray | None]:
    """Return `{name: random values}` for all inputs of `graph`, always the same.

    There are `rows` rows. Each has `length` token ids and a mask of ones, or one image if the graph
    reads images.
    """
    rng = np.random.default_rng(0)
    sizes = {
        "batch_size": rows,
        "num_choices": 1,
        "source_length": length,
        "target_length": length,
        **graph.spec.example_sizes,
    }
    end = graph.config.get("eos_token_id")
    feeds: dict[str, np.ndarray | None] = {}
    for tensor in graph.spec.inputs:
        shape = concrete_shape(tensor, sizes)
        if tensor.name.endswith("mask"):
            feeds[tensor.name] = np.ones(shape, np.int64)
        elif "float" in tensor.dtype:
            feeds[tensor.name] = rng.standard_normal(shape).astype(np.float32)
        else:
            lowest, highest = tensor.range or (0, 0)
            feeds[tensor.name] = ids = rng.integers(lowest, highest + 1, shape)
            if tensor.name == "input_ids" and end is not None:
                ids[..., -1] = np.ravel(end)[0]
    return feeds
