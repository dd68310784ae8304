"""The queue of requests that wait for a batch."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .refusals import draining
from .request import Event, Generated, Job
from .runs import Run
from .slot_batch import Batch

# Prefill TOGETHER sequences at once, or fewer after one has waited WAIT seconds per running row.
# A joint prefill is cheaper, and every prefill stalls the running rows.
TOGETHER = 8
WAIT = 0.00025
# Seconds that a sequence of many rows may be overtaken. After that nothing joins until it fits.
OVERTAKEN = 0.5


class Ticket:
    """A client's request: `jobs` that are answered together. Workers store the answers.

    Args:
        jobs: the inputs to generate from.
        receive: called with the new events and whether the request is finished.
        streams: whether `receive` is called after each step that produced a token. Otherwise it is
            called once, when all jobs are answered or one has failed.
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
        self.number = 0  # identifies the request in another process
        self.put_at = 0.0  # time of arrival, possibly in another process
        self.has_begun = False
        self.waiting = deque(Run(job, self, place) for place, job in enumerate(jobs))
        self.left = sum(samples_of(job) for job in jobs)
        self.changed = False
        self.call: Callable[..., Any] = call_at_once
        self.lock = threading.Lock()  # several workers may answer jobs of this request

    @property
    def rows_waiting(self) -> int:
        return sum(run.job.rows for run in self.waiting)

    @property
    def is_over(self) -> bool:
        """True if the request is answered, cancelled or failed."""
        return self.left == 0 or self.cancelled or self.error is not None

    def answered(self, place: int, index: int, found: list[Generated]) -> None:
        """Store the answers `found` of the job `place`, beginning at answer number `index`."""
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
        """Return the events since the last call and whether the request is finished."""
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
    """Return how many answers finish independently: the samples, or 1 without sampling."""
    return job.options.num_return_sequences if job.options.do_sample else 1


class Queue:
    """A first-come-first-served queue of requests. Requests take turns, one job each, so a long
    list of texts does not delay a short one."""

    def __init__(self) -> None:
        self.tickets: deque[Ticket] = deque()
        self.rows = 0
        self.changed = threading.Condition()
        self.is_closed = False

    def put(self, ticket: Ticket) -> None:
        """Add a request. Raise RequestError after `close`."""
        with self.changed:
            if self.is_closed:
                raise draining()
            ticket.put_at = ticket.put_at or time.perf_counter()
            self.tickets.append(ticket)
            self.rows += ticket.rows_waiting
            self.changed.notify(len(ticket.jobs))

    def take(self, batch: Batch, last: float = 0.0) -> list[Run] | None:
        """Return the sequences that join `batch` now; `last` is the time of its last join.

        Block while there is no work. Return `None` once the queue is closed and empty."""
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
        """Return whether waiting sequences join now. After `close` no more requests arrive, so only
        the free slots count."""
        if self.is_closed:
            return batch.room >= min(TOGETHER, self.rows, len(batch.running))
        return min(self.rows, batch.room) >= TOGETHER or waited >= WAIT * len(batch.running)

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request and remove its waiting jobs."""
        ticket.cancelled = True
        if ticket.waiting:
            with self.changed:
                self.forget_over()

    def forget_over(self) -> None:
        """Remove answered, cancelled and failed requests."""
        for ticket in [ticket for ticket in self.tickets if ticket.is_over]:
            self.tickets.remove(ticket)
            self.rows -= ticket.rows_waiting

    def chosen(self, batch: Batch, now: float) -> list[Run]:
        """Select sequences round-robin, one per request, while they fit into `batch`."""
        runs: list[Run] = []
        blocked = 0  # consecutive requests whose next job does not fit
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
        """Accept no more requests. `take` still returns the waiting ones."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
