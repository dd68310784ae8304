"""Dynamic batching of models that read full sequences. Rows of several requests run together, and
no row's answer depends on the others.

A row is padded to a length that follows from its own, and runs with rows of that length only. That
is not needed on the processor this was measured on (AMD EPYC, onnxruntime 1.31, fp32, 18 heads of
three kinds of models, 1 and 2 threads, 1 to 64 rows of 1 to 64 tokens): there more padding changed
no bit of a row, but where a classifier takes the mean of its tokens, whose sum has other bits at
lengths that are no multiples of 4. It costs little and holds on others. What did change bits was a
row alone in its run, in that same sum: then it runs twice, as `company` finds out when a model is
loaded.
"""

import asyncio
import contextvars
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ..errors import TooLong
from ..inference.inputs import MAX_TOKENS, check_inputs, position_limit
from ..requests import encoder_feeds
from ..runtime import Runtime
from ..scheduler.capacity import Arrangement
from ..scheduler.refusals import draining, overloaded
from ..scheduler.worker import NoEvents, SchedulerEvents
from ..specs.graph_spec import TensorSpec, concrete_shape
from ..specs.sequences import pair

QUEUE = 256  # rows that may wait
MAX_CALLS = 64  # requests at once whose texts are cut, and answers made of what the graph returns
LONGEST_WAIT = 0.002  # seconds that a row waits for others while another run is under way
# axes, and what tells of them
LENGTHS = {"source_length": "attention_mask", "target_length": "decoder_attention_mask"}
PROBED_LENGTHS, PROBED_ROWS = (8, 24), (2, 5)
Result = TypeVar("Result")
Sizes = tuple[tuple[str, int], ...]


class Gone(Exception):
    """An error that says that the client of a request has left."""


class Ticket:
    """A request of a client, which can be cancelled."""

    def __init__(self) -> None:
        self.is_cancelled = False


TICKET: contextvars.ContextVar[Ticket] = contextvars.ContextVar("ticket")


def padded(length: int, longest: int) -> int:
    """Return the padded length of a sequence of `length` tokens, at most the model's `longest`
    positions."""
    step = 8 if length <= 64 else 16 if length <= 128 else 32
    return max(length, min(-(-length // step) * step, longest))


class Call:
    """The rows of one call of `Runtime.outputs`. Workers fill its `outputs`.

    Args:
        feeds: checked, see `Runtime.feeds`.
        sizes: of each row, those of its axes.
    """

    def __init__(
        self,
        ticket: Ticket,
        feeds: dict[str, np.ndarray],
        lengths: dict[str, list[int]],
        sizes: list[Sizes],
    ):
        self.ticket = ticket
        self.feeds = feeds
        self.lengths = lengths
        self.waiting: dict[Sizes, deque[int]] = {}
        for row, own in enumerate(sizes):
            self.waiting.setdefault(own, deque()).append(row)
        self.left = len(sizes)
        self.outputs: dict[str, np.ndarray] = {}
        self.error: Exception | None = None
        self.put_at = time.perf_counter()
        self.ended = threading.Event()

    @property
    def rows(self) -> int:
        return sum(map(len, self.waiting.values()))

    def next(self, sizes: Sizes | None = None) -> tuple[Sizes, int]:
        """Return a row of the given `sizes`, or of any sizes."""
        sizes = sizes or next(iter(self.waiting))
        row = self.waiting[sizes].popleft()
        if not self.waiting[sizes]:
            del self.waiting[sizes]
        return sizes, row

    def fill(self, outputs: Sequence[TensorSpec], row: int, values: Sequence[np.ndarray]) -> None:
        for tensor, own in zip(outputs, values, strict=True):
            whole = self.outputs.get(tensor.name)
            if whole is None:
                sizes = [self.size(axis, size) for axis, size in zip(tensor.shape[1:], own.shape)]
                # Another worker may do the same at once: the first one counts.
                whole = self.outputs.setdefault(
                    tensor.name, np.zeros((self.count, *sizes), own.dtype)
                )
            covered = tuple(
                slice(min(size, most)) for size, most in zip(own.shape, whole.shape[1:])
            )
            whole[row][covered] = own[covered]

    @functools.cached_property
    def count(self) -> int:
        return len(next(iter(self.feeds.values())))

    def size(self, axis: str | int, otherwise: int) -> int:
        name = LENGTHS.get(str(axis))
        return self.feeds[name].shape[-1] if name else otherwise

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended.set()


Rows = list[tuple[Call, int]]


class ReadingQueue:
    """A first-come-first-served queue of calls. Calls take turns, one row each, so a long list of
    texts delays no short one. `most` returns how many rows of the same sizes may run together."""

    def __init__(self, most: Callable[[Sizes], int]):
        self.most = most
        self.calls: deque[Call] = deque()
        self.running = 0  # runs under way
        self.changed = threading.Condition()
        self.is_closed = False

    def put(self, call: Call) -> None:
        with self.changed:
            if call.ticket.is_cancelled:
                raise Gone
            if self.is_closed:
                raise draining()
            self.calls.append(call)
            self.changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Drop the rows of `ticket` that have not started."""
        with self.changed:
            ticket.is_cancelled = True
            for call in [call for call in self.calls if call.ticket is ticket]:
                self.calls.remove(call)
                call.end(Gone())

    def take(self) -> tuple[Sizes, Rows] | None:
        """Return rows that run together now. Block while there are none, and briefly while there
        are few and others run. Return `None` once the queue is closed and empty."""
        with self.changed:
            while not self.calls or self.hesitates():
                if self.is_closed and not self.calls:
                    return None
                self.changed.wait(LONGEST_WAIT / 2 if self.calls else None)
            self.running += 1
            return self.chosen()

    def hesitates(self) -> bool:
        first = self.calls[0]
        if not self.running or self.is_closed or time.perf_counter() - first.put_at > LONGEST_WAIT:
            return False
        sizes = next(iter(first.waiting))
        return sum(len(call.waiting.get(sizes, ())) for call in self.calls) < self.most(sizes)

    def chosen(self) -> tuple[Sizes, Rows]:
        """Return a row of the first call, then round-robin one row of each call with the same
        sizes."""
        sizes = next(iter(self.calls[0].waiting))
        most = self.most(sizes)
        rows: Rows = []
        while giving := [call for call in self.calls if sizes in call.waiting]:
            for call in giving[: most - len(rows)]:
                rows.append((call, call.next(sizes)[1]))
            if len(rows) == most:
                break
        self.calls.rotate(-1)
        self.calls = deque(call for call in self.calls if call.waiting)
        return sizes, rows

    def ran(self, rows: Rows, error: Exception | None) -> None:
        with self.changed:
            self.running -= 1
            for call, _ in rows:
                call.left -= 1
                if error is not None:
                    call.waiting.clear()
                if (not call.left or error is not None) and not call.ended.is_set():
                    call.end(error)
            if error is not None:
                self.calls = deque(call for call in self.calls if call.waiting)
            self.changed.notify_all()

    def close(self) -> None:
        """Accept no more rows; rows in the queue still run."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class Reader:
    """A dynamic batcher that runs the graph of `runtime` for many threads at once. The graph reads
    full sequences.

    Args:
        runtime: opened with as many threads as a worker shall have.
        workers: threads that run the graph; they share the session.
        queue: rows of requests that may be there at once, unless one request alone has more.
        longest: tokens of a row at most; by default as many as the model has positions.
        max_calls: calls of `call` that are under way at once; others wait.
    """

    def __init__(
        self,
        runtime: Runtime,
        workers: int = 1,
        queue: int = QUEUE,
        longest: int | None = None,
        events: SchedulerEvents | None = None,
        max_calls: int = MAX_CALLS,
    ):
        self.runtime = runtime
        self.session, self.spec = runtime.model.session("encoder"), runtime.info.specs["encoder"]
        self.names = [tensor.name for tensor in self.spec.outputs]
        positions = runtime.config.get("max_position_embeddings")
        self.positions = position_limit(runtime.config) or 2**31
        self.longest = min(longest or 2**31, positions or 2**31)
        self.most_waiting = queue
        self.asked = 0  # rows of requests that are not answered
        self.events = events or NoEvents()
        self.fewest, self.most_rows = company(self)
        self.queue = ReadingQueue(self.most)
        self.pool = ThreadPoolExecutor(max_calls, "reader")
        self.workers = [
            threading.Thread(target=self._worker, name=f"worker {worker}", daemon=True)
            for worker in range(workers)
        ]
        for worker in self.workers:
            worker.start()

    def describe(self) -> str:
        """Return one line for the person who starts the server."""
        alone = "" if self.most_rows > 1 else " one row at a time (its rows depend on each other),"
        return f"dynamic batches,{alone} {Arrangement(len(self.workers), self.runtime.threads)}"

    @property
    def waiting(self) -> int:
        return sum(call.rows for call in list(self.queue.calls))

    @property
    def running(self) -> int:
        return self.queue.running

    # ------------------------------------------------------------------------------------- requests

    async def call(
        self, rows: int, function: Callable[..., Result], /, *args: Any, **options: Any
    ) -> Result:
        """Run `function` in a thread and return its result. Its calls to a `BatchingRuntime` count
        as one request of about `rows` rows. Cancelling drops rows that have not started.

        Raises:
            RequestError: if too many rows are there already, or the server is shutting down; and
                what `function` raises.
        """
        if self.queue.is_closed:
            raise draining()
        if self.asked and self.asked + rows > self.most_waiting:
            raise overloaded(self.asked, self.most_waiting)
        ticket = Ticket()
        context = contextvars.copy_context()
        context.run(TICKET.set, ticket)
        self.asked += rows
        try:
            work = functools.partial(context.run, function, *args, **options)
            return await asyncio.get_running_loop().run_in_executor(self.pool, work)
        except asyncio.CancelledError:
            self.queue.cancel(ticket)
            raise
        finally:
            self.asked -= rows

    def read(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs for `feeds`, which `Runtime.feeds` has checked, together with rows of
        other threads.

        Raises:
            TooLong: for a row of more tokens than `longest`.
        """
        lengths = {axis: ends(feeds[name]) for axis, name in LENGTHS.items() if name in feeds}
        for of_rows in lengths.values():
            if (most := max(of_rows)) > self.longest:
                raise TooLong(f"a text has {most} tokens, expected at most {self.longest}")
        call = Call(TICKET.get(Ticket()), feeds, lengths, self.sizes(feeds, lengths))
        self.queue.put(call)
        call.ended.wait()
        if call.error is not None:
            raise call.error
        return call.outputs

    def close(self) -> None:
        """Accept no more calls; earlier calls are still answered."""
        self.queue.close()
        self.pool.shutdown(wait=False)

    # ----------------------------------------------------------------------------------------- runs

    def sizes(self, feeds: dict[str, np.ndarray], lengths: dict[str, list[int]]) -> list[Sizes]:
        """Return the padded sizes of the axes of each row."""
        fixed: dict[str, int] = {}
        for tensor in self.spec.inputs:
            for axis, size in zip(tensor.shape[1:], feeds[tensor.name].shape[1:]):
                if isinstance(axis, str) and axis not in LENGTHS:
                    fixed[axis] = size
        count = len(next(iter(feeds.values())))
        of_rows = [
            {axis: padded(own[row], self.positions) for axis, own in lengths.items()}
            for row in range(count)
        ]
        return [tuple((fixed | own).items()) for own in of_rows]

    def most(self, sizes: Sizes) -> int:
        """Return how many rows of these `sizes` may run together."""
        return max(
            1, min(self.most_rows, MAX_TOKENS * self.runtime.threads // self.tokens(dict(sizes)))
        )

    def tokens(self, sizes: dict[str, int]) -> int:
        """Return the number of tokens of a row, with its padding."""
        config = self.runtime.config
        if "image_size" in config:
            height, width = pair(config["image_size"])
            area = sizes.get("height", height) * sizes.get("width", width)
            return max(1, area // int(np.prod(pair(config["patch_size"]))))
        return (sizes["source_length"] + sizes.get("target_length", 0)) * sizes.get(
            "num_choices", 1
        )

    def _worker(self) -> None:
        while (found := self.queue.take()) is not None:
            sizes, rows = found
            error: Exception | None = None
            try:
                self.run(dict(sizes), rows)
            except Exception as raised:  # not of the request, which was checked: a 500, for the log
                error = RuntimeError(f"a run of {len(rows)} rows failed: {raised}")
            self.queue.ran(rows, error)
            now = time.perf_counter()
            for call in dict.fromkeys(call for call, _ in rows):
                self.events.joined(now - call.put_at)
            self.events.stepped(len(rows), 0)

    def run(self, sizes: dict[str, int], rows: Rows) -> None:
        """Run `rows` and store their outputs in the calls that wait."""
        repeated = rows * self.fewest if len(rows) < self.fewest else rows
        sizes = {**sizes, "batch_size": len(repeated)}
        feeds = {}
        for tensor in self.spec.inputs:
            whole = np.full(concrete_shape(tensor, sizes), self.filler(tensor), tensor.dtype)
            for place, (call, row) in enumerate(repeated):
                values = call.feeds[tensor.name][row]
                axis = tensor.shape[-1]
                if axis in LENGTHS:
                    length = call.lengths[str(axis)][row]
                    whole[place, ..., :length] = values[..., :length]
                else:
                    whole[place] = values
            feeds[tensor.name] = whole
        found = self.session.run(self.names, feeds)
        for place, (call, row) in enumerate(rows):
            call.fill(self.spec.outputs, row, [values[place] for values in found])

    def filler(self, tensor: TensorSpec) -> int:
        return (
            self.runtime.config.get("pad_token_id") or 0 if tensor.name.endswith("input_ids") else 0
        )


class BatchingRuntime:
    """A replacement of `runtime`, a `Runtime`, for tasks that read full sequences. Its runs go
    through `reader`."""

    def __init__(self, runtime: Runtime, reader: Reader):
        self.runtime = runtime
        self.reader = reader
        # Tasks give so many rows at once as are worth a run: those of every worker, and of several
        # lengths.
        self.threads = 2 * len(reader.workers) * runtime.threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def outputs(
        self,
        input_ids: np.ndarray | None = None,
        attention_mask: np.ndarray | None = None,
        token_type_ids: np.ndarray | None = None,
        **inputs: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Return the outputs like `Runtime.outputs`. Raises TooLong as `Reader.read`."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            **inputs,
        }
        return self.reader.read(encoder_feeds(self.runtime.info, given))


def batched(runtime: Any, workers: int = 1, queue: int = QUEUE, **options: Any) -> Reader:
    """Make `runtime` read through a `Reader`, and return the reader. `runtime` is a `TextRuntime`
    or an `ImageRuntime` opened with the threads of one worker. The other arguments are those of
    `Reader`."""
    reader = Reader(runtime.runtime, workers, queue, **options)
    runtime.runtime = BatchingRuntime(runtime.runtime, reader)
    return reader


def ends(mask: np.ndarray) -> list[int]:
    """Return for each row of `mask` (B, ..., S) the length up to the last one, at least 1."""
    places = mask * np.arange(1, mask.shape[-1] + 1)
    return np.maximum(places.reshape(len(mask), -1).max(axis=1), 1).tolist()


# ------------------------------------------------------------------------------------------ company


def company(reader: Reader) -> tuple[int, int]:
    """Return the minimum and maximum number of rows for which the bits of a row do not depend on
    that number. It is measured, because kernels differ between machines."""
    fewest = 1
    for length in PROBED_LENGTHS:
        feeds = probe(reader, min(length, reader.positions), max(PROBED_ROWS))
        alone, doubled = (run_each(reader, feeds, copies) for copies in (1, 2))
        for rows in PROBED_ROWS:
            found = reader.session.run(
                reader.names, {name: values[:rows] for name, values in feeds.items()}
            )
            if same_bits(alone, found):
                continue
            if not same_bits(doubled, found):
                return 1, 1
            fewest = 2
    return fewest, 2**31


def run_each(reader: Reader, feeds: dict[str, np.ndarray], copies: int) -> list[list[np.ndarray]]:
    rows = len(next(iter(feeds.values())))
    return [
        [
            each[0]
            for each in reader.session.run(
                reader.names, {name: values[[row] * copies] for name, values in feeds.items()}
            )
        ]
        for row in range(rows)
    ]


def same_bits(rows: list[list[np.ndarray]], together: list[np.ndarray]) -> bool:
    return all(
        np.array_equal(rows[place][output], row)
        for output, values in enumerate(together)
        for place, row in enumerate(values)
    )


def probe(reader: Reader, length: int, rows: int) -> dict[str, np.ndarray]:
    """Return `rows` rows of `length` random tokens, or random images."""
    rng = np.random.default_rng(0)
    spec, config = reader.spec, reader.runtime.config
    sizes = {
        "batch_size": rows,
        "num_choices": 1,
        **dict.fromkeys(LENGTHS, length),
        **spec.example_sizes,
    }
    feeds: dict[str, np.ndarray | None] = {}
    for tensor in spec.inputs:
        shape = concrete_shape(tensor, sizes)
        if tensor.name.endswith("mask"):
            feeds[tensor.name] = np.ones(shape, np.int64)
        elif "float" in tensor.dtype:
            feeds[tensor.name] = rng.standard_normal(shape).astype(np.float32)
        else:
            lowest, highest = tensor.range or (0, 0)
            feeds[tensor.name] = found = rng.integers(lowest, highest + 1, shape)
            if tensor.name == "input_ids" and config.get("eos_token_id") is not None:
                found[..., -1] = np.ravel(config["eos_token_id"])[0]
    return check_inputs(spec.inputs, feeds, reader.runtime.architecture)
