"""Open connections: how many, how long one may be without a request, and how long a header may be. uvicorn has no limit for a
header, neither of time nor of size, and none for what a client does not read."""

import resource
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEADER = 64 * 1024  # bytes, beyond what came with its first ones
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
AT_ONCE = 16  # connections that are closed together where there are too many
PIPELINED = 16  # requests of one connection that may wait for the one before
SPARE = 128  # files that are open besides connections


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
        if len(connection.connections) >= self.most:
            self.look(connection.connections)
            for oldest in sorted(self._since, key=lambda each: self._since[each][1])[:AT_ONCE]:
                oldest.transport.abort()
        limit_header(connection)
        return connection

    def sweep(self, connections: set[Any]) -> None:
        """To be called about once a second."""
        self.look(connections)
        now = self._clock()
        for connection, (_, since) in self._since.items():
            has_unread = connection.transport.get_write_buffer_size() > 0
            if now - since > (self.unread if has_unread else self.idle):
                connection.transport.abort()
        for connection in list(connections):
            if len(connection.pipeline) > PIPELINED:
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


def limit_header(connection: HttpToolsProtocol) -> None:
    """Counts the bytes of a header that has begun and is not whole."""
    feed, last, size = connection.data_received, None, 0

    def receive(data: bytes) -> None:
        nonlocal last, size
        feed(data)
        if (scope := connection.scope) is None or "method" in scope:  # which it has when its header is whole
            return
        last, size = scope, size + len(data) if last is scope else 0
        if size > MOST_HEADER and not connection.transport.is_closing():
            connection.transport.write(TOO_LARGE)
            connection.transport.close()

    connection.data_received = receive  # type: ignore[method-assign]


def files_for(connections: int) -> int:
    """How many connections this process may open, at most `connections`; it raises its limit of open files for them."""
    wanted = connections + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - SPARE))
