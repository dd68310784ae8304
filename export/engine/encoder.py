"""Dynamic batching of models that read full sequences. Rows of several requests run together, and
no row's result depends on the others.

A row is padded to a length that follows from its own, and runs only with rows of that length. That
is not needed on the CPU this was measured on (AMD EPYC, onnxruntime 1.31, fp32, 18 heads of three
kinds of models, 1 and 2 threads, 1 to 64 rows of 1 to 64 tokens). There, more padding changed the
bits of a row only where a classifier takes the mean of its tokens: that sum has other bits at
lengths that are no multiples of 4. Equal lengths cost little and hold on other CPUs too. In the
same sum, a row that ran alone had other bits: such a row runs twice, as `invariant_rows` measures
when a model is loaded.
"""

import asyncio
import contextvars
import functools
import math
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from ..errors import TooLong
from ..inference.export_info import MANIFEST
from ..inference.inputs import check_inputs, last_lengths, position_limit, store_rows
from ..specs.graph_spec import concrete_shape
from ..specs.sequences import pair
from .inputs import Update, ignore_activity
from .limits import Arrangement, shutting_down
from .loop import Engine, Observe, Room
from .model import OnnxModel
from .queue import ClientRequest

# axes, and the inputs that tell their lengths
LENGTHS = {"source_length": "attention_mask", "target_length": "decoder_attention_mask"}
MAX_ROWS = 2**31
MAX_JOIN_DELAY = 0.002  # seconds that rows wait for others while another batch runs


def padded_length(length: int, max_positions: int) -> int:
    """Return the length to which a sequence of `length` tokens is padded.

    It is the next multiple of 8 up to 64 tokens, of 16 up to 128, and of 32 above, but at most
    `max_positions`. It is never less than `length`.
    """
    multiple = 8 if length <= 64 else 16 if length <= 128 else 32
    return max(length, min(-(-length // multiple) * multiple, max_positions))


def max_row_length(config: dict, max_source: int | None) -> int:
    """Return the maximum number of tokens of a row: `max_source`, or by default the positions of
    the model, which are always a limit. `config` are the fields of config.json."""
    return min(max_source or 2**31, config.get("max_position_embeddings") or 2**31)


class EncoderInputs:
    """The inputs of one request for a full-sequence graph, and its outputs, which workers fill.

    Args:
        feeds: `{input: array of all rows}`, checked by `inputs.encoder_feeds`.
    """

    def __init__(self, feeds: dict[str, np.ndarray]):
        self.feeds = feeds
        self.lengths = {
            axis: last_lengths(feeds[name]) for axis, name in LENGTHS.items() if name in feeds
        }
        self.num_rows = len(next(iter(feeds.values())))
        # the sizes of `outputs`, whose axes of tokens are as long as the inputs
        self.sizes = {axis: feeds[LENGTHS[axis]].shape[-1] for axis in self.lengths}
        self.sizes["batch_size"] = self.num_rows
        self.outputs: dict[str, np.ndarray] = {}


class EncoderRow:
    """The part of a request for one row, number `index` of `inputs`.

    `feeds` are the inputs of the row by name, padded. Rows of equal `shapes` may run together.
    """

    request: ClientRequest
    num_rows = 1
    has_started = False  # it has no tokens
    results = None  # `inputs` has the outputs

    def __init__(self, inputs: EncoderInputs, index: int, feeds: dict[str, np.ndarray]):
        self.inputs = inputs
        self.index = index
        self.feeds = feeds
        self.shapes = [array.shape for array in feeds.values()]


# results of `invariant_rows`, which takes half of the time of loading, for exports that are loaded
# again: by the stamp of the manifest and what selects the kernels
MEASURED: dict[tuple, tuple[int, int]] = {}


class EncoderGraph:
    """The full-sequence graph of a model, which runs rows with equal shapes together."""

    def __init__(self, model: OnnxModel):
        self.model = model
        self.config = model.info.config
        self.session = model.session("encoder")
        self.spec = model.info.specs["encoder"]
        self.output_names = [tensor.name for tensor in self.spec.outputs]
        self.max_positions = position_limit(self.config) or 2**31
        info, changes = model.info, model.loaded.changes
        key = info.stamps[MANIFEST], info.dtype, model.device, model.threads, changes
        if key not in MEASURED:
            MEASURED[key] = invariant_rows(self, info.architecture)
        self.min_rows, self.max_rows = MEASURED[key]

    def rows(self, inputs: EncoderInputs) -> list[EncoderRow]:
        """Return the rows of `inputs` as parts of a request, those of equal shapes one after the
        other."""
        rows = [
            EncoderRow(inputs, index, self.padded_feeds(inputs, index))
            for index in range(inputs.num_rows)
        ]
        return sorted(rows, key=operator.attrgetter("shapes"))

    def padded_feeds(self, inputs: EncoderInputs, row: int) -> dict[str, np.ndarray]:
        """Return the inputs of one row by name, with padding up to `padded_length`."""
        feeds = {name: values[row] for name, values in inputs.feeds.items()}
        for tensor in self.spec.inputs:
            if (lengths := inputs.lengths.get(str(tensor.shape[-1]))) is not None:
                length = lengths[row]
                pad = self.config.get("pad_token_id") if tensor.name.endswith("input_ids") else 0
                values = feeds[tensor.name][..., :length]
                size = *values.shape[:-1], padded_length(length, self.max_positions)
                feeds[tensor.name] = np.full(size, pad or 0, values.dtype)
                feeds[tensor.name][..., :length] = values
        return feeds

    def max_batch_rows(self, row: EncoderRow) -> int:
        """Return how many rows of the shapes of `row` may run together."""
        return max(1, min(self.max_rows, self.model.max_tokens // self.num_tokens(row)))

    def num_tokens(self, row: EncoderRow) -> int:
        """Return the number of tokens of a row, padding included.

        For images it is the number of patches, into which the model cuts an image.
        """
        if "pixel_values" in row.feeds:
            area = math.prod(row.feeds["pixel_values"].shape[-2:])
            return max(1, area // math.prod(pair(self.config["patch_size"])))
        return sum(row.feeds[name].size for name in LENGTHS.values() if name in row.feeds)

    def run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return self.session.run(self.output_names, feeds)

    def run_rows(self, rows: Sequence[EncoderRow]) -> None:
        """Run `rows` of equal shapes together, and store each result in the row's `inputs`."""
        repeated = [*rows] * self.min_rows if len(rows) < self.min_rows else rows
        outputs = self.run(
            {name: np.stack([row.feeds[name] for row in repeated]) for name in rows[0].feeds}
        )
        for place, row in enumerate(rows):
            index = slice(row.index, row.index + 1)
            for tensor, values in zip(self.spec.outputs, outputs, strict=True):
                of_row = values[place : place + 1]
                store_rows(row.inputs.outputs, tensor, row.inputs.sizes, index, of_row)


class EncoderBatch:
    """The `Batch` of an encoder: rows of equal shapes, which a single step finishes.

    Args:
        graph: what all batches run.
        batches: all batches of the scheduler, which share the CPU; this one adds itself.
    """

    should_grow = False  # nothing joins running rows

    def __init__(self, graph: EncoderGraph, batches: "list[EncoderBatch]"):
        self.graph = graph
        self.batches = batches
        batches.append(self)
        self.running: list[EncoderRow] = []
        self.prefilling = ()
        self.num_free_rows = MAX_ROWS
        self.num_spare_rows = 0
        self.has_ended = True  # a step computes complete rows

    @property
    def num_rows(self) -> int:
        return len(self.running)

    @property
    def join_delay(self) -> float:
        return MAX_JOIN_DELAY if any(batch.running for batch in self.batches) else 0.0

    def fits(self, row: EncoderRow, beside: Sequence[EncoderRow]) -> bool:
        """Return True if `row` has the shapes of the rows `beside` it, and they are not too
        many."""
        if not beside:
            return True
        return row.shapes == beside[0].shapes and len(beside) < self.graph.max_batch_rows(row)

    def join(self, rows: list[EncoderRow]) -> None:
        self.running = rows

    def step(self) -> int:
        """Run the rows and finish them. Return 0, because an encoder has no new tokens."""
        if self.running:
            self.graph.run_rows(self.running)
        for row in self.running:
            row.request.finish_result()
        return 0

    def remove(self, rows: Sequence[EncoderRow]) -> None:
        """Remove all rows, because a step finishes them or fails their requests."""
        self.running = []


# lengths and numbers of rows with which `invariant_rows` runs a graph
PROBED_LENGTHS, PROBED_ROWS = (8, 24), (2, 5)


def invariant_rows(graph: EncoderGraph, architecture: str) -> tuple[int, int]:
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
    return min_rows, MAX_ROWS


def run_rows_apart(
    graph: EncoderGraph, feeds: dict[str, np.ndarray], copies: int
) -> list[np.ndarray]:
    """Return the outputs of all rows, where each row runs without the others.

    It runs as a batch of `copies` copies of itself. `feeds` are the inputs of all rows by name.
    """
    outputs = [
        graph.run({name: values[[row] * copies] for name, values in feeds.items()})
        for row in range(max(PROBED_ROWS))
    ]
    return [np.concatenate([values[:1] for values in of_rows]) for of_rows in zip(*outputs)]


def has_same_bits(apart: list[np.ndarray], together: list[np.ndarray]) -> bool:
    return all(
        np.array_equal(values[: len(joint)], joint)
        for values, joint in zip(apart, together, strict=True)
    )


def random_feeds(graph: EncoderGraph, length: int, rows: int) -> dict[str, np.ndarray | None]:
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


# ------------------------------------------------------------------------------------ the scheduler

MAX_WAITING = 256  # rows
MAX_CALLS = 64  # calls at once: their texts are tokenized, and answers made of the outputs
Result = TypeVar("Result")


class Disconnected(Exception):
    """Raised in the thread of a request whose client has left."""


# the updates of the request of a call; None if the call is cancelled
Updates = SimpleQueue[Update | None]
CALL: contextvars.ContextVar[Updates] = contextvars.ContextVar("call")


class EncoderScheduler:
    """Dynamic batching of an encoder: threads ask for rows, and workers run rows of several
    together.

    Args:
        model: opened with as many threads as a worker shall have.
        workers: the number of threads that run the graph; they share its session.
        max_waiting: the maximum number of rows of unanswered calls, unless one call alone has more.
        max_source: the maximum number of tokens of a row; by default the model's positions.
        observe: gets what the workers do, for metrics.
        max_calls: the maximum number of calls at once; others wait.
    """

    def __init__(
        self,
        model: OnnxModel,
        workers: int = 1,
        max_waiting: int = MAX_WAITING,
        max_source: int | None = None,
        observe: Observe = ignore_activity,
        max_calls: int = MAX_CALLS,
    ):
        self.graph = EncoderGraph(model)
        self.arrangement = Arrangement(workers, model.threads)
        self.max_length = max_row_length(model.info.config, max_source)
        self.room = Room(max_waiting)
        self.batches: list[EncoderBatch] = []
        for _ in range(workers):
            EncoderBatch(self.graph, self.batches)
        self.pool = ThreadPoolExecutor(max_calls, "encoder call")
        self.engine = Engine(self.batches).start(observe)

    def describe(self) -> str:
        """Return one line about the batches and workers, for the log."""
        is_alone = self.graph.max_rows == 1
        alone = " one row at a time (its rows depend on each other)," if is_alone else ""
        return f"dynamic batches,{alone} {self.arrangement}"

    async def call(
        self, num_rows: int, function: Callable[..., Result], /, *args: Any, **options: Any
    ) -> Result:
        """Call `function` with `args` and `options` in a thread and return its result.

        `num_rows` is about the number of rows that the function passes to `run`. Cancelling drops
        those that have not started.

        Raises:
            RequestError: if too many rows are unanswered, or the server is shutting down.
            Exception: what `function` raises.
        """
        if self.engine.is_closed:
            raise shutting_down()
        call, context = Updates(), contextvars.copy_context()
        context.run(CALL.set, call)
        work = functools.partial(context.run, function, *args, **options)
        with self.room.hold(num_rows, state="waiting or running"):
            try:
                return await asyncio.get_running_loop().run_in_executor(self.pool, work)
            except asyncio.CancelledError:
                call.put(None)
                raise

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return `{output: array}` for `feeds`, the inputs that `inputs.encoder_feeds` returns.

        The rows run together with those of other threads, while this thread waits.

        Raises:
            TooLong: if a row has more than `max_length` tokens.
            RequestError: if the server is shutting down.
            Disconnected: if the call of this thread was cancelled.
            RuntimeError: if the engine failed.
        """
        inputs = EncoderInputs(feeds)
        for lengths in inputs.lengths.values():
            if (length := max(lengths)) > self.max_length:
                raise TooLong(f"a text has {length} tokens, expected at most {self.max_length}")
        updates = CALL.get(None) or Updates()
        request = ClientRequest(self.graph.rows(inputs), updates.put)
        self.engine.queue.put(request)
        try:
            update = updates.get()
        finally:
            self.engine.queue.cancel(request)
        if update is None:
            raise Disconnected
        if update.error is not None:
            raise update.error
        return inputs.outputs

    def close(self) -> None:
        """Accept no more calls. Rows that are in the queue are still run; a call whose rows are not
        in it yet raises RequestError."""
        self.engine.queue.close()
        self.pool.shutdown(wait=False)

    def free(self) -> None:
        """Close, wait until no call runs, and free the memory of the batches."""
        self.close()
        self.pool.shutdown()
        self.engine.close()
        self.batches.clear()  # each has the list of all
