"""A thread that runs parts of requests in a batch of its own."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import UsageError
from .batch import Batch
from .client_request import ClientRequest
from .queue import RequestQueue
from .rejections import shutting_down

# Seconds until a thread must release the GIL. A worker waits for the GIL after each run of a graph,
# and Python's default of 5 ms is longer than a step of a small model. Measured: 30 % more requests
# per second.
SWITCH_INTERVAL = 0.0002


class SchedulerEvents(Protocol):
    """Callbacks that count what the workers do, for metrics.

    `joined` gets the seconds that a part waited, `first_token` those until a request's first token,
    and `stepped` the rows and new tokens of a step. Workers call them from several threads, so they
    must be fast and thread-safe.
    """

    def joined(self, seconds_waited: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def stepped(self, rows: int, tokens: int) -> None: ...


class NoEvents:
    """`SchedulerEvents` that are ignored."""

    def joined(self, seconds_waited: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def stepped(self, rows: int, tokens: int) -> None: ...


class Worker:
    """A thread that computes `batch` step by step while there are requests in `queue`.

    Parts join and leave between steps. `events` gets what happens, for metrics.
    """

    def __init__(self, queue: RequestQueue, batch: Batch, events: SchedulerEvents):
        self.thread = threading.Thread(target=self.run, name="worker", daemon=True)
        self.queue = queue
        self.batch = batch
        self.events = events
        self.must_stop = False
        self.joined_at = 0.0
        self.num_rows = 0  # rows of the last step; 0 while the batch is empty

    def run(self) -> None:
        """Serve the queue until it is closed and empty: let parts join, compute a step, report
        results.

        Errors of a join or a step fail the requests of the batch; they are not raised.
        """
        while (joining := self.queue.take(self.batch, self.joined_at)) is not None:
            parts = (*joining, *self.batch.running, *self.batch.prefilling)
            requests = {part.request for part in parts}
            if self.must_stop:
                for request in requests:
                    request.fail(shutting_down())
            try:
                self.join([part for part in joining if not part.request.is_finished])
                self.step()
            except Exception as error:  # errors of onnxruntime, such as out of memory
                self.fail(error, joining)
            self.remove_finished()
            self.report(requests)

    def join(self, joining: list) -> None:
        now = time.perf_counter()
        if joining:
            self.joined_at = now
        for part in joining:
            self.events.joined(now - part.request.arrived_at)
        self.batch.join(joining)

    def step(self) -> None:
        self.num_rows = self.batch.num_rows
        self.events.stepped(self.num_rows, self.batch.step())

    def fail(self, error: Exception, joining: list) -> None:
        failure = error
        if not isinstance(error, UsageError):  # a UsageError says that memory is short
            failure = RuntimeError(f"the engine failed: {error}")
            failure.__cause__ = error
        for part in (*joining, *self.batch.running, *self.batch.prefilling):
            part.request.fail(failure)

    def remove_finished(self) -> None:
        """Remove finished parts, and parts of requests that failed or whose client left.

        Report the first token of a request to `events`.
        """
        now = time.perf_counter()
        leaving = []
        for part in (*self.batch.running, *self.batch.prefilling):
            request = part.request
            if part.has_started and not request.has_started:
                request.has_started = True
                self.events.first_token(now - request.arrived_at)
            if part.is_finished or request.is_finished:
                leaving.append(part)
        if leaving:
            self.batch.remove(leaving)
        if not self.batch.running:
            self.num_rows = 0

    def report(self, requests: set[ClientRequest]) -> None:
        """Call `receive` of each of `requests` that has new events, is answered or has failed."""
        updates: dict[Callable[..., Any], list] = {}
        for request in requests:
            if request.is_changed:
                updates.setdefault(request.call, []).append(
                    (request.receive, request.take_update())
                )
        for call, calls in updates.items():
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                call(receive_all, calls)


def receive_all(calls: list[tuple[Callable, tuple]]) -> None:
    for receive, update in calls:
        receive(*update)
