"""The engine: a queue, and worker threads that each step a batch of their own."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from ..errors import UsageError
from ..inference.rows import JoiningRowsFactory
from .batch import GenerationBatch
from .groups import start_request
from .inputs import Activity, GenerationInput, Update, ignore_activity
from .limits import Admission, Pace, shutting_down, spare_rows
from .model import OnnxModel, open_for_workers, worker_roles
from .queue import Batch, ClientRequest, RequestQueue

# Seconds until a thread must release the GIL. A worker waits for the GIL after each run of a graph,
# and Python's default of 5 ms is longer than a step of a small model. Measured: 30 % more requests
# per second.
SWITCH_INTERVAL = 0.0002


class Worker:
    """A thread that computes `batch` step by step while there are requests in `queue`.

    Parts join and leave between steps.
    """

    report: Callable[[list[Update]], None]
    observe: Callable[[Activity], None]

    def __init__(self, queue: RequestQueue, batch: Batch):
        self.thread = threading.Thread(target=self.run, name="worker", daemon=True)
        self.queue = queue
        self.batch = batch
        self.must_stop = False
        self.joined_at = 0.0
        self.num_rows = 0  # rows of the last step; 0 while the batch is empty

    def start(
        self, report: Callable[[list[Update]], None], observe: Callable[[Activity], None]
    ) -> None:
        """Start the thread. After each step, it calls `report` with what is new of requests, and
        `observe` with what it did."""
        self.report, self.observe = report, observe
        self.thread.start()

    def run(self) -> None:
        """Serve the queue until it is closed and empty: let parts join, compute a step, report
        results.

        Errors of a join or a step fail the requests of the batch; they are not raised.
        """
        while (joining := self.queue.take(self.batch, self.joined_at)) is not None:
            parts = (*joining, *self.batch.running, *self.batch.prefilling)
            requests = {part.request for part in parts}
            if self.must_stop:
                self.fail(shutting_down(), requests)
            joining = [part for part in joining if not part.request.is_finished]
            now, rows, tokens = time.perf_counter(), 0, 0
            waits = [now - part.request.arrived_at for part in joining]
            try:
                self.join(joining)
                tokens, rows = self.step(), self.num_rows
            except Exception as error:  # errors of onnxruntime, such as out of memory
                self.fail(engine_failure(error), requests)
            self.observe(Activity(waits, self.remove_finished(), rows, tokens))
            self.report([request.take_update() for request in requests if request.is_changed])

    def join(self, joining: list) -> None:
        if joining:
            self.joined_at = time.perf_counter()
        self.batch.join(joining)

    def step(self) -> int:
        """Compute one step, and return the number of new tokens."""
        self.num_rows = self.batch.num_rows
        return self.batch.step()

    def fail(self, error: Exception, requests: Iterable[ClientRequest]) -> None:
        for request in requests:
            request.fail(error)

    def remove_finished(self) -> list[float]:
        """Remove finished parts, and parts of requests that failed or whose client left.

        Return the seconds until the first token of each request that has it since the last call.
        """
        now, first_tokens, leaving = time.perf_counter(), [], []
        for part in (*self.batch.running, *self.batch.prefilling):
            request = part.request
            if part.has_started and not request.has_started:
                request.has_started = True
                first_tokens.append(now - request.arrived_at)
            if part.is_finished or request.is_finished:
                leaving.append(part)
        if leaving:
            self.batch.remove(leaving)
        if not self.batch.running:
            self.num_rows = 0
        return first_tokens


def engine_failure(error: Exception) -> Exception:
    """Return the error of the requests of a batch whose step raised `error`.

    A UsageError says that memory is short, and stays as it is.
    """
    if isinstance(error, UsageError):
        return error
    failure = RuntimeError(f"the engine failed: {error}")
    failure.__cause__ = error
    return failure


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
    factory = cast(JoiningRowsFactory, model.factory)
    rows = factory.open_slots(step, size, pace.max_source_tokens)
    return GenerationBatch(model.factory, capacity, model.threads, rows, pace)
