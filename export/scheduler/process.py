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
import threading
import time
import warnings
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, BinaryIO

from ..model import open_export, open_for_workers
from .admission import Admission
from .client import generated, streamed
from .queue import Ticket
from .refusals import draining
from .request import Event, Generated, Job
from .scheduler import Scheduler, open_batches
from .worker import SWITCH_INTERVAL, SchedulerEvents

HEADER = 4  # bytes of the length before each message
LATE = 0.005  # seconds after which events are sent to the parent without an answer
M_ARENA_MAX = -8  # from malloc.h
PR_SET_PDEATHSIG = 1  # from sys/prctl.h
# niceness of the child, because all requests wait for short work of the parent. Measured: 4 % more
# requests, and faster rejections
NICE = 5
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # termination signals, handled by the parent


@contextlib.contextmanager
def scheduler_process(is_needed: bool) -> Iterator["SchedulerProcess | None"]:
    if not is_needed:
        yield None
        return
    with contextlib.closing(SchedulerProcess()) as process:
        yield process


def share_heap() -> None:
    """Make all threads share one malloc arena. glibc's arenas per thread keep freed memory: 7 MB in
    the two processes of a server."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def framed(message: tuple) -> bytes:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(HEADER, "little") + content


# --------------------------------------------------------------------------------------- the parent


class SchedulerProcess(asyncio.Protocol):
    """A child process with schedulers. Create it while there is only one thread, and `connect`
    before the first `open`."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        share_heap()
        gc.freeze()  # garbage collection would copy shared pages
        self.pid = forked(lambda: run_child(self.socket, theirs))
        theirs.close()
        self.clients: dict[str, SchedulerClient] = {}
        # called if the child exits by itself
        self.failed: Callable[[ChildProcessError], object] = lambda error: None
        self.error: ChildProcessError | None = None
        self._buffer = bytearray()
        self._opened: asyncio.Future[None] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._is_closing = False

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=self.socket)

    async def open(
        self, name: str, admission: Admission, events: SchedulerEvents, **arguments: Any
    ) -> "SchedulerClient":
        """Open a scheduler in the child and return its client once the model is loaded. The `name`
        must be unique. `arguments` are those of `opened_scheduler`.

        Raises:
            Exception: what `opened_scheduler` raises.
            ChildProcessError: if the child has exited.
        """
        self._opened = asyncio.get_running_loop().create_future()
        self.send(("open", name, arguments))
        await self._opened
        self.clients[name] = SchedulerClient(self, name, admission, events)
        return self.clients[name]

    def send(self, message: tuple) -> None:
        """Send a message. Raise ChildProcessError if the child has exited."""
        if self.error is not None:
            raise self.error
        assert self._transport is not None  # `connect` was called
        self._transport.write(framed(message))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= HEADER:
            end = HEADER + int.from_bytes(self._buffer[:HEADER], "little")
            if len(self._buffer) < end:
                return
            message = pickle.loads(self._buffer[HEADER:end])
            del self._buffer[:end]
            self.received(*message)

    def received(self, name: str, *content: Any) -> None:
        if name in self.clients:
            self.clients[name].received(*content)
            return
        [error] = content
        assert self._opened is not None
        if not self._opened.done():  # `open` may have been cancelled
            self._opened.set_result(None) if error is None else self._opened.set_exception(error)

    def connection_lost(self, reason: Exception | None) -> None:
        """Fail all requests: the child has exited, or sent an unreadable message and is killed."""
        if self._is_closing:
            return
        ended = self.reaped()
        if not isinstance(reason, OSError | None):
            ended = f"for {reason!r}"
        self.error = ChildProcessError(
            f"the process of the engines ended {ended}, expected it to run as long as the server"
        )
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(self.error)
        for client in self.clients.values():
            client.fail()
        self.failed(self.error)

    def reaped(self) -> str:
        """Kill the child if it still runs and return how it ended, in words."""
        # has no effect on the exit status of a child that has already ended
        os.kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        names = {each.value: each.name for each in signal.Signals}  # without real-time signals
        return f"with code {code}" if code >= 0 else f"by {names.get(-code, f'signal {-code}')}"

    def close(self) -> None:
        """Kill the child at once. It has nothing to save."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()
        self.socket.close()
        if self.error is None:
            self.reaped()


class SchedulerClient:
    """The `Client` of the scheduler `name` in the child. Call its methods in the event loop
    only."""

    def __init__(
        self, process: SchedulerProcess, name: str, admission: Admission, events: SchedulerEvents
    ):
        self.process = process
        self.name = name
        self.admission = admission
        self.events = events
        self.tickets: dict[int, Ticket] = {}  # unfinished requests by number
        self.numbers = itertools.count()
        self.rows_sent = 0
        self.rows_taken = 0  # rows started by workers or cancelled, as last reported
        self.running = 0
        self.is_ended = False

    @property
    def waiting(self) -> int:
        """Rows in the queue, including those on their way to the child."""
        return self.rows_sent - self.rows_taken

    async def generate(self, jobs: Sequence[Job]) -> list[list[Generated]]:
        return await generated(self, jobs)

    def stream(self, job: Job) -> AsyncGenerator[Event, None]:
        return streamed(self, job)

    def put(self, ticket: Ticket) -> None:
        if self.is_ended or self.process.error is not None:
            raise draining()
        rows = ticket.rows_waiting
        self.admission.check_queue(self.waiting, rows)
        ticket.number = next(self.numbers)
        self.process.send(
            ("put", self.name, ticket.number, ticket.jobs, ticket.streams, time.perf_counter())
        )
        self.tickets[ticket.number] = ticket
        self.rows_sent += rows

    def cancel(self, ticket: Ticket) -> None:
        ticket.cancelled = True
        if self.tickets.pop(ticket.number, None) is not None and self.process.error is None:
            self.process.send(("cancel", self.name, ticket.number))

    def close(self, seconds: float = 0.0) -> bool:
        """Accept no more requests and fail the running ones. Return whether all were finished."""
        self.is_ended = True
        is_finished = not self.tickets
        self.fail()
        return is_finished

    def received(self, counts: tuple, events: tuple, news: list[tuple]) -> None:
        """Handle a message of the child's `Outbox`."""
        self.rows_taken, self.running = counts
        tells: tuple[Callable[..., None], ...] = (
            self.events.joined,
            self.events.first_token,
            self.events.stepped,
        )
        for tell, found in zip(tells, events):
            for each in found:
                tell(*each)
        for each in news:
            self.tell(*each)

    def tell(
        self,
        number: int,
        events: list[Event],
        answers: list[list[Generated]] | None,
        error: Exception | None,
    ) -> None:
        is_over = answers is not None or error is not None
        ticket = self.tickets.pop(number, None) if is_over else self.tickets.get(number)
        if ticket is not None:  # `None` if it was cancelled
            ticket.answers = answers or []
            ticket.error = error
            ticket.receive(events, is_over)

    def fail(self) -> None:
        """Fail all unfinished requests."""
        for number in list(self.tickets):
            self.tell(number, [], None, draining())


# ---------------------------------------------------------------------------------------- the child


def forked(run: Callable[[], None]) -> int:
    """Fork a child that calls `run` and exits, and return its id. It ignores termination signals,
    which the parent handles."""
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
            found = f"cannot start the process of the engines: {error.strerror or error}"
            raise OSError(f"{found}, expected that there may be one more process") from None
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


def run_child(parents: socket.socket, connection: socket.socket) -> None:
    """Serve messages of the parent until it exits or closes its socket."""
    parents.close()
    die_with_parent()
    threading.excepthook = end
    os.nice(NICE)
    sys.setswitchinterval(SWITCH_INTERVAL)
    Child(connection).run()


def die_with_parent() -> None:
    """Ask the kernel to kill this process with its parent, even while it is stopped (Linux
    only)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end(failure: threading.ExceptHookArgs) -> None:
    """Exit after an error in a worker's own code, such as out of memory for an answer. Otherwise
    its requests would never be answered."""
    try:
        sys.excepthook(
            failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback
        )
    finally:
        os._exit(1)


class Child:
    """The schedulers of the child by name, which serve the parent over `connection`."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.outboxes: dict[str, Outbox] = {}
        self.lock = threading.Lock()  # for sending

    def run(self) -> None:
        """Handle messages until the parent closes the connection."""
        with self.connection.makefile("rb") as stream, contextlib.suppress(ConnectionError):
            while (message := read(stream)) is not None:
                kind, name, *content = message
                if kind == "open":
                    self.open(name, *content)
                else:
                    getattr(self.outboxes[name], kind)(*content)

    def send(self, *message: Any) -> None:
        # the parent has exited, and `run` will return
        with self.lock, contextlib.suppress(ConnectionError):
            self.connection.sendall(framed(message))

    def open(self, name: str, arguments: dict[str, Any]) -> None:
        try:
            self.outboxes[name] = Outbox(lambda *content: self.send(name, *content), arguments)
        except Exception as error:
            self.send(name, portable(error))
        else:
            gc.freeze()
            self.send(name, None)


class Outbox:
    """The child's end of one scheduler: it collects events and results and sends them to the
    parent."""

    def __init__(self, send: Callable[..., None], arguments: dict[str, Any]):
        self._send = send
        self.scheduler = opened_scheduler(events=self, **arguments)
        self.tickets: dict[int, Ticket] = {}
        self.rows_put = 0
        self.lock = threading.Lock()
        self.events: tuple[deque, ...] = (deque(), deque(), deque())
        self.news: list[tuple] = []
        self.sent_at = 0.0

    # Messages of the parent.

    def put(self, number: int, jobs: Sequence[Job], streams: bool, put_at: float) -> None:
        ticket = Ticket(
            jobs, lambda events, is_over: self.news.append(told(ticket, events, is_over)), streams
        )
        ticket.number = number
        ticket.put_at = put_at
        ticket.call = self.call
        self.tickets[number] = ticket
        self.rows_put += ticket.rows_waiting
        self.scheduler.put(ticket)

    def cancel(self, number: int) -> None:
        ticket = self.tickets.pop(number, None)
        if ticket is not None:
            self.scheduler.cancel(ticket)
            self.flush()

    # Events of workers.

    def joined(self, seconds_waited: float) -> None:
        self.events[0].append((seconds_waited,))

    def first_token(self, seconds: float) -> None:
        self.events[1].append((seconds,))

    def stepped(self, rows: int, tokens: int) -> None:
        self.events[2].append((rows, tokens))
        if not rows or time.perf_counter() > self.sent_at + LATE:
            self.flush()

    def call(self, function: Callable[[list], None], news: list) -> None:
        """Send the results that `function` collects, in place of a loop's
        `call_soon_threadsafe`."""
        with self.lock:
            self.news = []
            function(news)
            self._flush(self.news)

    def flush(self) -> None:
        with self.lock:
            self._flush([])

    def _flush(self, news: list[tuple]) -> None:
        """Send one message. Workers may add events meanwhile."""
        self.sent_at = time.perf_counter()
        for number, _, answers, error in news:
            if answers is not None or error is not None:
                self.tickets.pop(number, None)
        counts = self.rows_put - self.scheduler.waiting, self.scheduler.running
        self._send(
            counts, tuple([each.popleft() for _ in range(len(each))] for each in self.events), news
        )


def told(ticket: Ticket, events: list[Event], is_over: bool) -> tuple:
    error = None if ticket.error is None else portable(ticket.error)
    return ticket.number, events, ticket.answers if is_over and error is None else None, error


def opened_scheduler(
    directory: str, threads: int, dtype: str | None, sizes: dict[str, Any], events: SchedulerEvents
) -> Scheduler:
    """Return a started scheduler whose `Admission` gets `sizes`. Raise what `Runtime` raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parent opens the same export and warns
        info = open_export(directory, dtype)
    model = open_for_workers(info, threads)
    scheduler = Scheduler(open_batches(Admission(info, threads=threads, **sizes), model), events)
    scheduler.start()
    return scheduler


def portable(error: Exception) -> Exception:
    """Return `error` if it can be pickled, else a RuntimeError with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(str(error))
    return error


def read(stream: BinaryIO) -> Any:
    """Return the next message, or `None` at the end of the stream."""
    header = stream.read(HEADER)
    content = stream.read(int.from_bytes(header, "little"))
    return pickle.loads(content) if content else None
