"""The log of the server: one JSON object per line on standard error.

A separate thread writes the lines. A full disk, a closed stream or a pipe that nobody reads loses
lines, but does not stop the server."""

import collections
import contextlib
import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

from .settings import LEVELS

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
