"""Clients of a scheduler: `LocalScheduler` in this process, `process.SchedulerClient` for a child
process."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from ..errors import UsageError
from ..model import OnnxModel
from .admission import Admission
from .queue import Ticket
from .request import Event, Generated, Job
from .scheduler import Scheduler, open_batches
from .worker import NoEvents, SchedulerEvents


class Client(Protocol):
    """A scheduler of one export, in this process or in another."""

    admission: Admission

    @property
    def waiting(self) -> int:
        """Rows in the queue."""

    @property
    def running(self) -> int:
        """Rows that the workers ran in their last step."""

    async def generate(self, jobs: Sequence[Job]) -> list[list[Generated]]:
        """Like `generated`."""

    def stream(self, job: Job) -> AsyncGenerator[Event, None]:
        """Like `streamed`."""

    def put(self, ticket: Ticket) -> None:
        """Send a request. Raise RequestError if too many rows wait, and after `close`."""

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request that nobody waits for."""

    def close(self, seconds: float = 0.0) -> bool:
        """Like `Scheduler.close`."""


class LocalScheduler:
    """The `Client` of a scheduler in this process, which runs `model` in threads."""

    def __init__(
        self, admission: Admission, model: OnnxModel, events: SchedulerEvents | None = None
    ):
        self.admission = admission
        self.scheduler = Scheduler(open_batches(admission, model), events or NoEvents())

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return self.scheduler.waiting

    @property
    def running(self) -> int:
        """Rows that the workers ran in their last step."""
        return self.scheduler.running

    def start(self) -> "LocalScheduler":
        self.scheduler.start()
        return self

    async def generate(self, jobs: Sequence[Job]) -> list[list[Generated]]:
        return await generated(self, jobs)

    def stream(self, job: Job) -> AsyncGenerator[Event, None]:
        return streamed(self, job)

    def put(self, ticket: Ticket) -> None:
        if not self.scheduler.queue.is_closed:
            self.admission.check_queue(self.waiting, ticket.rows_waiting)
        self.scheduler.put(ticket)

    def cancel(self, ticket: Ticket) -> None:
        self.scheduler.cancel(ticket)

    def close(self, seconds: float = 0.0) -> bool:
        return self.scheduler.close(seconds)

    def run(self, jobs: Sequence[Job], are_last: bool = False) -> list[list[Generated]]:
        """Like `generate`, but block this thread. With `are_last`, accept no more requests."""
        done = threading.Event()
        ticket = Ticket(jobs, lambda events, is_over: done.set())
        self.put(ticket)
        if are_last:
            self.scheduler.end()
        done.wait()
        if ticket.error is not None:
            raise ticket.error
        return ticket.answers


async def generated(scheduler: Client, jobs: Sequence[Job]) -> list[list[Generated]]:
    """Return the `num_return_sequences` answers of each job, best first. Cancelling stops the
    generation.

    Raises:
        RequestError: if the queue is full or the server is shutting down.
    """
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def receive(events: list[Event], is_over: bool) -> None:
        if not future.done():
            future.set_result(None)

    ticket = put(scheduler, Ticket(jobs, receive), loop)
    try:
        await future
    finally:
        scheduler.cancel(ticket)
    if ticket.error is not None:
        raise ticket.error
    return ticket.answers


async def streamed(scheduler: Client, job: Job) -> AsyncGenerator[Event, None]:
    """Yield the tokens of all answers as they are generated. Closing the generator stops the
    generation.

    Raises:
        RequestError: as in `generated`.
        UsageError: for beam search.
    """
    if job.options.num_beams > 1:
        raise UsageError(
            f"num_beams is {job.options.num_beams}, which cannot stream: expected num_beams=1"
        )
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[tuple[list[Event], bool]] = asyncio.Queue()
    ticket = put(scheduler, Ticket([job], lambda *each: news.put_nowait(each), streams=True), loop)
    try:
        is_over = False
        while not is_over:
            events, is_over = await news.get()
            for event in events:
                yield event
        if ticket.error is not None:
            raise ticket.error
    finally:
        scheduler.cancel(ticket)


def put(scheduler: Client, ticket: Ticket, loop: asyncio.AbstractEventLoop) -> Ticket:
    """Send a request and return it. Its events are received in `loop`."""
    ticket.call = loop.call_soon_threadsafe
    scheduler.put(ticket)
    return ticket
