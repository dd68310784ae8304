"""The engine: a queue of requests, and a worker for each batch. The caller's thread or a thread of
each worker drives them over the same step."""

import asyncio
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import RequestError, UsageError
from .capacity import open_batches
from .groups import start_request
from .inputs import Activity, Event, Generated, GenerationInput, Update, ignore_activity
from .limits import Admission, shutting_down
from .model import OnnxModel, open_for_workers
from .queue import Batch, ClientRequest, RequestQueue

# Seconds until a thread must release the GIL. A worker waits for the GIL after each run of a graph,
# and Python's default of 5 ms is longer than a step of a small model. Measured: 30 % more requests
# per second.
SWITCH_INTERVAL = 0.0002

Observe = Callable[[Activity], object]
Receive = Callable[[Update], object]


class Worker:
    """The steps of `batch`: parts of the requests in `queue` join it, get tokens and leave."""

    def __init__(self, queue: RequestQueue, batch: Batch):
        self.queue = queue
        self.batch = batch
        self.must_stop = False
        self.has_ended = threading.Event()  # `run` has returned, or raised
        self.joined_at = 0.0
        self.num_rows = 0  # rows of the last step; 0 while the batch is empty
        self.requests: set[ClientRequest] = set()  # of the parts in the batch
        self.has_first_tokens = True  # each of the requests has its first token
        self.is_changed = False  # parts joined or left in the last step

    @property
    def parts(self) -> list[Any]:
        """The parts in the batch."""
        return [*self.batch.running, *self.batch.prefilling]

    def run(self, observe: Observe = ignore_activity) -> None:
        """Step until the queue is closed and empty, or `must_stop` is true. `observe` is called
        after each step with what it did."""
        try:
            while not self.must_stop and (activity := self.step()) is not None:
                observe(activity)
        finally:
            self.has_ended.set()

    def step(self) -> Activity | None:
        """Let parts join, compute the next token of each row, and answer requests.

        While the batch is empty, wait for requests. Return what was done, or `None` once the queue
        is closed and empty, and the batch too. Errors of onnxruntime, such as out of memory, fail
        the requests of the batch; they are not raised.
        """
        may_join = self.queue.requests or not self.requests
        joining = self.queue.take(self.batch, self.joined_at) if may_join else []
        if joining is None:
            return None
        if self.is_changed and not may_join:  # else `take` has noted it
            self.queue.note_growth(self.batch)
        self.is_changed = bool(joining)
        rows, tokens, waits = 0, 0, self.note_joining(joining) if joining else []
        try:
            if joining or self.batch.prefilling:
                self.batch.join(joining)
            self.num_rows = self.batch.num_rows
            tokens, rows = self.batch.step(), self.num_rows
        except Exception as error:
            for request in self.requests:
                request.fail(engine_failure(error))
        first_tokens = [] if self.has_first_tokens else self.note_first_tokens()
        changed = [
            request for request in self.requests if request.is_changed or request.is_finished
        ]
        if self.batch.has_ended or any(request.is_finished for request in changed):
            self.remove_finished()
        for request in changed:
            request.answer()
        return Activity(waits, first_tokens, rows, tokens)

    def note_joining(self, parts: list[Any]) -> list[float]:
        """Return the seconds for which each of `parts`, which join now, has waited."""
        self.joined_at = time.perf_counter()
        self.requests |= {part.request for part in parts}
        self.has_first_tokens = False
        return [self.joined_at - part.request.arrived_at for part in parts]

    def note_first_tokens(self) -> list[float]:
        """Return the seconds until the first token of each request that has it since the last
        call."""
        started = {part.request for part in self.parts if part.has_started}
        first = [request for request in started if not request.has_started]
        for request in first:
            request.has_started = True
        self.has_first_tokens = all(request.has_started for request in self.requests)
        now = time.perf_counter()
        return [now - request.arrived_at for request in first]

    def remove_finished(self) -> None:
        """Remove finished parts, and parts of requests that failed or whose client left."""
        parts = self.parts
        finished = {request for request in {part.request for part in parts} if request.is_finished}
        self.batch.remove([part for part in parts if part.request in finished] if finished else [])
        self.is_changed = True
        self.requests = {part.request for part in self.parts}
        if not self.batch.running:
            self.num_rows = 0


def engine_failure(error: Exception) -> Exception:
    """Return the error of the requests of a batch whose step raised `error`.

    A UsageError says that memory is short, and stays as it is.
    """
    if isinstance(error, UsageError):
        return error
    failure = RuntimeError(f"the engine failed: {error}")
    failure.__cause__ = error
    return failure


class Engine:
    """A queue of requests, and a worker for each of `batches`.

    `run` and `stream` generate from the inputs of one call, after which the engine is closed. With
    `start`, threads of the workers compute the requests that `put` adds, until `close`.
    """

    def __init__(self, batches: Sequence[Batch]):
        self.queue = RequestQueue()
        self.workers = [Worker(self.queue, batch) for batch in batches]
        self.threads: list[threading.Thread] = []

    @classmethod
    def open(cls, admission: Admission, model: OnnxModel | None = None) -> "Engine":
        """Return an engine that generates within the limits of `admission`. It is not started.

        Args:
            admission: the limits, the numbers of workers and threads, and the export.
            model: the model with the threads of one worker, by default a new one. Its graphs are
                opened.

        Raises:
            UsageError: if the slots do not fit into memory.
            ValueError, OSError: if the export is damaged or cannot be run.
        """
        opened = model or open_for_workers(admission.info, admission.arrangement.threads)
        return cls(open_batches(admission, opened))

    # ---------------------------------------------------------------- driven by the caller's thread

    def run(self, inputs: Sequence[GenerationInput]) -> list[list[Generated]]:
        """Return the sequences of each of `inputs`, at least one. The longest start first.

        Several workers run in threads of their own, while the caller waits.

        Raises:
            UsageError: if a batch does not fit into memory.
            ValueError: if onnxruntime cannot compute the model, or logits decide no token.
            RequestError: if the engine is closed.
        """
        order = sorted(
            range(len(inputs)), key=lambda row: -len(inputs[row].source or inputs[row].prompt)
        )
        updates: list[Update] = []
        with contextlib.closing(self):
            self.put([inputs[row] for row in order], updates.append)
            self.queue.close()
            if len(self.workers) == 1:
                self.workers[0].run()
            else:
                self.start().join()
        results = read_results(updates[0])
        by_row = dict(zip(order, results, strict=True))
        return [by_row[row] for row in range(len(inputs))]

    def stream(self, inputs: Sequence[GenerationInput]) -> Iterator[np.ndarray]:
        """Yield the new token of each row, (rows,), after each step of greedy search or sampling.

        The only batch has room for all `inputs`. Rows that have ended get the fill token.
        """
        options, updates = inputs[0].options, deque[Update]()
        with contextlib.closing(self):
            self.put(inputs, updates.append, streams=True)
            self.queue.close()
            while self.workers[0].step() is not None:
                tokens = np.full(len(inputs) * options.num_return_sequences, options.fill_token_id)
                while updates:
                    update = updates.popleft()
                    if update.error is not None:
                        read_results(update)
                    for event in update.events:
                        tokens[event.index] = event.token
                yield tokens

    # --------------------------------------------------------------------- driven by worker threads

    @property
    def is_closed(self) -> bool:
        """True if no more requests are accepted."""
        return self.queue.is_closed

    @property
    def waiting(self) -> int:
        """The number of rows in the queue."""
        return self.queue.num_rows

    @property
    def running(self) -> int:
        """The number of rows that the batches computed in their last step.

        Rows that finished in that step count, because their slots are filled again before the next
        one.
        """
        return sum(worker.num_rows for worker in self.workers)

    def start(self, observe: Observe = ignore_activity) -> "Engine":
        """Start a thread for each worker. They call `observe` after each step with what was done,
        so it must be fast and thread-safe."""
        for worker in self.workers:
            run = functools.partial(worker.run, observe)
            self.threads.append(threading.Thread(target=run, name="worker", daemon=True))
            self.threads[-1].start()
        return self

    def join(self) -> None:
        """Wait until the threads of the workers have ended."""
        for worker, thread in zip(self.workers, self.threads):
            # Before Python 3.13 a `Thread.join` that Ctrl-C interrupts takes the thread for ended.
            # A step that runs when the process exits would abort it.
            worker.has_ended.wait()
            thread.join()

    def put(
        self, inputs: Sequence[GenerationInput], receive: Receive, streams: bool = False
    ) -> Callable[[], None]:
        """Add a request that generates from `inputs`, and return a function that cancels it. The
        other arguments are those of `ClientRequest`.

        Raises:
            RequestError: 503 after `close`.
        """
        request = start_request(inputs, receive, streams)
        self.queue.put(request)
        return functools.partial(self.queue.cancel, request)

    def close(self) -> None:
        """Accept no more requests, fail those that are not finished with a RequestError, and free
        the memory of the batches. Closing again changes nothing."""
        for worker in self.workers:
            worker.must_stop = True
        self.queue.close()
        requests = {*self.queue.clear()}
        self.join()
        for worker in self.workers:
            requests |= {part.request for part in worker.parts}
            worker.batch.remove(worker.parts)
        for request in requests:
            request.fail(shutting_down())
            request.answer()
        self.workers.clear()


def read_results(update: Update) -> list[list[Generated]]:
    """Return the results of the last update of a call, or raise what stopped it, such as an error
    of onnxruntime."""
    try:
        return update.read_results()
    except RuntimeError as failure:
        raise failure.__cause__ or failure from None


# ------------------------------------------------------------------------------------------ clients


# Small requests, of at most this number of rows, may exceed the limit of waiting rows by a share,
# so that long lists of texts do not exclude all others.
SMALL_ROWS, SMALL_SHARE = 16, 8


class Room:
    """The rows of unanswered requests, and the room for more.

    Args:
        max_waiting: the maximum number of rows that wait. An empty queue accepts any number.
    """

    def __init__(self, max_waiting: int):
        self.max_waiting = max_waiting
        self.num_rows = 0
        self.num_small = 0  # rows of requests of at most `SMALL_ROWS`

    @contextlib.contextmanager
    def hold(
        self, num_rows: int, num_waiting: int | None = None, state: str = "waiting"
    ) -> Iterator[None]:
        """Count the rows of a request until the end of the context, when it is answered.

        A small request is accepted while the small ones have less than a share of `max_waiting`.

        Args:
            num_rows: the number of its rows.
            num_waiting: the number of rows that wait, by default those of all unanswered requests.
            state: what these rows do.

        Raises:
            RequestError: 429 if the queue has no room.
        """
        num_waiting = self.num_rows if num_waiting is None else num_waiting
        num_small = num_rows if num_rows <= SMALL_ROWS else 0
        has_share = num_small and self.num_small + num_rows <= self.max_waiting // SMALL_SHARE
        if num_waiting and num_waiting + num_rows > self.max_waiting and not has_share:
            raise overloaded(num_waiting, num_rows, self.max_waiting, state)
        self.num_rows += num_rows
        self.num_small += num_small
        try:
            yield
        finally:
            self.num_rows -= num_rows
            self.num_small -= num_small


def overloaded(
    num_waiting: int, num_rows: int, max_waiting: int, state: str = "waiting"
) -> RequestError:
    """Return the error, status 429, of a request for which the queue has no room.

    `num_waiting` rows are waiting, or in another `state`. The request has `num_rows`. Both together
    may be `max_waiting`.
    """
    return RequestError(
        429,
        f"{num_waiting} rows are {state} and this request has {num_rows}, expected at most "
        f"{max_waiting} together: try again later",
        retry_after=1,
    )


class ClientEngine(Protocol):
    """The part of an `Engine` that clients use. It runs in this process or in another one."""

    @property
    def is_closed(self) -> bool: ...

    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...

    def start(self, observe: Observe) -> object: ...

    def put(
        self, inputs: Sequence[GenerationInput], receive: Receive, streams: bool
    ) -> Callable[[], None]: ...

    def close(self) -> None: ...


class Client:
    """The requests of one export, in any event loop.

    Args:
        admission: the limits of the export.
        engine: computes the requests, in this process or in another one; `start` starts it.
    """

    def __init__(self, admission: Admission, engine: ClientEngine):
        self.admission = admission
        self.engine = engine
        self.room = Room(admission.max_waiting)

    def start(self, observe: Observe = ignore_activity) -> "Client":
        """Start the engine. `observe` gets what its workers do, for metrics."""
        self.engine.start(observe)
        return self

    async def generate(self, inputs: Sequence[GenerationInput]) -> list[list[Generated]]:
        """Return the `num_return_sequences` sequences of each of `inputs`.

        Those of beam search are sorted, best first. Samples are in the order of their numbers.
        Cancelling the coroutine stops the generation.

        Raises:
            RequestError: if the queue is full or the server is shutting down.
            Exception: what stopped the generation, such as a RuntimeError of the engine.
        """
        if not inputs:
            return []
        with self.request(inputs) as updates:
            return (await updates.get()).read_results()

    async def stream(
        self, generation_input: GenerationInput, results: list[Generated] | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield an event for each new token of all sequences. Closing the generator stops the
        generation. The complete sequences are added to `results` at the end.

        Raises:
            RequestError: if the queue is full or the server is shutting down.
            UsageError: for beam search, which cannot stream.
            Exception: what stopped the generation, such as a RuntimeError of the engine.
        """
        if (num_beams := generation_input.options.num_beams) > 1:
            raise UsageError(f"num_beams is {num_beams}, which cannot stream: expected num_beams=1")
        with self.request([generation_input], streams=True) as updates:
            is_last = False
            while not is_last:
                update = await updates.get()
                is_last = update.is_last
                for event in update.events:
                    yield event
            [sequences] = update.read_results()  # which raises the error, if there is one
            if results is not None:
                results += sequences

    @contextlib.contextmanager
    def request(
        self, inputs: Sequence[GenerationInput], streams: bool = False
    ) -> Iterator[asyncio.Queue[Update]]:
        """Put a request into the queue of the engine, and yield the queue of its updates.

        It is cancelled at the end of the context, if it is not answered then. It gets an update
        after each step if it `streams`, else a single one.
        """
        if self.engine.is_closed:
            raise shutting_down()
        updates: asyncio.Queue[Update] = asyncio.Queue()
        receive = functools.partial(put_in_loop, asyncio.get_running_loop(), updates)
        with self.room.hold(sum(row.num_rows for row in inputs), self.engine.waiting):
            cancel = self.engine.put(inputs, receive, streams)
            try:
                yield updates
            finally:
                cancel()

    def close(self) -> None:
        """Accept no more requests and fail those that are not answered with a RequestError: the
        server is shutting down."""
        self.engine.close()


def put_in_loop(
    loop: asyncio.AbstractEventLoop, updates: asyncio.Queue[Update], update: Update
) -> None:
    """Put `update` into the queue `updates` of a client in `loop`, from any thread."""
    with contextlib.suppress(RuntimeError):  # there is no loop in this thread, or it is closed
        if asyncio.get_running_loop() is loop:
            return updates.put_nowait(update)
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(updates.put_nowait, update)
