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
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from ..errors import TooLong
from ..inference.export_info import MANIFEST
from ..inference.inputs import check_inputs, position_limit
from ..specs.graph_spec import TensorSpec, concrete_shape
from ..specs.sequences import pair
from .inputs import Update, ignore_activity
from .limits import Arrangement, Room, shutting_down
from .loop import Engine, Observe
from .model import OnnxModel
from .queue import ClientRequest

# axes, and the inputs that tell their lengths
LENGTHS = {"source_length": "attention_mask", "target_length": "decoder_attention_mask"}
MAX_ROWS = 2**31
MAX_JOIN_DELAY = 0.002  # seconds that rows wait for others while another batch runs
Sizes = tuple[tuple[str, int], ...]  # axes of a row and their padded sizes


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
        self.outputs: dict[str, np.ndarray] = {}

    @functools.cached_property
    def num_rows(self) -> int:
        return len(next(iter(self.feeds.values())))

    def sizes(self, spec_inputs: Sequence[TensorSpec], max_positions: int) -> list[Sizes]:
        """Return for each row the padded sizes of its axes: `((axis, size), …)`.

        Args:
            spec_inputs: the inputs of the graph, with the names of their axes.
            max_positions: the maximum length of a row.
        """
        fixed: dict[str, int] = {}
        for tensor in spec_inputs:
            for axis, size in zip(tensor.shape[1:], self.feeds[tensor.name].shape[1:]):
                if isinstance(axis, str) and axis not in LENGTHS:
                    fixed[axis] = size
        return [
            tuple((fixed | self.padded_lengths(row, max_positions)).items())
            for row in range(self.num_rows)
        ]

    def padded_lengths(self, row: int, max_positions: int) -> dict[str, int]:
        return {
            axis: padded_length(lengths[row], max_positions)
            for axis, lengths in self.lengths.items()
        }

    def store(self, outputs: Sequence[TensorSpec], row: int, values: Sequence[np.ndarray]) -> None:
        """Copy the results of one row to `self.outputs`, without their padding.

        Args:
            outputs: the outputs of the graph.
            row: the number of the row in this request.
            values: the row's array of each output.
        """
        for tensor, row_values in zip(outputs, values, strict=True):
            output = self.output(tensor, row_values)
            shape = zip(row_values.shape, output.shape[1:])
            covered = tuple(slice(min(size, max_size)) for size, max_size in shape)
            output[row][covered] = row_values[covered]

    def output(self, tensor: TensorSpec, row_values: np.ndarray) -> np.ndarray:
        """Return the array of the output `tensor` with all rows of this request, at first zeros.

        The first call creates it with the dtype and the axes of `row_values`, the result of one
        row. Axes of tokens are as long as the inputs of this request.
        """
        if (output := self.outputs.get(tensor.name)) is None:
            sizes = [
                self.size(axis, size) for axis, size in zip(tensor.shape[1:], row_values.shape)
            ]
            # Another worker may do the same at once: the first array counts.
            empty = np.zeros((self.num_rows, *sizes), row_values.dtype)
            output = self.outputs.setdefault(tensor.name, empty)
        return output

    def size(self, axis: str | int, size: int) -> int:
        """Return the size of an axis of an output, without the padding of the batch.

        Args:
            axis: an entry of the shape in the output's spec: a name or a fixed size.
            size: the size that the graph returned. The result is the length of the inputs instead
                if the axis has tokens.
        """
        name = LENGTHS.get(str(axis))
        return self.feeds[name].shape[-1] if name else size


class EncoderRow:
    """The `RequestPart` of one row, number `index` of `inputs`, with the padded `sizes` of its
    axes."""

    request: ClientRequest
    num_rows = 1
    has_started = False  # it has no tokens
    results = None  # `inputs` has the outputs

    def __init__(self, inputs: EncoderInputs, index: int, sizes: Sizes):
        self.inputs = inputs
        self.index = index
        self.sizes = sizes
        self.is_finished = False


# results of `invariant_rows`, which takes half of the time of loading, for exports that are loaded
# again: by the stamp of the manifest, the dtype, the device and the threads
MEASURED: dict[tuple[tuple, str, str, int], tuple[int, int]] = {}


class EncoderGraph:
    """The full-sequence graph of a model, which runs rows with equal padded sizes together."""

    def __init__(self, model: OnnxModel):
        self.model = model
        self.config = model.info.config
        self.session = model.session("encoder")
        self.spec = model.info.specs["encoder"]
        self.output_names = [tensor.name for tensor in self.spec.outputs]
        self.max_positions = position_limit(self.config) or 2**31
        info = model.info
        key = info.stamps[MANIFEST], info.dtype, model.device, model.threads
        if key not in MEASURED:
            MEASURED[key] = invariant_rows(self, info.architecture)
        self.min_rows, self.max_rows = MEASURED[key]

    def rows(self, inputs: EncoderInputs) -> list[EncoderRow]:
        """Return the rows of `inputs` as parts of a request, those of equal sizes one after the
        other."""
        rows = enumerate(inputs.sizes(self.spec.inputs, self.max_positions))
        return [
            EncoderRow(inputs, index, sizes)
            for index, sizes in sorted(rows, key=operator.itemgetter(1))
        ]

    def max_batch_rows(self, sizes: dict[str, int]) -> int:
        """Return how many rows of these `sizes` (`{axis: size}`) may run together."""
        rows = self.model.max_tokens // self.num_tokens(sizes)
        return max(1, min(self.max_rows, rows))

    def num_tokens(self, sizes: dict[str, int]) -> int:
        """Return the number of tokens of a row of these `sizes`, padding included.

        For images it is the number of patches, into which the model cuts an image.
        """
        if "image_size" in self.config:
            height, width = pair(self.config["image_size"])
            area = sizes.get("height", height) * sizes.get("width", width)
            return max(1, area // int(np.prod(pair(self.config["patch_size"]))))
        length = sizes["source_length"] + sizes.get("target_length", 0)
        return length * sizes.get("num_choices", 1)

    def run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return self.session.run(self.output_names, feeds)

    def run_rows(self, rows: Sequence[EncoderRow]) -> None:
        """Run `rows` of equal sizes together, and store each result in the row's `inputs`."""
        repeated = [*rows] * self.min_rows if len(rows) < self.min_rows else rows
        outputs = self.run(
            {tensor.name: self.stack(tensor, repeated) for tensor in self.spec.inputs}
        )
        for place, row in enumerate(rows):
            row.inputs.store(self.spec.outputs, row.index, [values[place] for values in outputs])

    def stack(self, tensor: TensorSpec, rows: Sequence[EncoderRow]) -> np.ndarray:
        """Return the values of the input `tensor` for `rows` as one array, with padding."""
        shape = concrete_shape(tensor, {**dict(rows[0].sizes), "batch_size": len(rows)})
        pad = self.config.get("pad_token_id") if tensor.name.endswith("input_ids") else None
        stacked = np.full(shape, pad or 0, tensor.dtype)
        axis = str(tensor.shape[-1])
        for place, row in enumerate(rows):
            values = row.inputs.feeds[tensor.name][row.index]
            length = row.inputs.lengths[axis][row.index] if axis in LENGTHS else None
            stacked[place, ..., :length] = values[..., :length]
        return stacked


class EncoderBatch:
    """The `Batch` of an encoder: rows of equal sizes, which a single step finishes.

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
        """Return True if `row` has the sizes of the rows `beside` it, and they are not too many."""
        if not beside:
            return True
        is_equal = row.sizes == beside[0].sizes
        return is_equal and len(beside) < self.graph.max_batch_rows(dict(row.sizes))

    def join(self, rows: list[EncoderRow]) -> None:
        self.running = rows

    def step(self) -> int:
        """Run the rows and finish them. Return 0, because an encoder has no new tokens."""
        if self.running:
            self.graph.run_rows(self.running)
        for row in self.running:
            row.is_finished = True
            row.request.finish_result()
        return 0

    def remove(self, rows: Sequence[EncoderRow]) -> None:
        self.running = [row for row in self.running if row not in rows]


def last_lengths(mask: np.ndarray) -> list[int]:
    """Return the length of each row of `mask` (B, ..., S) up to its last 1, at least 1.

    With several sequences per row, the longest counts.
    """
    places = mask * np.arange(1, mask.shape[-1] + 1)
    return np.maximum(places.reshape(len(mask), -1).max(axis=1), 1).tolist()


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
        self.engine.add(request)
        try:
            update = updates.get()
        finally:
            self.engine.cancel(request)
        if update is None:
            raise Disconnected
        if update.error is not None:
            raise update.error
        return inputs.outputs

    def close(self) -> None:
        """Accept no more calls. Rows that are in the queue are still run; a call whose rows are not
        in it yet raises RequestError."""
        self.engine.end()
        self.pool.shutdown(wait=False)

    def free(self) -> None:
        """Close, wait until no call runs, and free the memory of the batches."""
        self.close()
        self.pool.shutdown()
        self.engine.close()
        self.batches.clear()  # each has the list of all
