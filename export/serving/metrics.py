"""The metrics of the server, in the text format of Prometheus."""

import functools
from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ..engine.inputs import Activity

PREFIX = "vanilla_transformer_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server. Each has its own registry, so two servers in one process do not
    mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.in_flight = self._gauge("requests_in_flight", "Requests without a complete response.")
        self._requests = self._counter(
            "requests",
            "Requests by route and status. Status 499: the client disconnected.",
            "route",
            "status",
        )
        self._seconds = self._histogram(
            "request_seconds",
            "Seconds from the header of a request to the end of its response.",
            SECONDS,
            "route",
        )
        self._errors = self._counter(
            "errors", "Internal server errors. The log has their tracebacks."
        )
        self._queue = self._histogram(
            "queue_seconds", "Seconds that a row waited to join a batch.", SECONDS, "model"
        )
        self._first = self._histogram(
            "first_token_seconds", "Seconds from a request to its first token.", SECONDS, "model"
        )
        self._rows = self._histogram("batch_rows", "Rows of the batch in each step.", ROWS, "model")
        self._tokens = self._counter("tokens", "Generated tokens.", "model")
        self._waiting = self._gauge("rows_waiting", "Rows that wait to join a batch.", "model")
        self._running = self._gauge("rows_running", "Rows in a batch.", "model")
        self._slots_used = self._gauge(
            "slots_used_ratio", "Share of the slots in use, from 0 to 1.", "model"
        )
        self._loaded = self._gauge("model_loaded", "1 if the model is loaded, else 0.", "model")
        self.failed = self._errors.inc
        # cached, because resolving labels takes longer than counting
        self._count = functools.cache(
            lambda route, status: self._requests.labels(route, str(status)).inc
        )
        self._time = functools.cache(lambda route: self._seconds.labels(route).observe)

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._count(route, status)()
        self._time(route)(seconds)

    def of_engine(self, model: str) -> Callable[[Activity], None]:
        """Return a function that records what a worker of `model` did in one step. Its labels are
        resolved beforehand, because workers call it at every step."""
        histograms = self._queue, self._first, self._rows
        waited, first_token, rows = (metric.labels(model).observe for metric in histograms)
        tokens = self._tokens.labels(model).inc

        def observe(activity: Activity) -> None:
            for seconds in activity.waits:
                waited(seconds)
            for seconds in activity.first_tokens:
                first_token(seconds)
            rows(activity.rows)
            tokens(activity.tokens)

        return observe

    def watch_process(self, pid: int) -> None:
        """Add the memory and CPU metrics of the process `pid`. Their names begin with
        `engine_process_`."""
        ProcessCollector("engine", pid=lambda: pid, registry=self.registry)

    def watch_rows(
        self, model: str, waiting: Callable[[], int], running: Callable[[], int]
    ) -> None:
        """Report the waiting and running rows of `model`. The two functions are called whenever the
        metrics are read."""
        self._waiting.labels(model).set_function(waiting)
        self._running.labels(model).set_function(running)

    def watch_slots(self, model: str, slots: int, running: Callable[[], int]) -> None:
        """Report the share of the `slots` of `model` that are in use, 1 also with spare ones.
        `running` is called whenever the metrics are read."""
        self._slots_used.labels(model).set_function(lambda: min(1.0, running() / slots))

    def watch_state(self, model: str, is_loaded: Callable[[], bool]) -> None:
        """Report whether `model` is loaded. `is_loaded` is called whenever the metrics are read."""
        self._loaded.labels(model).set_function(lambda: float(is_loaded()))

    def text(self) -> tuple[bytes, str]:
        """Return the metrics in the text format of Prometheus, and their media type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, help, labels, registry=self.registry)

    def _histogram(
        self, name: str, help: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(PREFIX + name, help, labels, registry=self.registry, buckets=buckets)
