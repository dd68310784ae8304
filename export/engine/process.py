"""Engines in a child process: the loop of the child, and the parent's side of each engine.

Both send pickled tuples over a socket. Those of the parent begin with a kind of message and the
name of an engine, those of the child with the name.
"""

import asyncio
import contextlib
import functools
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from .forking import die_with_parent, fork, share_heap, trim_heap
from .groups import start_request
from .inputs import Activity, GenerationInput, Update
from .limits import Admission, shutting_down
from .loop import SWITCH_INTERVAL, Engine, Observe, Receive
from .model import open_export
from .queue import ClientRequest

# The kind of a message that the child answers with itself. In messages of the child it stands in
# place of an engine's name: alone for a ping, before a name and an error for an answer to `ask`.
PING = ""
HEADER = 4  # bytes of the length before each message
MAX_DELAY = 0.005  # seconds after which activities are sent to the parent without an update
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
                elif kind in ("open", "close"):
                    # in a thread, as the other engines go on meanwhile
                    work = functools.partial(self.answer, getattr(self, kind), name, *content)
                    threading.Thread(target=work, daemon=True).start()
                else:
                    getattr(self.outboxes[name], kind)(*content)

    def send(self, *message: Any) -> None:
        # the parent has exited, and `run` will return
        with self.lock, contextlib.suppress(ConnectionError):
            self.connection.sendall(frame(message))

    def answer(self, function: Callable[..., None], name: str, *content: Any) -> None:
        """Call `function` for the engine `name`, and send the parent its error or None."""
        try:
            function(name, *content)
        except Exception as error:
            self.send(PING, name, portable(error))
        else:
            self.send(PING, name, None)

    def open(self, name: str, *content: Any) -> None:
        engine = open_engine(*content)
        if not any(outbox.requests for outbox in self.outboxes.values()):
            gc.collect()  # what is frozen is never collected: neither garbage nor requests
            gc.freeze()
        self.outboxes[name] = Outbox(functools.partial(self.send, name), engine)

    def close(self, name: str) -> None:
        self.outboxes.pop(name).engine.close()
        trim_heap()


class Outbox:
    """The updates and activities of `engine`, which this starts. They go to the parent with `send`,
    which sends its arguments as one message."""

    def __init__(self, send: Callable[..., None], engine: Engine):
        self.send = send
        self.engine = engine
        self.requests: dict[int, ClientRequest] = {}  # unanswered ones
        self.num_rows_received = 0
        self.activities: deque[Activity] = deque()
        self.updates: deque[tuple[int, Update]] = deque()
        self.lock = threading.Lock()
        self.sent_at = 0.0
        engine.start(self.observe)

    # Messages of the parent.

    def put(
        self, number: int, inputs: Sequence[GenerationInput], streams: bool, arrived_at: float
    ) -> None:
        receive = functools.partial(self.receive, number)
        self.requests[number] = request = start_request(inputs, receive, streams, arrived_at)
        self.num_rows_received += request.num_rows
        self.engine.queue.put(request)

    def cancel(self, number: int) -> None:
        if (request := self.requests.pop(number, None)) is not None:
            self.engine.queue.cancel(request)
        self.flush()

    # What workers do.

    def receive(self, number: int, update: Update) -> None:
        if update.is_last:
            self.requests.pop(number, None)
        error = update.error and portable(update.error)  # which goes through the socket
        self.updates.append((number, update._replace(error=error)))

    def observe(self, activity: Activity) -> None:
        self.activities.append(activity)
        is_due = time.perf_counter() > self.sent_at + MAX_DELAY
        if self.updates or is_due or not self.engine.running:
            self.flush()

    def flush(self) -> None:
        """Send one message to the parent: the numbers of rows that have left the queue and that run
        now, and the activities and updates since the last message."""
        with self.lock:
            self.sent_at = time.perf_counter()
            counts = self.num_rows_received - self.engine.waiting, self.engine.running
            self.send(counts, pop_all(self.activities), pop_all(self.updates))


def pop_all(values: deque) -> list:
    """Remove and return all `values`. Workers may add some meanwhile."""
    return [values.popleft() for _ in range(len(values))]


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


MAX_SILENCE = 2.0  # seconds that the child may take to answer a ping


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
        self.engines: dict[str, ProcessEngine] = {}
        # called if the child exits by itself
        self.failed: Callable[[ChildProcessError], object] = lambda error: None
        self.error: ChildProcessError | None = None
        self._buffer = bytearray()
        self._asked_at: float | None = None  # time of a ping without a message since
        self._asked: dict[str, asyncio.Future[None]] = {}  # what `ask` waits for, by engine
        self._transport: asyncio.WriteTransport | None = None
        self._is_closing = False

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=self.socket)

    async def open(
        self, name: str, directory: str, dtype: str | None, sizes: dict[str, Any]
    ) -> "ProcessEngine":
        """Open an engine in the child and return its side here, not started, once the model is
        loaded.

        Calls for one name must not overlap, also not with `close_engine`.

        Args:
            name: identifies the engine; it must be unique.
            directory: the folder of the export.
            dtype: the dtype of the weights, `None` for the default of the export.
            sizes: further arguments of `Admission` by name, such as `slots`.

        Raises:
            Exception: any error that `open_engine` raises.
            ChildProcessError: if the child has exited.
        """
        await self.ask("open", name, directory, dtype, sizes)
        self.engines[name] = ProcessEngine(self, name)
        return self.engines[name]

    async def close_engine(self, name: str) -> None:
        """Close an engine that has no requests, and free its memory in the child.

        Raises:
            ChildProcessError: if the child has exited.
        """
        self.engines.pop(name).close()
        await self.ask("close", name)

    async def ask(self, kind: str, name: str, *content: Any) -> None:
        """Send a message and wait for the child's answer. Raise the error in it."""
        self._asked[name] = asyncio.get_running_loop().create_future()
        try:
            self.send((kind, name, *content))
            await self._asked[name]
        finally:
            del self._asked[name]

    def send(self, message: tuple) -> None:
        """Send a message to the child: a tuple of its kind, the name of an engine, and arguments.

        Raises:
            ChildProcessError: if the child has exited.
        """
        if self.error is not None:
            raise self.error
        assert self._transport is not None  # `connect` was called
        self._transport.write(frame(message))

    def ping(self) -> None:
        """Ask the child for a sign of life, unless it has not answered yet or has exited."""
        if self._asked_at is None and self.error is None:
            self._asked_at = time.monotonic()
            self.send((PING, ""))

    @property
    def seconds_silent(self) -> float:
        """Seconds since a ping that the child has not answered, 0 if it has answered. A child that
        was stopped, for example by SIGSTOP, is silent."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

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
        if name in self.engines:
            self.engines[name].received(*content)
        elif name == PING and content:
            self.answered(*content)

    def answered(self, name: str, error: Exception | None) -> None:
        """Give the answer about the engine `name` to `ask`, which may have been cancelled."""
        asked = self._asked.get(name)
        if asked is not None and not asked.done():
            asked.set_result(None) if error is None else asked.set_exception(error)

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
        for name in list(self._asked):
            self.answered(name, self.error)
        for engine in self.engines.values():
            engine.close()
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

    observe: Observe

    def __init__(self, process: EngineProcess, name: str):
        self.process = process
        self.name = name
        self.numbers = itertools.count()
        self.receivers: dict[int, Receive] = {}  # of unanswered requests, by number
        self.num_rows_sent = 0
        self.num_rows_started = 0  # or cancelled, as last reported by the child
        self.running = 0
        self.is_closed = False

    @property
    def waiting(self) -> int:
        """The number of rows in the queue, including those on their way to the child."""
        return self.num_rows_sent - self.num_rows_started

    def start(self, observe: Observe) -> None:
        self.observe = observe

    def put(
        self, inputs: Sequence[GenerationInput], receive: Receive, streams: bool
    ) -> Callable[[], None]:
        number = next(self.numbers)
        self.process.send(("put", self.name, number, inputs, streams, time.perf_counter()))
        self.receivers[number] = receive
        self.num_rows_sent += sum(row.num_rows for row in inputs)
        return functools.partial(self.cancel, number)

    def cancel(self, number: int) -> None:
        if self.receivers.pop(number, None) is not None and self.process.error is None:
            self.process.send(("cancel", self.name, number))

    def received(
        self, counts: tuple[int, int], activities: list[Activity], updates: list[tuple[int, Update]]
    ) -> None:
        """Handle one message of the child's `Outbox`.

        Args:
            counts: the numbers of rows that have left the queue so far, and that run now.
            activities: what the workers did since the last message.
            updates: what is new of requests, by their numbers.
        """
        self.num_rows_started, self.running = counts
        for activity in activities:
            self.observe(activity)
        for number, update in updates:
            forget = self.receivers.pop if update.is_last else self.receivers.get
            if (receive := forget(number, None)) is not None:  # else it was cancelled
                receive(update)

    def close(self) -> None:
        """Accept no more requests and fail those that are not answered with a RequestError. The
        child computes them until it ends."""
        self.is_closed = True
        receivers, self.receivers = self.receivers, {}
        for receive in receivers.values():
            receive(Update([], None, shutting_down()))
