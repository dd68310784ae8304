"""The observability of a server: metrics in the text format of Prometheus, and a log of one JSON
object per line on standard error.

A separate thread writes the lines. A full disk, a closed stream or a pipe that nobody reads loses
lines, but does not stop the server."""

import collections
import contextlib
import functools
import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

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
from .settings import LEVELS

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


# ------------------------------------------------------------------------------------------ the log

MAX_WAITING = 10_000  # lines that wait to be written; beyond it the oldest are lost
PAUSE = 0.05  # seconds between writes; one write has all lines since the last


class Log:
    """A log that writes lines of at least `level` to the file descriptor `descriptor`.

    A thread writes them. If the file cannot be written, or is too slow, lines are lost and nothing
    is raised.
    """

    def __init__(self, level: str = "info", descriptor: int = 2):
        self.descriptor = descriptor
        self._min_level = LEVELS.index(level)
        self._lines: collections.deque[tuple] = collections.deque(maxlen=MAX_WAITING)
        self._filled = threading.Event()
        self._is_writing = False
        threading.Thread(target=self._write_on, name="log", daemon=True).start()

    def is_enabled(self, level: str) -> bool:
        return LEVELS.index(level) >= self._min_level

    def write(self, level: str, message: str, **facts: Any) -> None:
        if LEVELS.index(level) < self._min_level:
            return
        self._lines.append((time.time(), level, message, facts))
        if not self._filled.is_set():
            self._filled.set()

    def flush(self, seconds: float = 1.0) -> None:
        """Wait until all lines are written, but at most `seconds`, because a pipe may have no
        reader."""
        limit = time.monotonic() + seconds
        while (self._lines or self._is_writing) and time.monotonic() < limit:
            time.sleep(0.005)

    def _write_on(self) -> None:
        while self._filled.wait():
            self._filled.clear()
            self._is_writing = True
            content = "".join(
                line(*self._lines.popleft()) for _ in range(len(self._lines))
            ).encode()
            with contextlib.suppress(OSError):  # closed, full, or gone
                while content:
                    content = content[os.write(self.descriptor, content) :]
            self._is_writing = False
            time.sleep(PAUSE)


def line(seconds: float, level: str, message: str, facts: dict[str, Any]) -> str:
    """Return a line of the log as JSON, with its line end. `seconds` is the time of the event since
    1970. `facts` are further fields.

    `level` is such as "info", and `message` says what happened.
    """
    stamp = (
        f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"
    )
    return json.dumps({"time": stamp, "level": level, "message": message, **facts}) + "\n"


class Records:
    """A formatter and a stream for `logging.StreamHandler` that write the records of libraries to
    `log`."""

    def __init__(self, log: Log):
        self.log = log

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        facts = {"logger": record.name}
        if record.exc_info and record.exc_info[1]:
            facts["error"] = format_error(record.exc_info[1])
        known = level if level in LEVELS else "error" if record.levelno > logging.ERROR else "debug"
        self.log.write(known, record.getMessage().strip(), **facts)
        return ""

    def write(self, text: str) -> None:
        """Ignore `text`; `format` has written the line."""

    def flush(self) -> None:
        """Ignore the call; the thread of the log flushes."""


def format_error(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).strip()


@contextlib.contextmanager
def capture_library_logs(log: Log) -> Iterator[None]:
    """Send library logs from level warning on, and Python's warnings, to `log` in the block. If
    `log` writes level debug, include all levels."""
    records = Records(log)
    handler = logging.StreamHandler(records)
    handler.setFormatter(records)  # type: ignore[arg-type]
    root = logging.getLogger()
    before = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if log.is_enabled("debug") else logging.WARNING)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:], level = before
        root.setLevel(level)
        log.flush()
