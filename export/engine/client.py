"""The client of an engine: it puts requests into the queue and awaits their results."""

import asyncio
import contextlib
import itertools
import queue
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from ..errors import UsageError
from .inputs import Activity, Event, Generated, GenerationInput, Update, ignore_activity
from .limits import SMALL_ROWS, Admission, check_room, shutting_down

Report = Callable[[list[Update]], None]
Observe = Callable[[Activity], None]


class ClientEngine(Protocol):
    """The part of an `Engine` that clients use. It runs in this process or in another one."""

    @property
    def is_closed(self) -> bool:
        """True if no more requests are accepted."""

    @property
    def waiting(self) -> int:
        """The number of rows in the queue."""

    @property
    def running(self) -> int:
        """The number of rows that the workers computed in their last step."""

    def start(self, report: Report, observe: Observe) -> object:
        """Run requests. After each step, call `report` with what is new of them, and `observe` with
        what was done."""

    def put(
        self, number: int, inputs: Sequence[GenerationInput], streams: bool, arrived_at: float
    ) -> None:
        """Add a request to the queue. `arrived_at` is a time of `time.perf_counter`."""

    def cancel(self, number: int) -> None:
        """Drop the rows of a request, unless it is finished."""

    def end(self) -> None:
        """Accept no more requests. The others are still finished, without waiting here."""

    def close(self) -> None:
        """Accept no more requests and compute none of the others any further."""


class Pending(NamedTuple):
    """A request that is not answered yet.

    Args:
        num_rows: its number of rows.
        loop: the event loop of its client, None for a client in a thread that waits.
        receive: takes its updates, in `loop` if there is one.
    """

    num_rows: int
    loop: asyncio.AbstractEventLoop | None
    receive: Callable[[Update], None]


class Client:
    """The requests of one export, in any event loop or thread.

    Args:
        admission: the limits of the export.
        engine: runs the requests; `start` starts it.
    """

    def __init__(self, admission: Admission, engine: ClientEngine):
        self.admission = admission
        self.engine = engine
        self.pending: dict[int, Pending] = {}
        self.numbers = itertools.count()

    def start(self, observe: Observe = ignore_activity) -> "Client":
        """Start the engine. `observe` gets what its workers do, for metrics."""
        self.engine.start(self.report, observe)
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
        updates: asyncio.Queue[Update] = asyncio.Queue()
        with self.request(inputs, False, asyncio.get_running_loop(), updates.put_nowait):
            return (await updates.get()).read_results()

    async def stream(self, generation_input: GenerationInput) -> AsyncGenerator[Event, None]:
        """Yield an event for each new token of all sequences. Closing the generator stops the
        generation.

        Raises:
            RequestError: if the queue is full or the server is shutting down.
            UsageError: for beam search, which cannot stream.
            Exception: what stopped the generation, such as a RuntimeError of the engine.
        """
        if (num_beams := generation_input.options.num_beams) > 1:
            raise UsageError(f"num_beams is {num_beams}, which cannot stream: expected num_beams=1")
        updates: asyncio.Queue[Update] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        with self.request([generation_input], True, loop, updates.put_nowait):
            is_last = False
            while not is_last:
                update = await updates.get()
                is_last = update.is_last
                for event in update.events:
                    yield event
            update.read_results()  # raises the error, if there is one

    def run(
        self, inputs: Sequence[GenerationInput], are_last: bool = False
    ) -> list[list[Generated]]:
        """Block until all `inputs` are generated, and return what `generate` returns.

        With `are_last`, the engine accepts no more requests after these.

        Raises:
            RequestError: if the queue is full or the engine accepts no more requests.
            Exception: what stopped the generation, for example an error of onnxruntime.
        """
        if not inputs:
            return []
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        with self.request(inputs, False, None, updates.put):
            if are_last:
                self.engine.end()
            try:
                return updates.get().read_results()
            except RuntimeError as failure:
                raise failure.__cause__ or failure from None

    @contextlib.contextmanager
    def request(
        self,
        inputs: Sequence[GenerationInput],
        streams: bool,
        loop: asyncio.AbstractEventLoop | None,
        receive: Callable[[Update], None],
    ) -> Iterator[None]:
        """Put a request into the queue. It is cancelled at the end of the context, if it is not
        answered then.

        Args:
            inputs: the checked inputs, which are answered together.
            streams: True for an update after each step, False for a single one.
            loop: the event loop of the client, None for a client in a thread that waits.
            receive: takes the updates, in `loop` if there is one.
        """
        if self.engine.is_closed:
            raise shutting_down()
        pending = Pending(sum(row.num_rows for row in inputs), loop, receive)
        unanswered = [other.num_rows for other in list(self.pending.values())]
        num_small = sum(rows for rows in unanswered if rows <= SMALL_ROWS)
        check_room(self.engine.waiting, pending.num_rows, self.admission.max_waiting, num_small)
        number = next(self.numbers)
        self.pending[number] = pending
        try:
            self.engine.put(number, inputs, streams, time.perf_counter())
            yield
        finally:
            if self.pending.pop(number, None) is not None:
                self.engine.cancel(number)

    def report(self, updates: list[Update]) -> None:
        """Give `updates` to the clients of their requests, in any thread."""
        by_loop: dict[asyncio.AbstractEventLoop | None, list[Update]] = {}
        for update in updates:
            if (pending := self.pending.get(update.number)) is not None:
                by_loop.setdefault(pending.loop, []).append(update)
        for loop, of_loop in by_loop.items():
            if loop in (None, running_loop()):
                self.receive(of_loop)
            else:
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    loop.call_soon_threadsafe(self.receive, of_loop)

    def receive(self, updates: list[Update]) -> None:
        """Give `updates` to the clients of their requests, in their event loop or thread."""
        for update in updates:
            forget = self.pending.pop if update.is_last else self.pending.get
            if (pending := forget(update.number, None)) is not None:  # else it was cancelled
                pending.receive(update)

    def close(self) -> None:
        """Accept no more requests and fail those that are not answered with a RequestError: the
        server is shutting down."""
        self.engine.close()
        self.report([Update(number, [], None, shutting_down()) for number in list(self.pending)])


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None
