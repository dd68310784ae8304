"""A client's request in the engine, and the parts of it that run in batches."""

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from .request import Event, Update


class RequestPart(Protocol):
    """The part of a request that joins a batch as a whole: the rows of one input, or of one
    sample."""

    request: "ClientRequest"
    results: Any  # complete once the request is finished
    has_started: bool  # True if it has a new token
    is_finished: bool

    @property
    def num_rows(self) -> int:
        """The maximum number of rows that it takes in a batch."""


AnyPart = TypeVar("AnyPart", bound=RequestPart)


class ClientRequest(Generic[AnyPart]):
    """A request of one client: parts that are answered together. Each part holds its results.

    Args:
        parts: the parts that workers run; each may start in another batch.
        number: identifies the request in updates.
        streams: True for an update after each step that produced a token. Otherwise the only one
            comes when all parts are finished or one has failed.
        num_results: the number of results that finish independently, by default one per part.
        arrived_at: in seconds of `time.perf_counter`, possibly of another process; by default the
            time at which it is queued.
    """

    def __init__(
        self,
        parts: Iterable[AnyPart],
        number: int = 0,
        streams: bool = False,
        num_results: int | None = None,
        arrived_at: float = 0.0,
    ):
        self.parts = list(parts)
        for part in self.parts:
            part.request = self
        self.waiting = deque(self.parts)
        self.number = number
        self.streams = streams
        self.num_unfinished = len(self.parts) if num_results is None else num_results
        self.arrived_at = arrived_at
        self.joined_at = 0.0  # time of the last join of one of its parts
        self.events: list[Event] = []
        self.error: Exception | None = None
        self.is_cancelled = False
        self.has_started = False
        self.is_changed = False
        self.lock = threading.Lock()  # several workers may finish parts of this request

    @property
    def num_waiting_rows(self) -> int:
        return sum(part.num_rows for part in self.waiting)

    @property
    def has_joined(self) -> bool:
        """True if a part has left the queue."""
        return len(self.waiting) < len(self.parts)

    @property
    def is_finished(self) -> bool:
        """True if the request is answered, cancelled or failed."""
        return self.num_unfinished == 0 or self.is_cancelled or self.error is not None

    def finish_result(self) -> None:
        """Count one more finished result. The request is finished with the last."""
        with self.lock:
            self.num_unfinished -= 1
            self.is_changed |= self.num_unfinished == 0

    def add_event(self, event: Event) -> None:
        self.events.append(event)
        self.is_changed = True

    def take_update(self) -> Update:
        """Return what is new since the last call."""
        events, self.events = self.events, []
        self.is_changed = False
        is_answered = self.is_finished and self.error is None
        results = [part.results for part in self.parts] if is_answered else None
        return Update(self.number, events, results, self.error)

    def fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self.is_changed = True
