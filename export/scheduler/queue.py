"""The queue of requests that wait for a batch."""

import threading
import time
from collections import deque

from .batch import Batch
from .client_request import ClientRequest, RequestPart
from .rejections import shutting_down

# Minimum rows that join together. Fewer join once a row has waited the batch's `join_delay`.
JOIN_SIZE = 8
# Seconds that a part of many rows, such as beams, may be overtaken by smaller parts. After that
# nothing joins until it fits. New requests overtake others for as long.
MAX_OVERTAKEN = 0.5
MAX_DEFERRED = 0.005  # seconds that a part waits for another batch, which should grow


class RequestQueue:
    """The requests that wait for a batch.

    They take turns, one part each, and a new request has the next turn. So a long list of texts
    does not delay a short request.
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
            self.changed.notify(len(request.parts))

    def next_turn(self) -> int:
        """Return the index of a new request in `requests`: before those that have had a turn
        within `MAX_OVERTAKEN`."""
        since = time.perf_counter() - MAX_OVERTAKEN
        turns = (index for index, other in enumerate(self.requests) if other.joined_at > since)
        return next(turns, len(self.requests))

    def take(self, batch: Batch, last_join: float = 0.0) -> list[RequestPart] | None:
        """Remove and return the parts that join `batch` now, an empty list if none do.

        If the batch is empty, wait first for requests. Return `None` once the queue is closed and
        empty, and the batch too. `last_join` is the time of the batch's last join, in seconds of
        `time.perf_counter`.
        """
        is_empty = not batch.running and not batch.prefilling
        with self.changed:
            while True:
                now = time.perf_counter()
                # parts deferred to a batch with a longer delay would wait in vain
                should_grow = batch.should_grow and batch.join_delay < MAX_DEFERRED
                self.growing[batch] = len(batch.running) if should_grow else 0
                if self.requests and self.is_worth_joining(batch, now, last_join):
                    return self.select(batch, now)
                if not is_empty:
                    return []
                if self.is_closed and not self.requests:
                    return None
                self.changed.wait(self.wait_seconds(batch, now))

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
        free = self.num_free_rows(batch)
        if self.is_closed:
            return free >= min(JOIN_SIZE, self.num_rows, len(batch.running))
        if self.should_defer(batch, now):
            return False
        waited = now - max(self.requests[0].arrived_at, last_join)
        is_due = waited >= batch.join_delay
        return free > 0 and (is_due or min(self.num_rows, free) >= JOIN_SIZE)

    def num_free_rows(self, batch: Batch) -> int:
        """Return the number of rows of `batch` that the next part may use. The spare ones are for
        the first part of a request that has had no turn while others have."""
        is_first = not self.requests[0].has_joined and self.requests[-1].has_joined
        return batch.num_free_rows + (batch.num_spare_rows if is_first else 0)

    def should_defer(self, batch: Batch, now: float) -> bool:
        """Return True if `batch` should leave the next parts to a batch with more running parts,
        which should grow. `now` is the time, in seconds of `time.perf_counter`."""
        if now - self.requests[0].arrived_at > MAX_DEFERRED:
            return False
        return len(batch.running) < max(self.growing.values())

    def select(self, batch: Batch, now: float) -> list[RequestPart]:
        """Remove and return the parts that fit into `batch`, taking one part of each request in
        turn.

        `now` is the time, in seconds of `time.perf_counter`. A part of many rows that waits too
        long stops the others until it fits.
        """
        parts: list[RequestPart] = []
        num_blocked = 0  # consecutive requests whose next part does not fit
        num_rows = 0  # of `parts`
        while self.requests and num_blocked < len(self.requests):
            request = self.requests[0]
            if request.is_finished:
                self.num_rows -= request.num_waiting_rows
                self.requests.popleft()
                continue
            part, free = request.waiting[0], self.num_free_rows(batch) - num_rows
            if free <= 0 or part.num_rows > free and now - request.arrived_at > MAX_OVERTAKEN:
                break
            if part.num_rows <= free and batch.fits(part, parts):
                parts.append(request.waiting.popleft())
                request.joined_at = now
                num_rows += part.num_rows
                num_blocked = 0
            else:
                num_blocked += 1
            self.requests.rotate(-1)
            if not request.waiting:
                self.requests.pop()
        self.num_rows -= num_rows
        if self.num_rows:  # the other rows did not fit: wake another worker
            self.growing[batch] = 0
            self.changed.notify()
        return parts

    def cancel(self, request: ClientRequest) -> None:
        """Cancel a request and remove its waiting parts."""
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
