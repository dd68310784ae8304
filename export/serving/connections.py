"""Open connections: how many, how long one may be without a request, and how long a header may be. uvicorn has no limit for a
header, neither of time nor of size, and none for what a client does not read."""

import asyncio
import contextlib
import resource
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEADER = 64 * 1024  # bytes, beyond what came with its first ones
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
AT_ONCE = 16  # connections that are closed together where there are too many
PIPELINED = 16  # requests of one connection that may wait for the one before
SPARE = 128  # files that are open besides connections
TAKEN = 256  # connections at most between two looks at those that are there


class Connections:
    """Of one server.

    Args:
        most: open at once; above, those that have been without a request for longest are closed.
        idle: seconds without a request, of which the header may have begun, until a connection is closed.
        unread: seconds that an answer may lie here because the client does not read it.
    """

    def __init__(self, most: int, idle: float, unread: float, clock: Callable[[], float] = time.monotonic):
        self.most = most
        self.idle = idle
        self.unread = unread
        self._clock = clock
        self._since: dict[HttpToolsProtocol, tuple[Any, float]] = {}  # the last request, and since when there is no other

    def open(self, **settings: Any) -> HttpToolsProtocol:
        """What uvicorn calls for a new connection."""
        connection = HttpToolsProtocol(**settings)
        if (more := len(connection.connections) - self.most) >= 0:  # many, where they were opened in one turn of the loop
            self.look(connection.connections)
            for oldest in sorted(self._since, key=lambda each: self._since[each][1])[: max(AT_ONCE, more + 1)]:
                oldest.transport.abort()
        limit(connection)
        return connection

    def sweep(self, connections: set[Any]) -> None:
        """To be called about once a second."""
        self.look(connections)
        now = self._clock()
        for connection, (_, since) in self._since.items():
            has_unread = connection.transport.get_write_buffer_size() > 0
            if now - since > (self.unread if has_unread else self.idle):
                connection.transport.abort()

    def look(self, connections: set[Any]) -> None:
        """Finds the connections that are without a request, and since when; that they had the same one before tells it."""
        now = self._clock()
        before, self._since = self._since, {}
        for connection in connections:
            request = connection.cycle
            if request is None or request.response_complete or connection.transport.is_closing():
                last, since = before.get(connection, (request, now))
                self._since[connection] = (request, since if last is request else now)


def limit(connection: HttpToolsProtocol) -> None:
    """Counts the bytes of a header that has begun and is not whole, and the requests that wait for the one before."""
    feed, of_connection = HttpToolsProtocol.data_received, weakref.ref(connection)  # which frees it at once when it is over
    last, size = None, 0

    def receive(data: bytes) -> None:
        nonlocal last, size
        connection = of_connection()
        assert connection is not None  # who calls has it
        feed(connection, data)
        if len(connection.pipeline) > PIPELINED:
            connection.transport.abort()
        if (scope := connection.scope) is None or "method" in scope:  # which it has when its header is whole
            return
        last, size = scope, size + len(data) if last is scope else 0
        if size > MOST_HEADER and not connection.transport.is_closing():
            connection.transport.write(TOO_LARGE)
            connection.transport.close()

    connection.data_received = receive  # type: ignore[method-assign]


@contextlib.contextmanager
def taking_all(listener: socket.socket, opened: Callable[[], asyncio.Protocol]) -> Iterator[None]:
    """Takes the connections that come to `listener`. So does its server, but uvloop's takes one in each turn of the loop: of
    many that come at once the others would wait in the kernel, where nobody refuses them, until it forgets them."""
    loop = asyncio.get_running_loop()
    opening: set[asyncio.Task] = set()

    def over(task: asyncio.Task) -> None:
        opening.discard(task)
        if not task.cancelled():
            task.exception()  # of a client that has gone again

    def take() -> None:
        with contextlib.suppress(OSError):  # nobody waits any more
            for _ in range(TAKEN):
                connection, _ = own.accept()
                connection.setblocking(False)
                opening.add(task := loop.create_task(loop.connect_accepted_socket(opened, connection)))
                task.add_done_callback(over)

    with listener.dup() as own:
        own.setblocking(False)
        loop.add_reader(own, take)
        try:
            yield
        finally:
            loop.remove_reader(own)


def files_for(connections: int) -> int:
    """How many connections this process may open, at most `connections`; it raises its limit of open files for them."""
    wanted = connections + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - SPARE))
