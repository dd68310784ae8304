"""Clients of a scheduler: `LocalScheduler` in this process, `process.SchedulerClient` for a child
process."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from ..errors import UsageError
from ..model import OnnxModel
from .admission import Admission
from .client_request import ClientRequest
from .engine import Scheduler, open_batches
from .groups import read_results, start_request
from .request import Event, Generated, GenerationInput
from .worker import NoEvents, SchedulerEvents


class Client(Protocol):
    """A scheduler of one export, in this process or in a child process.

    `generate` and `stream` put a request into its queue and await the results.
    """

    admission: Admission

    @property
    def waiting(self) -> int:
        """The number of rows in the queue."""

    @property
    def running(self) -> int:
        """The number of rows that the workers computed in their last step."""

    def put(self, request: ClientRequest) -> None:
        """Add a request to the queue.

        Raises:
            RequestError: 429 if too many rows wait, 503 after `close`.
        """

    def cancel(self, request: ClientRequest) -> None:
        """Stop a request that nobody waits for, and drop its rows."""

    def close(self, seconds: float = 0.0) -> bool:
        """Accept no more requests and wait up to `seconds` for the others.

        Those that are not finished then fail with RequestError. Return True if all were finished.
        The client of a child process does not wait.
        """

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
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def receive(events: list[Event], is_finished: bool) -> None:
            if not future.done():
                future.set_result(None)

        request = start_request(inputs, receive)
        request.call = loop.call_soon_threadsafe
        self.put(request)
        try:
            await future
        finally:
            self.cancel(request)
        if request.error is not None:
            raise request.error
        return read_results(request)

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
        updates: asyncio.Queue[tuple[list[Event], bool]] = asyncio.Queue()
        request = start_request(
            [generation_input], lambda *update: updates.put_nowait(update), streams=True
        )
        request.call = asyncio.get_running_loop().call_soon_threadsafe
        self.put(request)
        try:
            is_finished = False
            while not is_finished:
                events, is_finished = await updates.get()
                for event in events:
                    yield event
            if request.error is not None:
                raise request.error
        finally:
            self.cancel(request)


class LocalScheduler(Client):
    """A scheduler in this process, which runs `model` in threads.

    `events` gets the events of the workers, for metrics. Call `start` first.
    """

    def __init__(
        self, admission: Admission, model: OnnxModel, events: SchedulerEvents | None = None
    ):
        self.admission = admission
        self.scheduler = Scheduler(open_batches(admission, model), events or NoEvents())

    @property
    def waiting(self) -> int:
        return self.scheduler.waiting

    @property
    def running(self) -> int:
        return self.scheduler.running

    def start(self) -> "LocalScheduler":
        self.scheduler.start()
        return self

    def put(self, request: ClientRequest) -> None:
        if not self.scheduler.queue.is_closed:
            others = list(self.scheduler.queue.requests)
            self.admission.check_queue(self.waiting, request, others)
        self.scheduler.put(request)

    def cancel(self, request: ClientRequest) -> None:
        self.scheduler.cancel(request)

    def close(self, seconds: float = 0.0) -> bool:
        return self.scheduler.close(seconds)

    def run(
        self, inputs: Sequence[GenerationInput], are_last: bool = False
    ) -> list[list[Generated]]:
        """Block until all `inputs` are generated, and return the sequences of each.

        Those of beam search are sorted, best first. Samples are in the order of their numbers. With
        `are_last`, the scheduler accepts no more requests after these.

        Raises:
            RequestError: if the queue is full or the scheduler accepts no more requests.
            Exception: what stopped the generation, such as a RuntimeError of the engine.
        """
        if not inputs:
            return []
        done = threading.Event()
        request = start_request(inputs, lambda events, is_finished: done.set())
        self.put(request)
        if are_last:
            self.scheduler.end()
        done.wait()
        if request.error is not None:
            raise request.error
        return read_results(request)
