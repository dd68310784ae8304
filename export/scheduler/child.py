"""The child process of the schedulers: it serves the messages of the parent."""

import contextlib
import ctypes
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

from ..model import open_export, open_for_workers
from .admission import Admission
from .client_request import ClientRequest
from .engine import Scheduler, open_batches
from .groups import Group, read_results, start_request
from .request import Event, GenerationInput
from .worker import SWITCH_INTERVAL, SchedulerEvents

PING = ""  # the kind of a message that is answered by itself, and no name of a scheduler
HEADER = 4  # bytes of the length before each message
MAX_DELAY = 0.005  # seconds after which events are sent to the parent without a result
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
    """The schedulers of the child process by name, which serve the parent over `connection`."""

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

    def open(self, name: str, arguments: dict[str, Any]) -> None:
        try:
            self.outboxes[name] = Outbox(lambda *content: self.send(name, *content), arguments)
        except Exception as error:
            self.send(name, portable(error))
        else:
            gc.freeze()
            self.send(name, None)


class Outbox:
    """One scheduler in the child process: it takes requests, and sends events and results back.

    Args:
        send: sends its arguments as one message to the parent.
        arguments: those of `open_scheduler` besides `events`.
    """

    def __init__(self, send: Callable[..., None], arguments: dict[str, Any]):
        self._send = send
        self.scheduler = open_scheduler(events=self, **arguments)
        self.requests: dict[int, ClientRequest[Group]] = {}
        self.num_rows_received = 0
        self.lock = threading.Lock()
        self.events: tuple[deque, ...] = (deque(), deque(), deque())
        self.updates: list[tuple] = []
        self.sent_at = 0.0

    # Messages of the parent.

    def put(
        self, number: int, inputs: Sequence[GenerationInput], streams: bool, arrived_at: float
    ) -> None:
        def receive(events: list[Event], is_finished: bool) -> None:
            self.updates.append(make_update(request, events, is_finished))

        request = start_request(inputs, receive, streams)
        request.number = number
        request.arrived_at = arrived_at
        request.call = self.call
        self.requests[number] = request
        self.num_rows_received += request.num_waiting_rows
        self.scheduler.put(request)

    def cancel(self, number: int) -> None:
        request = self.requests.pop(number, None)
        if request is not None:
            self.scheduler.cancel(request)
            self.flush()

    # Events of workers.

    def joined(self, seconds_waited: float) -> None:
        self.events[0].append((seconds_waited,))

    def first_token(self, seconds: float) -> None:
        self.events[1].append((seconds,))

    def stepped(self, rows: int, tokens: int) -> None:
        self.events[2].append((rows, tokens))
        if not rows or time.perf_counter() > self.sent_at + MAX_DELAY:
            self.flush()

    def call(self, function: Callable[[list], None], calls: list) -> None:
        """Call `function(calls)`, which adds to `updates`, and send the updates to the parent.

        It is the `call` of each request here. In the parent's process, that is the event loop's
        `call_soon_threadsafe`.
        """
        with self.lock:
            self.updates = []
            function(calls)
            self._flush(self.updates)

    def flush(self) -> None:
        with self.lock:
            self._flush([])

    def _flush(self, updates: list[tuple]) -> None:
        """Send one message to the parent: the row counts, the events since the last one, and
        `updates`.

        `updates` are results of `make_update`. Requests that they finish are forgotten. Workers may
        add events meanwhile.
        """
        self.sent_at = time.perf_counter()
        for number, _, results, error in updates:
            if results is not None or error is not None:
                self.requests.pop(number, None)
        counts = self.num_rows_received - self.scheduler.waiting, self.scheduler.running
        events = tuple([kind.popleft() for _ in range(len(kind))] for kind in self.events)
        self._send(counts, events, updates)


def make_update(request: ClientRequest[Group], events: list[Event], is_finished: bool) -> tuple:
    """Return `(number of the request, new events, results, error)`, for the parent.

    The results are set if the request `is_finished` without an error, and `error` if it failed;
    otherwise they are `None`.
    """
    error = None if request.error is None else portable(request.error)
    results = read_results(request) if is_finished and error is None else None
    return request.number, events, results, error


def open_scheduler(
    directory: str, threads: int, dtype: str | None, sizes: dict[str, Any], events: SchedulerEvents
) -> Scheduler:
    """Open an export and return a started scheduler for it.

    Args:
        directory: the folder of the export.
        threads: CPU threads per worker.
        dtype: the dtype of the weights, `None` for the default of the export.
        sizes: further arguments of `Admission` by name, such as `slots`.
        events: gets the events of the workers, for metrics.

    Raises:
        UsageError, ValueError, OSError: if the export is damaged or cannot be run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parent opens the same export and warns
        info = open_export(directory, dtype)
    model = open_for_workers(info, threads)
    scheduler = Scheduler(open_batches(Admission(info, threads=threads, **sizes), model), events)
    scheduler.start()
    return scheduler


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
