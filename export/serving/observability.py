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
from .models import READY, ServedModel
from .settings import LEVELS

NAMESPACE = "vanilla_transformer"
MODEL = ["model"]  # label
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server. Each has its own registry, so two servers in one process do not
    mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        place: dict[str, Any] = {"namespace": NAMESPACE, "registry": self.registry}
        self.in_flight = Gauge(
            "requests_in_flight", "Requests without a complete response.", **place
        )
        self._requests = Counter(
            "requests",
            "Requests by route and status. Status 499: the client disconnected.",
            ["route", "status"],
            **place,
        )
        self._seconds = Histogram(
            "request_seconds",
            "Seconds from the header of a request to the end of its response.",
            ["route"],
            buckets=SECONDS,
            **place,
        )
        self._errors = Counter(
            "errors", "Internal server errors. The log has their tracebacks.", **place
        )
        self._queue = Histogram(
            "queue_seconds",
            "Seconds that a row waited to join a batch.",
            MODEL,
            buckets=SECONDS,
            **place,
        )
        self._first = Histogram(
            "first_token_seconds",
            "Seconds from a request to its first token.",
            MODEL,
            buckets=SECONDS,
            **place,
        )
        self._rows = Histogram(
            "batch_rows", "Rows of the batch in each step.", MODEL, buckets=ROWS, **place
        )
        self._tokens = Counter("tokens", "Generated tokens.", MODEL, **place)
        self._waiting = Gauge("rows_waiting", "Rows that wait to join a batch.", MODEL, **place)
        self._running = Gauge("rows_running", "Rows in a batch.", MODEL, **place)
        self._slots_used = Gauge(
            "slots_used_ratio", "Share of the slots in use, from 0 to 1.", MODEL, **place
        )
        self._loaded = Gauge("model_loaded", "1 if the model is loaded, else 0.", MODEL, **place)
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

    def watch(self, model: ServedModel) -> None:
        """Report whether `model` is loaded, its rows, and the share of its slots in use, 1 also
        with spare ones. They are read whenever the metrics are read."""
        name, admission = model.name, model.plan.admission
        self._loaded.labels(name).set_function(lambda: float(model.state == READY))
        self._waiting.labels(name).set_function(lambda: model.waiting)
        self._running.labels(name).set_function(lambda: model.running)
        if admission is not None:
            used = self._slots_used.labels(name)
            used.set_function(lambda: min(1.0, model.running / admission.slots))

    def text(self) -> tuple[bytes, str]:
        """Return the metrics in the text format of Prometheus, and their media type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


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
        if not self.is_enabled(level):
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


class LibraryLog(logging.Handler):
    """A handler that writes the records of libraries to `log`."""

    def __init__(self, log: Log):
        super().__init__()
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        facts = {"logger": record.name}
        if record.exc_info and record.exc_info[1]:
            facts["error"] = format_error(record.exc_info[1])
        known = level if level in LEVELS else "error" if record.levelno > logging.ERROR else "debug"
        self.log.write(known, record.getMessage().strip(), **facts)


def format_error(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).strip()


@contextlib.contextmanager
def capture_library_logs(log: Log) -> Iterator[None]:
    """Send library logs from level warning on, and Python's warnings, to `log` in the block. If
    `log` writes level debug, include all levels."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    root.handlers[:] = [LibraryLog(log)]
    root.setLevel(logging.DEBUG if log.is_enabled("debug") else logging.WARNING)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:], level = before
        root.setLevel(level)
        log.flush()
