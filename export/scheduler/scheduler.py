"""The scheduler: one queue, workers, and their batches."""

import time
from collections.abc import Sequence

from ..errors import UsageError
from ..model import OnnxModel
from .admission import Admission
from .queue import Queue, Ticket
from .slot_batch import Batch, SlotBatch
from .static_batch import WholeBatch
from .worker import SchedulerEvents, Worker


class Scheduler:
    """One queue of requests, and a worker for each of `batches`. A worker moves sequences of the
    queue into its batch, steps the batch, and tells what came of it."""

    def __init__(self, batches: Sequence[Batch], events: SchedulerEvents):
        self.queue = Queue()
        self.workers = [Worker(self.queue, batch, events) for batch in batches]

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return self.queue.rows

    @property
    def running(self) -> int:
        """Rows that the batches ran in their last step. When one has ended, its slot is free for
        less time than a step takes, so it counts."""
        return sum(worker.rows for worker in self.workers)

    def start(self) -> None:
        for worker in self.workers:
            worker.thread.start()

    def put(self, ticket: Ticket) -> None:
        """Add a request to the queue. Raise RequestError after `end`."""
        self.queue.put(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request that nobody waits for. What of it runs leaves after the next step."""
        self.queue.cancel(ticket)

    def end(self) -> None:
        """Take no more requests."""
        self.queue.close()

    def close(self, seconds: float) -> bool:
        """Take no more requests and finish those that run, for at most `seconds`. What is left then
        fails with RequestError.

        Return whether all requests were finished."""
        self.queue.close()
        until = time.monotonic() + seconds
        for worker in self.workers:
            worker.thread.join(max(0.0, until - time.monotonic()))
        finished = not any(worker.thread.is_alive() for worker in self.workers)
        for worker in self.workers:
            worker.gives_up = True
        self.queue.wake()
        for worker in self.workers:
            worker.thread.join()
        return finished


def open_batches(admission: Admission, model: OnnxModel) -> list[Batch]:
    """Return an empty batch for each worker.

    Raises:
        UsageError: for slots that there is no memory for.
    """
    try:
        return [batch_of(admission, model) for _ in range(admission.arrangement.workers)]
    except MemoryError:
        found = f"no memory for {admission.slots} slots of {admission.describe_room()}"
        raise UsageError(
            f"{found}: expected fewer slots, or a smaller max_source or max_length"
        ) from None


def batch_of(admission: Admission, model: OnnxModel) -> Batch:
    """Return an empty batch: of slots, if the export has a step."""
    if model.info.step is not None:
        return SlotBatch(model, admission.room)
    return WholeBatch(model, admission.room.rows)
