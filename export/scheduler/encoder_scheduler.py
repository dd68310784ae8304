"""The scheduler of a model that reads full sequences, for many threads at once."""

import asyncio
import contextvars
import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from ..errors import TooLong
from ..model import OnnxModel
from .capacity import Arrangement
from .client_request import ClientRequest
from .encoder_batch import EncoderBatch, EncoderGraph, EncoderInputs
from .engine import Engine
from .rejections import SMALL_ROWS, check_room, shutting_down
from .request import Activity, Update, ignore_activity

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
        observe: Callable[[Activity], None] = ignore_activity,
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
        self.calls: dict[int, Updates] = {}
        self.numbers = itertools.count()
        self.pool = ThreadPoolExecutor(max_calls, "encoder call")
        self.engine = Engine(batches).start(self.report, observe)

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
        is_small = num_rows <= SMALL_ROWS
        limit, state = self.max_waiting, "waiting or running"
        check_room(self.num_unanswered, num_rows, limit, self.num_small, state)
        call, context = Updates(), contextvars.copy_context()
        context.run(CALL.set, call)
        self.num_unanswered += num_rows
        self.num_small += num_rows * is_small
        try:
            work = functools.partial(context.run, function, *args, **options)
            return await asyncio.get_running_loop().run_in_executor(self.pool, work)
        except asyncio.CancelledError:
            call.put(None)
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
        call, number = CALL.get(None) or Updates(), next(self.numbers)
        self.calls[number] = call
        try:
            self.engine.add(ClientRequest(self.graph.rows(inputs), number))
            update = call.get()
        finally:
            del self.calls[number]
            self.engine.cancel(number)
        if update is None:
            raise Disconnected
        if update.error is not None:
            raise update.error
        return inputs.outputs

    def report(self, updates: list[Update]) -> None:
        """Give `updates` to the threads that wait for them."""
        for update in updates:
            if (call := self.calls.get(update.number)) is not None:
                call.put(update)

    def close(self) -> None:
        """Accept no more calls. Rows that are in the queue are still run; a call whose rows are not
        in it yet raises RequestError."""
        self.engine.end()
        self.pool.shutdown(wait=False)
