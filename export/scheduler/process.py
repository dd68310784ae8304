"""Engines in a process of their own.

Workers and request handlers both run Python and would compete for the GIL of one process. So
engines can run in a child process. It is forked before there are threads and shares the memory
pages of imported modules with the parent. Parent and child exchange pickled messages over a pair of
sockets. The child exits with the parent.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .admission import Admission
from .child import HEADER, PING, frame, run_child
from .client import Client, Observe, Report
from .request import Activity, GenerationInput, Update

M_ARENA_MAX = -8  # from malloc.h
MAX_SILENCE = 2.0  # seconds that the child may take to answer a ping
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # termination signals, handled by the parent


@contextlib.contextmanager
def engine_process(is_needed: bool) -> Iterator["EngineProcess | None"]:
    """Yield a new child process for engines, or `None` unless it `is_needed`.

    The process is killed at the end of the context.
    """
    if not is_needed:
        yield None
        return
    with contextlib.closing(EngineProcess()) as process:
        yield process


def share_heap() -> None:
    """Let all threads share one arena of malloc, the C library's pool of memory.

    With an arena per thread, glibc keeps freed memory: 7 MB in the two processes of a server. Other
    systems ignore it.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


class EngineProcess(asyncio.Protocol):
    """A child process that runs engines, forked when this object is created.

    Create it while there is only one thread, and call `connect` before the first `open`.
    """

    def __init__(self) -> None:
        self.socket, child_socket = socket.socketpair()
        share_heap()
        gc.freeze()  # garbage collection would copy shared pages
        self.pid = fork(lambda: run_child(self.socket, child_socket))
        child_socket.close()
        self.clients: list[Client] = []
        self.engines: dict[str, ProcessEngine] = {}
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
        self, name: str, admission: Admission, dtype: str | None, sizes: dict[str, Any]
    ) -> Client:
        """Open an engine in the child and return its client, not started, once the model is loaded.

        Calls must not overlap.

        Args:
            name: identifies the engine; it must be unique.
            admission: the limits of the export.
            dtype: the dtype of the weights, `None` for the default of the export.
            sizes: the arguments of `admission` by name, such as `slots`.

        Raises:
            Exception: any error that `child.open_engine` raises.
            ChildProcessError: if the child has exited.
        """
        self._opened = asyncio.get_running_loop().create_future()
        self.send(("open", name, str(admission.info.directory), dtype, sizes))
        await self._opened
        self.engines[name] = ProcessEngine(self, name)
        self.clients.append(Client(admission, self.engines[name]))
        return self.clients[-1]

    def send(self, message: tuple) -> None:
        """Send a message to the child: a tuple of its kind, the name of an engine, and arguments.

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
        if name in self.engines:
            self.engines[name].received(*content)
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
        for client in self.clients:
            client.close()
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


class ProcessEngine:
    """The engine `name` in the child `process`, for its client.

    Its methods must be called in the event loop.
    """

    report: Report
    observe: Observe

    def __init__(self, process: EngineProcess, name: str):
        self.process = process
        self.name = name
        self.num_rows_sent = 0
        self.num_rows_started = 0  # or cancelled, as last reported by the child
        self.running = 0
        self.is_closed = False

    @property
    def waiting(self) -> int:
        """The number of rows in the queue, including those on their way to the child."""
        return self.num_rows_sent - self.num_rows_started

    def start(self, report: Report, observe: Observe) -> None:
        self.report, self.observe = report, observe

    def put(
        self, number: int, inputs: Sequence[GenerationInput], streams: bool, arrived_at: float
    ) -> None:
        self.process.send(("put", self.name, number, inputs, streams, arrived_at))
        self.num_rows_sent += sum(row.num_rows for row in inputs)

    def cancel(self, number: int) -> None:
        if self.process.error is None:
            self.process.send(("cancel", self.name, number))

    def received(
        self, counts: tuple[int, int], activities: list[Activity], updates: list[Update]
    ) -> None:
        """Handle one message of the child's `Outbox`.

        Args:
            counts: the numbers of rows that have left the queue so far, and that run now.
            activities: what the workers did since the last message.
            updates: what is new of requests.
        """
        self.num_rows_started, self.running = counts
        for activity in activities:
            self.observe(activity)
        self.report(updates)

    def end(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        """Accept no more requests. The child computes the others until they are cancelled."""
        self.is_closed = True


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
