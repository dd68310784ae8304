"""The engine: a queue, its workers and their batches."""

import dataclasses
from collections.abc import Callable, Sequence

from ..errors import UsageError
from ..model import OnnxModel, open_for_workers, worker_roles
from .admission import Admission
from .batch import Batch
from .capacity import Pace, spare_rows
from .client_request import ClientRequest
from .generation_batch import GenerationBatch
from .groups import start_request
from .queue import RequestQueue
from .request import Activity, GenerationInput, Update, ignore_activity
from .worker import Worker


class Engine:
    """A queue of requests, and a worker thread for each of `batches`.

    A worker moves parts of requests from the queue into its batch, computes the batch step by step
    and reports what is new.
    """

    def __init__(self, batches: Sequence[Batch]):
        self.queue = RequestQueue()
        self.requests: dict[int, ClientRequest] = {}  # unfinished ones
        self.workers = [Worker(self.queue, batch) for batch in batches]

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

    @property
    def is_closed(self) -> bool:
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

    def start(
        self,
        report: Callable[[list[Update]], None],
        observe: Callable[[Activity], None] = ignore_activity,
    ) -> "Engine":
        """Start the workers.

        Args:
            report: called after each step with what is new of requests, an empty list for nothing.
            observe: called after each step with what was done, for metrics.

        Both are called from several threads, so they must be fast and thread-safe.
        """

        def forget_and_report(updates: list[Update]) -> None:
            for update in updates:
                if update.is_last:
                    self.requests.pop(update.number, None)
            report(updates)

        for worker in self.workers:
            worker.start(forget_and_report, observe)
        return self

    def put(
        self,
        number: int,
        inputs: Sequence[GenerationInput],
        streams: bool = False,
        arrived_at: float = 0.0,
    ) -> None:
        """Add a request that generates from `inputs`. `number` identifies it.

        The other arguments are those of `ClientRequest`.

        Raises:
            RequestError: 503 after `end` or `close`.
        """
        self.add(start_request(inputs, streams, number, arrived_at))

    def add(self, request: ClientRequest) -> None:
        """Add a request to the queue.

        Raises:
            RequestError: 503 after `end` or `close`.
        """
        self.requests[request.number] = request
        self.queue.put(request)

    def cancel(self, number: int) -> None:
        """Cancel a request, unless it is finished. Its waiting parts leave the queue at once.

        Its running parts leave their batch after the current step.
        """
        request = self.requests.pop(number, None)
        if request is not None:
            self.queue.cancel(request)

    def end(self) -> None:
        """Accept no more requests. The waiting and running ones are still finished, without waiting
        here."""
        self.queue.close()

    def close(self) -> None:
        """Accept no more requests, fail those that are not finished with a RequestError and end the
        worker threads."""
        for worker in self.workers:
            worker.must_stop = True
        self.queue.close()
        for worker in self.workers:
            worker.thread.join()
        self.workers.clear()  # frees the memory of their batches


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
    model.open(worker_roles(model.info))
    if step is None:
        return GenerationBatch(model.factory, capacity, model.threads)
    pace = Pace.of(config)
    size = dataclasses.replace(admission.slot_size, rows=capacity + spare_rows(capacity))
    rows = model.factory.open_slots(step, size, pace.max_source_tokens)
    return GenerationBatch(model.factory, capacity, model.threads, rows, pace)
