"""Schedulers in a process of their own.

Workers and request handlers both run Python and would compete for the GIL of one process. So
schedulers can run in a child process. It is forked before there are threads and shares the memory
pages of imported modules with the parent. Parent and child exchange pickled messages over a pair of
sockets. The child exits with the parent.
"""

import asyncio
import contextlib
import ctypes
import gc
import itertools
import os
import pickle
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from .admission import Admission
from .child import HEADER, PING, frame, run_child
from .client import Client
from .client_request import ClientRequest
from .groups import Group
from .rejections import shutting_down
from .request import Event, Generated
from .worker import SchedulerEvents

M_ARENA_MAX = -8  # from malloc.h
MAX_SILENCE = 2.0  # seconds that the child may take to answer a ping
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # termination signals, handled by the parent


@contextlib.contextmanager
def scheduler_process(is_needed: bool) -> Iterator["SchedulerProcess | None"]:
    """Yield a new child process for schedulers, or `None` unless it `is_needed`.

    The process is killed at the end of the context.
    """
    if not is_needed:
        yield None
        return
    with contextlib.closing(SchedulerProcess()) as process:
        yield process


def share_heap() -> None:
    """Let all threads share one arena of malloc, the C library's pool of memory.

    With an arena per thread, glibc keeps freed memory: 7 MB in the two processes of a server. Other
    systems ignore it.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


class SchedulerProcess(asyncio.Protocol):
    """A child process that runs schedulers, forked when this object is created.

    Create it while there is only one thread, and call `connect` before the first `open`.
    """

    def __init__(self) -> None:
        self.socket, child_socket = socket.socketpair()
        share_heap()
        gc.freeze()  # garbage collection would copy shared pages
        self.pid = fork(lambda: run_child(self.socket, child_socket))
        child_socket.close()
        self.clients: dict[str, SchedulerClient] = {}
        # called if the child exits by itself
        self.failed: Callable[[ChildProcessError], object] = lambda error: None
        self.error: ChildProcessError | None = None
        self._buffer = bytearray()
        self._asked_at: float | None = None  # time of a ping without a message since
        self._opened: asyncio.Future[None] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._is_closing = False

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=self.socket)

    async def open(
        self, name: str, admission: Admission, events: SchedulerEvents, **arguments: Any
    ) -> "SchedulerClient":
        """Open a scheduler in the child and return its client once the model is loaded.

        Calls must not overlap.

        Args:
            name: identifies the scheduler; it must be unique.
            admission: the limits of the export.
            events: gets the events of the workers, for metrics.
            arguments: those of `child.open_scheduler` besides `events`.

        Raises:
            Exception: any error that `child.open_scheduler` raises.
            ChildProcessError: if the child has exited.
        """
        self._opened = asyncio.get_running_loop().create_future()
        self.send(("open", name, arguments))
        await self._opened
        self.clients[name] = SchedulerClient(self, name, admission, events)
        return self.clients[name]

    def send(self, message: tuple) -> None:
        """Send a message to the child: a tuple of its kind, the name of a scheduler, and arguments.

        Raises:
            ChildProcessError: if the child has exited.
        """
        if self.error is not None:
            raise self.error
        assert self._transport is not None  # `connect` was called
        self._transport.write(frame(message))

    def is_responsive(self) -> bool:
        """Return True if the child answers, and ask it for its next sign of life.

        It is False `MAX_SILENCE` seconds after the child has stopped, for example by SIGSTOP. Call
        it about twice a second.
        """
        if self._asked_at is None and self.error is None:
            self._asked_at = time.monotonic()
            self.send((PING, ""))
        return self._asked_at is None or time.monotonic() - self._asked_at < MAX_SILENCE

    def data_received(self, data: bytes) -> None:
        self._asked_at = None
        self._buffer += data
        while len(self._buffer) >= HEADER:
            end = HEADER + int.from_bytes(self._buffer[:HEADER], "little")
            if len(self._buffer) < end:
                return
            message = pickle.loads(self._buffer[HEADER:end])
            del self._buffer[:end]
            self.received(*message)

    def received(self, name: str, *content: Any) -> None:
        if name == PING:
            return
        if name in self.clients:
            self.clients[name].received(*content)
            return
        [error] = content
        assert self._opened is not None
        if not self._opened.done():  # `open` may have been cancelled
            self._opened.set_result(None) if error is None else self._opened.set_exception(error)

    def connection_lost(self, reason: Exception | None) -> None:
        """Fail all requests, because the child has exited or sent a message that cannot be read.

        The child is then killed and `failed` is called. `reason` is the error of the connection,
        `None` at its end.
        """
        if self._is_closing:
            return
        how = self.reap()
        if not isinstance(reason, OSError | None):
            how = f"for {reason!r}"
        self.error = ChildProcessError(
            f"the process of the workers ended {how}, expected it to run as long as the server"
        )
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(self.error)
        for client in self.clients.values():
            client.fail()
        self.failed(self.error)

    def reap(self) -> str:
        """Kill the child if it still runs, wait for its end and return how it ended.

        The text is, for example, `with code 1` or `by SIGKILL`. Call it once.
        """
        # has no effect on the exit status of a child that has already ended
        os.kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        # without real-time signals
        names = {number.value: number.name for number in signal.Signals}
        return f"with code {code}" if code >= 0 else f"by {names.get(-code, f'signal {-code}')}"

    def close(self) -> None:
        """Kill the child at once. It has nothing to save. A second call does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()
        self.socket.close()
        if self.error is None:
            self.reap()


class SchedulerClient(Client):
    """A client of the scheduler `name` in the child `process`.

    Its methods must be called in the event loop.
    """

    def __init__(
        self, process: SchedulerProcess, name: str, admission: Admission, events: SchedulerEvents
    ):
        self.process = process
        self.name = name
        self.admission = admission
        self.events = events
        # unfinished requests by number
        self.requests: dict[int, ClientRequest[Group]] = {}
        self.numbers = itertools.count()
        self.num_rows_sent = 0
        self.num_rows_started = 0  # or cancelled, as last reported by the child
        self.num_rows_running = 0
        self.is_closed = False

    @property
    def waiting(self) -> int:
        """The number of rows in the queue, including those on their way to the child."""
        return self.num_rows_sent - self.num_rows_started

    @property
    def running(self) -> int:
        return self.num_rows_running

    def put(self, request: ClientRequest[Group]) -> None:
        if self.is_closed or self.process.error is not None:
            raise shutting_down()
        self.admission.check_queue(self.waiting, request, self.requests.values())
        request.number = next(self.numbers)
        inputs = [group.input for group in request.parts]
        message = ("put", self.name, request.number, inputs, request.streams, time.perf_counter())
        self.process.send(message)
        self.requests[request.number] = request
        self.num_rows_sent += request.num_rows

    def cancel(self, request: ClientRequest[Group]) -> None:
        request.is_cancelled = True
        is_unfinished = self.requests.pop(request.number, None) is not None
        if is_unfinished and self.process.error is None:
            self.process.send(("cancel", self.name, request.number))

    def close(self, seconds: float = 0.0) -> bool:
        """Accept no more requests and fail the unfinished ones at once; `seconds` is ignored.

        Return True if all requests were finished.
        """
        self.is_closed = True
        is_finished = not self.requests
        self.fail()
        return is_finished

    def received(self, counts: tuple, events: tuple, updates: list[tuple]) -> None:
        """Handle one message of the child's `Outbox`.

        Args:
            counts: the numbers of rows that have left the queue so far, and that run now.
            events: the arguments of the calls of `joined`, `first_token` and `stepped` of
                `self.events`.
            updates: `(number, events, results, error)` of each changed request.
        """
        self.num_rows_started, self.num_rows_running = counts
        callbacks: tuple[Callable[..., None], ...] = (
            self.events.joined,
            self.events.first_token,
            self.events.stepped,
        )
        for callback, calls in zip(callbacks, events):
            for arguments in calls:
                callback(*arguments)
        for update in updates:
            self.update(*update)

    def update(
        self,
        number: int,
        events: list[Event],
        results: list[list[Generated]] | None,
        error: Exception | None,
    ) -> None:
        is_finished = results is not None or error is not None
        requests = self.requests
        request = requests.pop(number, None) if is_finished else requests.get(number)
        if request is None:  # it was cancelled
            return
        for group, sequences in zip(request.parts, results or []):
            group.results[:] = sequences
        request.error = error
        request.receive(events, is_finished)

    def fail(self) -> None:
        """Fail all unfinished requests with a RequestError: the server is shutting down."""
        for number in list(self.requests):
            self.update(number, [], None, shutting_down())


def fork(run: Callable[[], None]) -> int:
    """Fork a child process that calls `run` and exits, and return its process id.

    The exit code is 1 if `run` raises, else 0. The child ignores termination signals, which the
    parent handles.

    Raises:
        OSError: if the system cannot start another process.
    """
    # The signal may be ignored by inheritance, and then no one can wait for a child.
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with warnings.catch_warnings():
        # a warning about threads: they are numpy's and end before a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError as error:
            raise OSError(
                f"cannot start the process of the workers: {error.strerror or error}, expected "
                "room for one more process"
            ) from None
    if not pid:
        try:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            run()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return pid
