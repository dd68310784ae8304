"""The scheduler: a queue, its workers and their batches."""

import dataclasses
import time
from collections.abc import Sequence
from typing import cast

from ..errors import UsageError
from ..inference.rows import JoiningRowsFactory
from ..model import OnnxModel, main_roles
from .admission import Admission
from .batch import Batch
from .capacity import Pace, spare_rows
from .client_request import ClientRequest
from .generation_batch import GenerationBatch
from .queue import RequestQueue
from .worker import SchedulerEvents, Worker


class Scheduler:
    """A queue of requests, and a worker thread for each of `batches`.

    A worker moves parts of requests from the queue into its batch, computes the batch step by step
    and reports the results. `events` gets the events of the workers, for metrics.
    """

    def __init__(self, batches: Sequence[Batch], events: SchedulerEvents):
        self.queue = RequestQueue()
        self.workers = [Worker(self.queue, batch, events) for batch in batches]

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

    def start(self) -> None:
        for worker in self.workers:
            worker.thread.start()

    def put(self, request: ClientRequest) -> None:
        """Add a request to the queue.

        Raises:
            RequestError: 503 after `end` or `close`.
        """
        self.queue.put(request)

    def cancel(self, request: ClientRequest) -> None:
        """Cancel a request. Its waiting parts leave the queue at once.

        Its running parts leave their batch after the current step.
        """
        self.queue.cancel(request)

    def end(self) -> None:
        """Accept no more requests. The waiting and running ones are still finished, without waiting
        here."""
        self.queue.close()

    def close(self, seconds: float) -> bool:
        """Accept no more requests, wait up to `seconds` for the others and end the worker threads.

        Requests that are not finished then fail with RequestError. Return True if all were
        finished.
        """
        self.queue.close()
        until = time.monotonic() + seconds
        for worker in self.workers:
            worker.thread.join(max(0.0, until - time.monotonic()))
        finished = not any(worker.thread.is_alive() for worker in self.workers)
        for worker in self.workers:
            worker.must_stop = True
        self.queue.close()  # wakes workers that wait
        for worker in self.workers:
            worker.thread.join()
        return finished


def open_batches(admission: Admission, model: OnnxModel) -> list[Batch]:
    """Return an empty batch for each worker of `admission`, which all run `model`.

    Raises:
        UsageError: if the slots do not fit into memory.
    """
    try:
        return [open_batch(admission, model) for _ in range(admission.arrangement.workers)]
    except MemoryError:
        raise UsageError(
            f"no memory for {admission.slots} slots of {admission.describe_slots()}: expected "
            "fewer slots, or a smaller max_source or max_length"
        ) from None


def open_batch(admission: Admission, model: OnnxModel) -> GenerationBatch:
    """Return an empty batch of `model` with the rows of one worker.

    They may join while others run if the export has a step graph.
    """
    capacity, config, step = admission.slot_size.rows, model.info.config, model.info.step
    if step is None:
        model.open(main_roles(model.info))
        return GenerationBatch(model.factory, capacity, model.threads)
    pace = Pace.of(config)
    size = dataclasses.replace(admission.slot_size, rows=capacity + spare_rows(capacity))
    model.open([role for role in model.info.specs if role in ("encoder", step)])
    factory = cast(JoiningRowsFactory, model.factory)
    rows = factory.open_slots(step, size, pace.max_source_tokens)
    return GenerationBatch(model.factory, capacity, model.threads, rows, pace)
