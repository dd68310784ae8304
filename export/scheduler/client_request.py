"""A client's request, and the parts of it that run in batches."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from .request import Event


class RequestPart(Protocol):
    """The part of a request that joins a batch as a whole: the rows of one input, or of one
    sample."""

    request: "ClientRequest"
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
        receive: called with the new events, and True if the request is finished.
        streams: True to call `receive` after each step that produced a token. Otherwise it is
            called once, when all parts are finished or one has failed.
        num_results: the number of results that finish independently, by default one per part.
    """

    def __init__(
        self,
        parts: Iterable[AnyPart],
        receive: Callable[[list[Event], bool], None],
        streams: bool = False,
        num_results: int | None = None,
    ):
        self.parts = list(parts)
        for part in self.parts:
            part.request = self
        self.waiting = deque(self.parts)
        self.num_rows = self.num_waiting_rows
        self.receive = receive
        self.streams = streams
        self.num_unfinished = len(self.parts) if num_results is None else num_results
        self.events: list[Event] = []
        self.error: Exception | None = None
        self.is_cancelled = False
        self.number = 0  # identifies the request in another process
        self.arrived_at = 0.0  # in seconds of time.perf_counter, possibly of another process
        self.joined_at = 0.0  # time of the last join of one of its parts
        self.has_started = False
        self.is_changed = False
        self.call: Callable[..., Any] = call_at_once
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

    def take_update(self) -> tuple[list[Event], bool]:
        """Return the events since the last call, and True if the request is finished."""
        events, self.events = self.events, []
        self.is_changed = False
        return events, self.is_finished

    def fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self.is_changed = True


def call_at_once(function: Callable[..., Any], *args: Any) -> None:
    function(*args)
