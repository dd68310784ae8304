"""Requests of clients, and the queue in which their parts wait for a batch."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from .inputs import Event, Update
from .limits import shutting_down


def ignore_update(update: Update) -> None:
    """Do nothing, where the request itself is read."""


class ClientRequest:
    """A request of one client: parts that are answered together. Each part fills its results.

    Args:
        parts: the parts that workers run; each may start in another batch. A part has `num_rows`,
            the maximum number of rows that it takes, `has_started` if it has a new token, and
            `results`, which are complete once the request is finished.
        receive: called by workers with what is new, in their threads.
        streams: True for an update after each step that produced a token. Otherwise the only one
            comes when all parts are finished or one has failed.
        num_results: the number of results that finish independently, by default one per part.
        arrived_at: in seconds of `time.perf_counter`, possibly of another process; by default the
            time at which it is queued.
    """

    def __init__(
        self,
        parts: Iterable[Any],
        receive: Callable[[Update], object] = ignore_update,
        streams: bool = False,
        num_results: int | None = None,
        arrived_at: float = 0.0,
    ):
        self.waiting = deque(parts)
        for part in self.waiting:
            part.request = self
        self.results = [part.results for part in self.waiting]  # parts that have ended are freed
        self.num_rows = self.num_waiting_rows = sum(part.num_rows for part in self.waiting)
        self.receive = receive
        self.streams = streams
        self.num_unfinished = len(self.waiting) if num_results is None else num_results
        self.arrived_at = arrived_at
        self.joined_at = 0.0  # time of the last join of one of its parts
        self.is_spare = False  # True if its rows are spare ones of a batch
        self.events: list[Event] = []
        self.error: Exception | None = None
        self.is_cancelled = False
        self.has_started = False
        self.is_changed = False
        self.lock = threading.Lock()  # several workers may finish parts of this request

    @property
    def is_finished(self) -> bool:
        """True if the request is answered, cancelled or failed."""
        return self.num_unfinished == 0 or self.is_cancelled or self.error is not None

    def take_part(self, now: float) -> Any:
        """Remove and return the next waiting part, which joins a batch at the time `now`."""
        part = self.waiting.popleft()
        self.num_waiting_rows -= part.num_rows
        self.joined_at = now
        return part

    def finish_result(self) -> None:
        """Count one more finished result. The request is finished with the last."""
        with self.lock:
            self.num_unfinished -= 1
            self.is_changed |= self.num_unfinished == 0

    def add_event(self, event: Event) -> None:
        self.events.append(event)
        self.is_changed = True

    def fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self.is_changed = True

    def answer(self) -> None:
        """Call `receive` with what is new since the last call, if anything is."""
        if not self.is_changed:
            return
        events, self.events, self.is_changed = self.events, [], False
        is_answered = self.is_finished and self.error is None
        self.receive(Update(events, self.results if is_answered else None, self.error))


WAIT_PER_PART = 0.00025  # seconds per running part, which waits for the prefill of a join


class Batch(Protocol):
    """A batch of rows that a worker computes step by step. Parts of requests join and leave.

    Each part has one or several rows.
    """

    @property
    def running(self) -> list[Any]:
        """The parts that the next step computes."""

    @property
    def num_rows(self) -> int:
        """The number of rows that the next step computes."""

    @property
    def prefilling(self) -> Collection[Any]:
        """The parts that have joined and whose prompts are not read completely yet."""

    @property
    def has_ended(self) -> bool:
        """True after a step in which parts finished or failed."""

    @property
    def join_delay(self) -> float:
        """The seconds that parts may wait, so that more of them join together.

        Parts that join together cost less, and every join slows running rows down.
        """

    @property
    def should_grow(self) -> bool:
        """True if parts should join the running ones instead of a smaller batch of another worker.

        A step of one batch then costs less than the steps of two batches half as large.
        """

    @property
    def num_free_rows(self) -> int:
        """Number of rows that can join now."""

    @property
    def num_spare_rows(self) -> int:
        """Number of further rows, which only requests that fit into them use."""

    def fits(self, part: Any, beside: Sequence[Any]) -> bool:
        """Return True if `part` can join now together with `beside`.

        `beside` are parts that were selected before it to join at the same time. They have not
        joined yet.
        """

    def join(self, parts: list[Any]) -> None:
        """Add `parts` and read their prompts, as much of them as one pause between two steps
        allows.

        It is called before each step, also without parts, to read on.
        """

    def step(self) -> int:
        """Compute the rows of all running parts and return the number of their new tokens.

        A step gives each row one token, or none while its prompt is read; a search in graphs runs
        several steps. Beams in graphs only count when they end. An encoder has no tokens.
        """

    def remove(self, parts: Sequence[Any]) -> None:
        """Remove `parts`, and those that are finished.

        Their rows become free at once, or when all parts have left if they started together.
        """


# Minimum rows that join together. Fewer join once a row has waited the batch's `join_delay`.
JOIN_SIZE = 8
# Seconds that a part of many rows, such as beams, may be overtaken by smaller parts. After that
# only spare rows are for others until it fits. New requests overtake others for as long.
MAX_OVERTAKEN = 0.5
MAX_DEFERRED = 0.005  # seconds that a part waits for another batch, which should grow


class RequestQueue:
    """The requests that wait for a batch.

    They take turns, one part each, and a new request has the next turn. So a long list of texts
    does not delay a short request. Nor does a request of many samples or beams: a batch has spare
    rows, which only small requests use.
    """

    def __init__(self) -> None:
        self.requests: deque[ClientRequest] = deque()
        self.num_rows = 0
        self.changed = threading.Condition()
        self.is_closed = False
        # running parts of each batch before its current step, 0 if it should not or cannot grow
        self.growing: dict[Batch, int] = {}

    def put(self, request: ClientRequest) -> None:
        """Add a request.

        Raises:
            RequestError: 503 after `close`.
        """
        with self.changed:
            if self.is_closed:
                raise shutting_down()
            request.arrived_at = request.arrived_at or time.perf_counter()
            self.requests.insert(self.next_turn(), request)
            self.num_rows += request.num_waiting_rows
            self.changed.notify(len(request.waiting))

    def next_turn(self) -> int:
        """Return the index of a new request in `requests`: before those that have had a turn
        within `MAX_OVERTAKEN`."""
        since = time.perf_counter() - MAX_OVERTAKEN
        turns = (index for index, other in enumerate(self.requests) if other.joined_at > since)
        return next(turns, len(self.requests))

    def take(self, batch: Batch, last_join: float = 0.0) -> list[Any] | None:
        """Remove and return the parts that join `batch` now, an empty list if none do.

        If the batch is empty, wait first for requests. Return `None` once the queue is closed and
        empty, and the batch too. `last_join` is the time of the batch's last join, in seconds of
        `time.perf_counter`.
        """
        is_empty = not batch.running and not batch.prefilling
        self.note_growth(batch)
        with self.changed:
            while True:
                now = time.perf_counter()
                if self.requests and self.is_worth_joining(batch, now, last_join):
                    return self.select(batch, now)
                if not is_empty:
                    return []
                if self.is_closed and not self.requests:
                    return None
                self.changed.wait(self.wait_seconds(batch, now))

    def note_growth(self, batch: Batch) -> None:
        """Note how many parts run in `batch` if more should join them, else 0."""
        # parts deferred to a batch with a longer delay would wait in vain
        should_grow = batch.should_grow and batch.join_delay < MAX_DEFERRED
        self.growing[batch] = len(batch.running) if should_grow else 0

    def wait_seconds(self, batch: Batch, now: float) -> float | None:
        """Return the seconds until `batch` looks at the queue again, `None` to wait for a change.

        `now` is the time, in seconds of `time.perf_counter`.
        """
        if not self.requests:
            return None
        return batch.join_delay or self.requests[0].arrived_at + MAX_DEFERRED - now

    def is_worth_joining(self, batch: Batch, now: float, last_join: float) -> bool:
        """Return True if parts should join `batch` now instead of waiting for more parts or for
        another batch.

        After `close` no more requests arrive. Parts then join once one of these numbers of rows is
        free: JOIN_SIZE, all waiting rows, or as many as there are running parts.

        Args:
            batch: the batch.
            now: the time, in seconds of `time.perf_counter`.
            last_join: the time of the batch's last join.
        """
        free, spare = self.free_rows(batch)
        if self.is_closed:
            return free >= min(JOIN_SIZE, self.num_rows, len(batch.running))
        if max(free, spare) <= 0 or self.should_defer(batch, now):
            return False
        waited = now - max(self.requests[0].arrived_at, last_join)
        return waited >= batch.join_delay or min(self.num_rows, free) >= JOIN_SIZE

    def free_rows(self, batch: Batch) -> tuple[int, int]:
        """Return the numbers of rows that can join `batch` now: in the rows for all requests, and
        in the spare ones."""
        if not batch.num_spare_rows:
            return batch.num_free_rows, 0
        running = {part.request for part in (*batch.running, *batch.prefilling)}
        used = sum(request.num_rows for request in running if request.is_spare)
        return batch.num_free_rows + used, batch.num_spare_rows - used

    def should_defer(self, batch: Batch, now: float) -> bool:
        """Return True if `batch` should leave the next parts to a batch with more running parts,
        which should grow. `now` is the time, in seconds of `time.perf_counter`."""
        if now - self.requests[0].arrived_at > MAX_DEFERRED:
            return False
        return len(batch.running) < max(self.growing.values())

    def select(self, batch: Batch, now: float) -> list[Any]:
        """Remove and return the parts that fit into `batch`, taking one part of each request in
        turn.

        `now` is the time, in seconds of `time.perf_counter`. The free rows are set aside for a part
        that has waited too long and does not fit yet. Then others only have the spare rows.
        """
        parts: list[Any] = []
        free, spare = self.free_rows(batch)
        self.remove_finished()
        num_blocked = 0  # requests at the front whose next part does not fit
        while num_blocked < len(self.requests):
            request = self.requests[num_blocked]
            rows = request.waiting[0].num_rows
            uses_spare = rows > free and (request.is_spare or request.num_rows <= spare)
            if (rows <= free or uses_spare) and batch.fits(request.waiting[0], parts):
                free -= 0 if uses_spare else rows
                spare -= request.num_rows if uses_spare and not request.is_spare else 0
                request.is_spare |= uses_spare
                parts.append(request.take_part(now))
                del self.requests[num_blocked]
                if request.waiting:
                    self.requests.append(request)
            else:
                num_blocked += 1
                if rows > free and now - request.arrived_at > MAX_OVERTAKEN:
                    free = min(free, 0)
        self.num_rows -= sum(part.num_rows for part in parts)
        if parts and self.num_rows:  # the other rows did not fit: wake another worker
            self.growing[batch] = 0
            self.changed.notify()
        return parts

    def cancel(self, request: ClientRequest) -> None:
        """Cancel a request, unless it is finished. Its waiting parts leave the queue at once, its
        running ones their batch after the current step."""
        request.is_cancelled = True
        if request.waiting:
            with self.changed:
                self.remove_finished()

    def remove_finished(self) -> None:
        """Remove requests that are answered, cancelled or failed. The caller holds `changed`."""
        for request in [request for request in self.requests if request.is_finished]:
            self.requests.remove(request)
            self.num_rows -= request.num_waiting_rows

    def close(self) -> None:
        """Accept no more requests, and wake all workers. `take` still returns the waiting ones."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def clear(self) -> list[ClientRequest]:
        """Remove all requests and return them."""
        with self.changed:
            requests = [*self.requests]
            self.requests.clear()
            self.num_rows = 0
            return requests
