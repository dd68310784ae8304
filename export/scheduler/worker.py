"""A thread that runs parts of requests in a batch of its own."""

import threading
import time
from collections.abc import Callable, Iterable

from ..errors import UsageError
from .batch import Batch
from .client_request import ClientRequest
from .queue import RequestQueue
from .rejections import shutting_down
from .request import Activity, Update

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
