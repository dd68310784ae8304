"""The child process of the engines: it serves the messages of the parent."""

import contextlib
import ctypes
import functools
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from ..model import open_export
from .admission import Admission
from .engine import Engine
from .request import Activity, GenerationInput, Update
from .worker import SWITCH_INTERVAL

PING = ""  # the kind of a message that is answered by itself, and no name of an engine
HEADER = 4  # bytes of the length before each message
MAX_DELAY = 0.005  # seconds after which activities are sent to the parent without an update
PR_SET_PDEATHSIG = 1  # from sys/prctl.h
# niceness of the child, because all requests wait for short work of the parent. Measured: 4 % more
# requests, and faster rejections
NICENESS = 5


def run_child(parent_socket: socket.socket, connection: socket.socket) -> None:
    """Run the child process: serve messages of the parent until it exits or closes its socket.

    Args:
        parent_socket: the parent's end of the connection, which is closed here.
        connection: the child's end.
    """
    parent_socket.close()
    die_with_parent()
    threading.excepthook = exit_after
    os.nice(NICENESS)
    sys.setswitchinterval(SWITCH_INTERVAL)
    Child(connection).run()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. It does nothing outside of
    Linux."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_after(failure: threading.ExceptHookArgs) -> None:
    """Print the error of a thread and exit with code 1.

    It is the `threading.excepthook` for errors in a worker's own code, such as out of memory for an
    answer. Otherwise the worker's requests would never be answered.
    """
    try:
        sys.excepthook(
            failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback
        )
    finally:
        os._exit(1)


class Child:
    """The engines of the child process by name, which serve the parent over `connection`."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.outboxes: dict[str, Outbox] = {}
        self.lock = threading.Lock()  # for sending

    def run(self) -> None:
        """Handle messages until the parent closes the connection."""
        with self.connection.makefile("rb") as stream, contextlib.suppress(ConnectionError):
            while (message := read_message(stream)) is not None:
                kind, name, *content = message
                if kind == PING:
                    self.send(PING)
                elif kind == "open":
                    self.open(name, *content)
                else:
                    getattr(self.outboxes[name], kind)(*content)

    def send(self, *message: Any) -> None:
        # the parent has exited, and `run` will return
        with self.lock, contextlib.suppress(ConnectionError):
            self.connection.sendall(frame(message))

    def open(self, name: str, *content: Any) -> None:
        try:
            engine = open_engine(*content)
        except Exception as error:
            self.send(name, portable(error))
        else:
            self.outboxes[name] = Outbox(functools.partial(self.send, name), engine)
            gc.freeze()
            self.send(name, None)


class Outbox:
    """The updates and activities of `engine`, which this starts. They go to the parent with `send`,
    which sends its arguments as one message."""

    def __init__(self, send: Callable[..., None], engine: Engine):
        self.send = send
        self.engine = engine
        self.num_rows_received = 0
        self.activities: deque[Activity] = deque()
        self.lock = threading.Lock()
        self.sent_at = 0.0
        engine.start(self.report, self.activities.append)

    # Messages of the parent.

    def put(
        self, number: int, inputs: Sequence[GenerationInput], streams: bool, arrived_at: float
    ) -> None:
        self.num_rows_received += sum(row.num_rows for row in inputs)
        self.engine.put(number, inputs, streams, arrived_at)

    def cancel(self, number: int) -> None:
        self.engine.cancel(number)
        self.flush([])

    # What workers report.

    def report(self, updates: list[Update]) -> None:
        is_due = time.perf_counter() > self.sent_at + MAX_DELAY
        if updates or is_due or not self.engine.running:
            self.flush(updates)

    def flush(self, updates: list[Update]) -> None:
        """Send one message to the parent: the numbers of rows that have left the queue and that run
        now, the activities since the last message, and `updates`."""
        with self.lock:
            self.sent_at = time.perf_counter()
            counts = self.num_rows_received - self.engine.waiting, self.engine.running
            # workers may add some meanwhile
            activities = [self.activities.popleft() for _ in range(len(self.activities))]
            self.send(counts, activities, [portable_update(update) for update in updates])


def open_engine(directory: str, dtype: str | None, sizes: dict[str, Any]) -> Engine:
    """Open an export and return an engine for it.

    Args:
        directory: the folder of the export.
        dtype: the dtype of the weights, `None` for the default of the export.
        sizes: further arguments of `Admission` by name, such as `slots`.

    Raises:
        UsageError, ValueError, OSError: if the export is damaged or cannot be run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parent opens the same export and warns
        info = open_export(directory, dtype)
    return Engine.open(Admission(info, **sizes))


def portable_update(update: Update) -> Update:
    """Return `update` with an error that can be pickled."""
    return update if update.error is None else update._replace(error=portable(update.error))


def portable(error: Exception) -> Exception:
    """Return `error` if it can be pickled and read again, else a RuntimeError with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(str(error))
    return error


def frame(message: tuple) -> bytes:
    """Return the bytes of `message` for the socket: its length, then its pickle."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(HEADER, "little") + content


def read_message(stream: BinaryIO) -> Any:
    """Return the next message that `frame` wrote to `stream`, or `None` at the end."""
    header = stream.read(HEADER)
    content = stream.read(int.from_bytes(header, "little"))
    return pickle.loads(content) if content else None
