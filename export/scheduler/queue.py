"""The jobs that wait, and the requests that they belong to."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .refusals import draining
from .request import Event, Generated, Job
from .runs import Run
from .slot_batch import Batch

# Rows join a running batch in groups of so many, or when one has waited so long for each row that
# runs: reading them together is cheaper, and all that run have to wait for it.
TOGETHER = 8
WAIT = 0.00025
# A run of many rows may be overtaken by smaller ones for so long; then nothing joins until it fits.
OVERTAKEN = 0.5


class Ticket:
    """What was asked in one request: `jobs`, answered together. Workers fill it.

    Args:
        receive: is called, with the new tokens and whether they are the last, when all is answered
            or has failed; where it `streams`, after each step that gave it a token.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        receive: Callable[[list[Event], bool], None],
        streams: bool = False,
    ):
        self.jobs = jobs
        self.receive = receive
        self.streams = streams
        self.answers: list[list[Generated]] = [[] for _ in jobs]
        self.events: list[Event] = []
        self.error: Exception | None = None
        self.cancelled = False
        self.number = 0  # by which another process knows it
        self.put_at = 0.0  # when it came; another process may have known it before
        self.has_begun = False
        self.waiting = deque(Run(job, self, place) for place, job in enumerate(jobs))
        self.left = sum(samples_of(job) for job in jobs)
        self.changed = False
        self.call: Callable[..., Any] = call_at_once
        self.lock = threading.Lock()  # several workers may have jobs of it

    @property
    def rows_waiting(self) -> int:
        return sum(run.job.rows for run in self.waiting)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be computed for it."""
        return self.left == 0 or self.cancelled or self.error is not None

    def answered(self, place: int, index: int, found: list[Generated]) -> None:
        """By a worker: the answer with the number `index` of a job, or all of them at once."""
        with self.lock:
            answers = self.answers[place]
            # Each `None` is replaced before it is read.
            missing = index + len(found) - len(answers)
            answers.extend([None] * missing)  # type: ignore[list-item]
            answers[index : index + len(found)] = found
            self.left -= 1
            self.changed |= self.left == 0

    def tell(self, event: Event) -> None:
        self.events.append(event)
        self.changed = True

    def news(self) -> tuple[list[Event], bool]:
        """What `receive` is to be called with, once."""
        events, self.events = self.events, []
        self.changed = False
        return events, self.is_over

    def fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self.changed = True


def call_at_once(function: Callable[..., Any], *args: Any) -> None:
    function(*args)


def samples_of(job: Job) -> int:
    """How many answers of a job come one by one."""
    return job.options.num_return_sequences if job.options.do_sample else 1


class Queue:
    """Tickets in the order of their coming; each in turn gives one of its jobs, so that a long list
    of texts holds up no short one."""

    def __init__(self) -> None:
        self.tickets: deque[Ticket] = deque()
        self.rows = 0
        self.changed = threading.Condition()
        self.is_closed = False

    def put(self, ticket: Ticket) -> None:
        """Raises RequestError after `close`."""
        with self.changed:
            if self.is_closed:
                raise draining()
            ticket.put_at = ticket.put_at or time.perf_counter()
            self.tickets.append(ticket)
            self.rows += ticket.rows_waiting
            self.changed.notify(len(ticket.jobs))

    def take(self, batch: Batch, last: float = 0.0) -> list[Run] | None:
        """What joins `batch` now, where the `last` join was at that moment. Waits while there is
        nothing to do; `None` once the queue is closed and all is taken."""
        with self.changed:
            while not self.tickets and not batch.running and not batch.unread:
                if self.is_closed:
                    return None
                self.changed.wait()
            if not self.tickets or not batch.room:
                return []
            now = time.perf_counter()
            if not self.is_worth_reading(batch, now - max(self.tickets[0].put_at, last)):
                return []
            return self.chosen(batch, now)

    def is_worth_reading(self, batch: Batch, waited: float) -> bool:
        """Whether what waits joins now. After `close` no more comes, so that only room is waited
        for."""
        if self.is_closed:
            return batch.room >= min(TOGETHER, self.rows, len(batch.running))
        return min(self.rows, batch.room) >= TOGETHER or waited >= WAIT * len(batch.running)

    def cancel(self, ticket: Ticket) -> None:
        """What of it waits does so no longer."""
        ticket.cancelled = True
        if ticket.waiting:
            with self.changed:
                self.forget_over()

    def forget_over(self) -> None:
        """Tickets that nobody waits for."""
        for ticket in [ticket for ticket in self.tickets if ticket.is_over]:
            self.tickets.remove(ticket)
            self.rows -= ticket.rows_waiting

    def chosen(self, batch: Batch, now: float) -> list[Run]:
        """Round after round one job of each ticket, while they fit."""
        runs: list[Run] = []
        blocked = 0  # tickets in a row whose next job does not fit
        room = batch.room
        while room > 0 and self.tickets and blocked < len(self.tickets):
            ticket = self.tickets[0]
            if ticket.is_over or not ticket.waiting:
                self.rows -= ticket.rows_waiting
                self.tickets.popleft()
                continue
            if batch.takes(ticket.waiting[0], runs):
                runs.append(ticket.waiting.popleft())
                self.rows -= runs[-1].job.rows
                room -= runs[-1].job.rows
                blocked = 0
            else:
                blocked += 1
                if now - ticket.put_at > OVERTAKEN and not blocked > 1:
                    break
            self.tickets.rotate(-1)
        return runs

    def close(self) -> None:
        """Nothing more is taken in; what is there is still given out."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
