"""The scheduler of a model that reads full sequences, for many threads at once."""

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ..errors import TooLong
from ..model import OnnxModel
from .capacity import Arrangement
from .client_request import ClientRequest
from .encoder_batch import EncoderBatch, EncoderGraph, EncoderInputs
from .engine import Scheduler
from .rejections import SMALL_ROWS, check_room, shutting_down
from .worker import NoEvents, SchedulerEvents

MAX_WAITING = 256  # rows
MAX_CALLS = 64  # calls at once: their texts are tokenized, and answers made of the outputs
Result = TypeVar("Result")


class Disconnected(Exception):
    """Raised in the thread of a request whose client has left."""


class Call:
    """One call of `EncoderScheduler.call`, which can be cancelled while its thread waits."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.request: ClientRequest | None = None
        self.is_done = threading.Event()  # for the request

    def cancel(self, scheduler: Scheduler) -> None:
        self.is_cancelled = True
        if self.request is not None:
            scheduler.cancel(self.request)
        self.is_done.set()


CALL: contextvars.ContextVar[Call] = contextvars.ContextVar("call")


class EncoderScheduler:
    """Dynamic batching of an encoder: threads ask for rows, and workers run rows of several
    together.

    Args:
        model: opened with as many threads as a worker shall have.
        workers: the number of threads that run the graph; they share its session.
        max_waiting: the maximum number of rows of unanswered calls, unless one call alone has more.
        max_source: the maximum number of tokens of a row; by default the model's positions.
        events: gets the events of the workers, for metrics.
        max_calls: the maximum number of calls at once; others wait.
    """

    def __init__(
        self,
        model: OnnxModel,
        workers: int = 1,
        max_waiting: int = MAX_WAITING,
        max_source: int | None = None,
        events: SchedulerEvents | None = None,
        max_calls: int = MAX_CALLS,
    ):
        self.graph = EncoderGraph(model)
        self.arrangement = Arrangement(workers, model.threads)
        positions = model.info.config.get("max_position_embeddings")
        self.max_length = min(max_source or 2**31, positions or 2**31)
        self.max_waiting = max_waiting
        self.num_unanswered = 0  # rows of calls
        self.num_small = 0  # those of small calls
        batches: list[EncoderBatch] = []
        for _ in range(workers):
            EncoderBatch(self.graph, batches)
        self.scheduler = Scheduler(batches, events or NoEvents())
        self.pool = ThreadPoolExecutor(max_calls, "encoder call")
        self.scheduler.start()

    def describe(self) -> str:
        """Return one line about the batches and workers, for the log."""
        is_alone = self.graph.max_rows == 1
        alone = " one row at a time (its rows depend on each other)," if is_alone else ""
        return f"dynamic batches,{alone} {self.arrangement}"

    @property
    def waiting(self) -> int:
        """The number of rows in the queue."""
        return self.scheduler.waiting

    @property
    def running(self) -> int:
        """The number of rows that run now."""
        return self.scheduler.running

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
        if self.scheduler.queue.is_closed:
            raise shutting_down()
        is_small = num_rows <= SMALL_ROWS
        limit, state = self.max_waiting, "waiting or running"
        check_room(self.num_unanswered, num_rows, limit, self.num_small, state)
        call, context = Call(), contextvars.copy_context()
        context.run(CALL.set, call)
        self.num_unanswered += num_rows
        self.num_small += num_rows * is_small
        try:
            work = functools.partial(context.run, function, *args, **options)
            return await asyncio.get_running_loop().run_in_executor(self.pool, work)
        except asyncio.CancelledError:
            call.cancel(self.scheduler)
            raise
        finally:
            self.num_unanswered -= num_rows
            self.num_small -= num_rows * is_small

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return `{output: array}` for `feeds`, the inputs that `requests.encoder_feeds` returns.

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
        call = CALL.get(None) or Call()
        call.is_done.clear()
        rows = self.graph.rows(inputs)
        request = ClientRequest(rows, lambda events, is_finished: call.is_done.set())
        call.request = request
        if call.is_cancelled:
            raise Disconnected
        self.scheduler.put(request)
        if call.is_cancelled:  # in between
            self.scheduler.cancel(request)
        else:
            call.is_done.wait()
        if call.is_cancelled:
            raise Disconnected
        if request.error is not None:
            raise request.error
        return inputs.outputs

    def close(self) -> None:
        """Accept no more calls. Rows that are in the queue are still run; a call whose rows are not
        in it yet raises RequestError."""
        self.scheduler.end()
        self.pool.shutdown(wait=False)
