"""A thread that runs sequences of the queue in a batch of its own."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import UsageError
from .queue import Queue, Ticket
from .refusals import draining
from .slot_batch import Batch

# Seconds until a thread must release the GIL. A worker waits for the GIL after each run of a graph,
# and Python's default of 5 ms is longer than a step of a small model. Measured: 30 % more requests
# per second.
SWITCH_INTERVAL = 0.0002


class SchedulerEvents(Protocol):
    """Callbacks for metrics. Workers call them from several threads, so they must be fast and
    thread-safe."""

    def joined(self, seconds_waited: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def stepped(self, rows: int, tokens: int) -> None: ...


class NoEvents:
    """`SchedulerEvents` that are ignored."""

    def joined(self, seconds_waited: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def stepped(self, rows: int, tokens: int) -> None: ...


class Worker:
    """A thread that steps a batch while there are jobs."""

    def __init__(self, queue: Queue, batch: Batch, events: SchedulerEvents):
        self.thread = threading.Thread(target=self.run, name="worker", daemon=True)
        self.queue = queue
        self.batch = batch
        self.events = events
        self.gives_up = False
        self.joined_at = 0.0
        self.rows = 0  # rows of the last step; 0 while the batch is empty

    def run(self) -> None:
        while (joining := self.queue.take(self.batch, self.joined_at)) is not None:
            touched = {run.ticket for run in (*joining, *self.batch.running, *self.batch.unread)}
            if self.gives_up:
                for ticket in touched:
                    ticket.fail(draining())
            try:
                self.drop()
                self.begin([run for run in joining if not run.ticket.is_over])
                self.rows = sum(len(run.slots) for run in self.batch.running)
                self.batch.step()
                self.events.stepped(self.rows, self.rows)
            except Exception as error:  # errors of onnxruntime, such as out of memory
                self.fail(error, joining)
            self.end(touched)

    def begin(self, joining: list) -> None:
        now = time.perf_counter()
        if joining:
            self.joined_at = now
        for run in joining:
            self.events.joined(now - run.ticket.put_at)
        self.batch.join(joining)

    def drop(self) -> None:
        """Remove sequences of finished requests, such as those of disconnected clients."""
        for run in (*self.batch.running, *self.batch.unread):
            if run.ticket.is_over:
                self.batch.leave(run)

    def fail(self, error: Exception, joining: list) -> None:
        failure = error
        if not isinstance(error, UsageError):  # a UsageError says that memory is short
            failure = RuntimeError(f"the engine failed: {error}")
            failure.__cause__ = error
        for run in (*joining, *self.batch.running, *self.batch.unread):
            run.ticket.fail(failure)

    def end(self, touched: set[Ticket]) -> None:
        """Remove finished sequences and call the `receive` of changed requests."""
        now = time.perf_counter()
        for run in list(self.batch.running):
            if run.has_begun and not run.ticket.has_begun:
                run.ticket.has_begun = True
                self.events.first_token(now - run.ticket.put_at)
            if run.finished or run.ticket.error is not None:
                self.batch.leave(run)
        if not self.batch.running:
            self.rows = 0
        news: dict[Callable[..., Any], list] = {}
        for ticket in touched:
            if ticket.changed:
                news.setdefault(ticket.call, []).append((ticket.receive, ticket.news()))
        for call, each in news.items():
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                call(tell_all, each)


def tell_all(news: list[tuple[Callable, tuple]]) -> None:
    for receive, each in news:
        receive(*each)
