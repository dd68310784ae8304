"""Generates for many requests at once."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence

from ..errors import UsageError
from ..model import OnnxModel
from .admission import Admission
from .queue import Queue, Ticket
from .request import Event, Generated, Job
from .slot_batch import Batch, SlotBatch
from .worker import EngineEvents, NoEvents, ThreadWorkers, Workers


class Engine:
    """Generates what `admission` has checked, in `workers`: threads of this process, or those of
    another one."""

    def __init__(self, admission: Admission, workers: Workers):
        self.admission = admission
        self.workers = workers

    @classmethod
    def of(
        cls,
        admission: Admission,
        model: OnnxModel,
        max_waiting: int = 256,
        events: EngineEvents | None = None,
    ) -> "Engine":
        """Return an engine whose workers are threads that run `model`, in whose queue
        `max_waiting` rows may wait.

        Raises:
            UsageError: for slots that there is no memory for.
        """
        try:
            batches = [batch_of(admission, model) for _ in range(admission.arrangement.workers)]
        except MemoryError:
            found = f"no memory for {admission.slots} slots of {admission.describe_room()}"
            raise UsageError(
                f"{found}: expected fewer slots, or a smaller max_source or max_length"
            ) from None
        return cls(admission, ThreadWorkers(Queue(max_waiting), batches, events or NoEvents()))

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return self.workers.waiting

    @property
    def running(self) -> int:
        """Rows of all workers."""
        return self.workers.running

    # ------------------------------------------------------------------------------------- requests

    def start(self) -> "Engine":
        self.workers.start()
        return self

    async def answers(self, jobs: Sequence[Job]) -> list[list[Generated]]:
        """Of each job the `num_return_sequences` answers, best first. Cancelled, it leaves nothing
        running.

        Raises:
            RequestError: if the queue is full, or the server is shutting down.
        """
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def receive(events: list[Event], is_over: bool) -> None:
            if not future.done():
                future.set_result(None)

        ticket = self.put(Ticket(jobs, receive), loop)
        try:
            await future
        finally:
            self.workers.cancel(ticket)
        if ticket.error is not None:
            raise ticket.error
        return ticket.answers

    async def stream(self, job: Job) -> AsyncGenerator[Event, None]:
        """The tokens of each of the answers, as they come. Closed early, it leaves nothing running.
        Raises as `answers`, and UsageError for beams, before the first."""
        if job.options.num_beams > 1:
            raise UsageError(
                f"num_beams is {job.options.num_beams}, which cannot stream: expected num_beams=1"
            )
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[tuple[list[Event], bool]] = asyncio.Queue()
        ticket = self.put(Ticket([job], lambda *each: news.put_nowait(each), streams=True), loop)
        try:
            is_over = False
            while not is_over:
                events, is_over = await news.get()
                for event in events:
                    yield event
            if ticket.error is not None:
                raise ticket.error
        finally:
            self.workers.cancel(ticket)

    def put(self, ticket: Ticket, loop: asyncio.AbstractEventLoop | None = None) -> Ticket:
        """Into the queue. What receives it is called in `loop`, or by a worker."""
        if loop is not None:
            ticket.call = loop.call_soon_threadsafe
        self.workers.put(ticket)
        return ticket

    def generate(self, jobs: Sequence[Job], are_last: bool = False) -> list[list[Generated]]:
        """As `answers`, without a loop: waits for them. If they `are_last`, nothing more is taken
        in."""
        done = threading.Event()
        ticket = self.put(Ticket(jobs, lambda events, is_over: done.set()))
        if are_last:
            self.workers.end()
        done.wait()
        if ticket.error is not None:
            raise ticket.error
        return ticket.answers

    def close(self, seconds: float = 0.0) -> bool:
        """Take no more jobs and finish those that run, for at most `seconds`. What is left then
        fails with RequestError.

        Return whether all jobs were finished."""
        return self.workers.close(seconds)


def batch_of(admission: Admission, model: OnnxModel) -> Batch:
    """Return an empty batch: of slots, if the export has a step."""
    if model.info.step is not None:
        return SlotBatch(model, admission.room)
    from .static_batch import WholeBatch

    return WholeBatch(model, admission.room.rows)
