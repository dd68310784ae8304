"""Schedulers in a process of their own.

The workers and what prepares their requests both run Python, and one interpreter runs one thread at
a time: in one process each waits for the other. So schedulers can run in a child, forked before
there are threads, whose pages of what both have imported are the parent's. Parent and child send
each other messages, pickled, over a pair of sockets; the child ends with the parent.
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

HEADER = 4  # bytes before each message, which say how long it is
LATE = 0.005  # seconds after which the parent hears of what no answer has told it
M_ARENA_MAX = -8  # of malloc.h
PR_SET_PDEATHSIG = 1  # of sys/prctl.h
# of the child to the parent, whose short work all requests wait for. Measured: 4 % more requests,
# refused sooner
NICE = 5
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # to end, which the parent answers


@contextlib.contextmanager
def scheduler_process(is_needed: bool) -> Iterator["SchedulerProcess | None"]:
    if not is_needed:
        yield None
        return
    with contextlib.closing(SchedulerProcess()) as process:
        yield process


def share_heap() -> None:
    """Among all threads, where glibc gives each one of its own, which keeps what was freed in it: 7
    MB in a server's two processes."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def framed(message: tuple) -> bytes:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(HEADER, "little") + content


# --------------------------------------------------------------------------------------- the parent


class SchedulerProcess(asyncio.Protocol):
    """A child with schedulers, from where there is one thread only; `connect` before the first of
    them is opened."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        share_heap()
        gc.freeze()  # what there is stays: looking for garbage in it would make copies of its pages
        self.pid = forked(lambda: run_child(self.socket, theirs))
        theirs.close()
        self.clients: dict[str, SchedulerClient] = {}
        # is told if the child ends by itself
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
        """Return the client of a new scheduler in the child, once its model is loaded. No other may
        have its `name`. `arguments` as `opened_scheduler` takes them.

        Raises:
            What `opened_scheduler` raises, and ChildProcessError if the child has ended.
        """
        self._opened = asyncio.get_running_loop().create_future()
        self.send(("open", name, arguments))
        await self._opened
        self.clients[name] = SchedulerClient(self, name, admission, events)
        return self.clients[name]

    def send(self, message: tuple) -> None:
        """Raises ChildProcessError if the child has ended."""
        if self.error is not None:
            raise self.error
        assert self._transport is not None  # it is connected
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
        if not self._opened.done():  # nobody waits any more
            self._opened.set_result(None) if error is None else self._opened.set_exception(error)

    def connection_lost(self, reason: Exception | None) -> None:
        """Of a child that has ended, or of a message that could not be read, which ends the
        child."""
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
        """How the child has ended, in words; it ends now if it has not."""
        # which changes nothing of how one ended that nobody has waited for
        os.kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        names = {each.value: each.name for each in signal.Signals}  # those of real time have none
        return f"with code {code}" if code >= 0 else f"by {names.get(-code, f'signal {-code}')}"

    def close(self) -> None:
        """Ends the child at once: it has nothing to save."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()
        self.socket.close()
        if self.error is None:
            self.reaped()


class SchedulerClient:
    """The `Client` of the scheduler `name` in the child. All its methods are called in the loop."""

    def __init__(
        self, process: SchedulerProcess, name: str, admission: Admission, events: SchedulerEvents
    ):
        self.process = process
        self.name = name
        self.admission = admission
        self.events = events
        self.tickets: dict[int, Ticket] = {}  # that have no whole answer yet, by number
        self.numbers = itertools.count()
        self.rows_sent = 0
        self.rows_taken = 0  # of them, by workers or given up, as far as it is known here
        self.running = 0
        self.is_ended = False

    @property
    def waiting(self) -> int:
        """Rows that no worker has taken yet; those on the way to the child too."""
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
        """End at once: the child ends with what is left."""
        self.is_ended = True
        is_finished = not self.tickets
        self.fail()
        return is_finished

    def received(self, counts: tuple, events: tuple, news: list[tuple]) -> None:
        """A message of the child's `Outbox`."""
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
        if ticket is not None:  # it was not cancelled meanwhile
            ticket.answers = answers or []
            ticket.error = error
            ticket.receive(events, is_over)

    def fail(self) -> None:
        """All that have no answer."""
        for number in list(self.tickets):
            self.tell(number, [], None, draining())


# ---------------------------------------------------------------------------------------- the child


def forked(run: Callable[[], None]) -> int:
    """The process that does `run`, and ends with it. Signals to end it are the parent's, and
    ignored."""
    # as who started us may have it: nobody could wait for a child
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with warnings.catch_warnings():
        # of threads, which are numpy's, and end before a fork
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
    """Serves what comes from the parent, until that has ended or closed its own socket."""
    parents.close()
    die_with_parent()
    threading.excepthook = end
    os.nice(NICE)
    sys.setswitchinterval(SWITCH_INTERVAL)
    Child(connection).run()


def die_with_parent() -> None:
    """Even where this process was stopped, and sees nothing of what its sockets say. Linux has
    it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end(failure: threading.ExceptHookArgs) -> None:
    """For what a worker fails of beside its runs, as of memory for an answer: without it, nobody
    would get one."""
    try:
        sys.excepthook(
            failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback
        )
    finally:
        os._exit(1)


class Child:
    """Schedulers by name, for who asks over `connection`."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.outboxes: dict[str, Outbox] = {}
        self.lock = threading.Lock()  # of what is sent

    def run(self) -> None:
        """Until there is nobody at the other end."""
        with self.connection.makefile("rb") as stream, contextlib.suppress(ConnectionError):
            while (message := read(stream)) is not None:
                kind, name, *content = message
                if kind == "open":
                    self.open(name, *content)
                else:
                    getattr(self.outboxes[name], kind)(*content)

    def send(self, *message: Any) -> None:
        # who asked has ended, and `run` sees it
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
    """What the parent hears of one scheduler, which counts its events here."""

    def __init__(self, send: Callable[..., None], arguments: dict[str, Any]):
        self._send = send
        self.scheduler = opened_scheduler(events=self, **arguments)
        self.tickets: dict[int, Ticket] = {}
        self.rows_put = 0
        self.lock = threading.Lock()
        self.events: tuple[deque, ...] = (deque(), deque(), deque())
        self.news: list[tuple] = []
        self.sent_at = 0.0

    # What the parent asks.

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

    # What workers tell.

    def joined(self, seconds_waited: float) -> None:
        self.events[0].append((seconds_waited,))

    def first_token(self, seconds: float) -> None:
        self.events[1].append((seconds,))

    def stepped(self, rows: int, tokens: int) -> None:
        self.events[2].append((rows, tokens))
        if not rows or time.perf_counter() > self.sent_at + LATE:
            self.flush()

    def call(self, function: Callable[[list], None], news: list) -> None:
        """As `call_soon_threadsafe` of a loop: `function` gives what each ticket has to tell."""
        with self.lock:
            self.news = []
            function(news)
            self._flush(self.news)

    def flush(self) -> None:
        with self.lock:
            self._flush([])

    def _flush(self, news: list[tuple]) -> None:
        """A message. A worker may add to the events meanwhile."""
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
    """Return a started scheduler, with `sizes` among the arguments of its `Admission`. Raise what
    `Runtime` raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parent opens the export too, without its graphs
        info = open_export(directory, dtype)
    model = open_for_workers(info, threads)
    scheduler = Scheduler(open_batches(Admission(info, threads=threads, **sizes), model), events)
    scheduler.start()
    return scheduler


def portable(error: Exception) -> Exception:
    """`error` as another process can have it, without what it came from."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(str(error))
    return error


def read(stream: BinaryIO) -> Any:
    """The next message; `None` at the end of the stream."""
    header = stream.read(HEADER)
    content = stream.read(int.from_bytes(header, "little"))
    return pickle.loads(content) if content else None
