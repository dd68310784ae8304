"""The scheduler: a queue, its workers and their batches."""

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
    """A queue of requests, and a worker for each of `batches`. A worker moves sequences from the
    queue into its batch, steps the batch and reports the results."""

    def __init__(self, batches: Sequence[Batch], events: SchedulerEvents):
        self.queue = Queue()
        self.workers = [Worker(self.queue, batch, events) for batch in batches]

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return self.queue.rows

    @property
    def running(self) -> int:
        """Rows that the batches ran in their last step. Rows that finished in that step count,
        because their slots are filled again before the next one."""
        return sum(worker.rows for worker in self.workers)

    def start(self) -> None:
        for worker in self.workers:
            worker.thread.start()

    def put(self, ticket: Ticket) -> None:
        """Add a request to the queue. Raise RequestError after `end`."""
        self.queue.put(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request. Its running sequences are removed after the current step."""
        self.queue.cancel(ticket)

    def end(self) -> None:
        """Accept no more requests."""
        self.queue.close()

    def close(self, seconds: float) -> bool:
        """Accept no more requests and wait up to `seconds` for the running ones. Unfinished
        requests fail with RequestError.

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
        UsageError: if the slots do not fit into memory.
    """
    try:
        return [batch_of(admission, model) for _ in range(admission.arrangement.workers)]
    except MemoryError:
        found = f"no memory for {admission.slots} slots of {admission.describe_room()}"
        raise UsageError(
            f"{found}: expected fewer slots, or a smaller max_source or max_length"
        ) from None


def batch_of(admission: Admission, model: OnnxModel) -> Batch:
    """Return an empty `SlotBatch` if the export has a step graph, else an empty `WholeBatch`."""
    if model.info.step is not None:
        return SlotBatch(model, admission.room)
    return WholeBatch(model, admission.room.rows)
