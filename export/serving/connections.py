"""The limits of open connections: their number, the time without a request, and the size and time
of a header. uvicorn limits neither the time nor the size of a header, nor what a client does not
read."""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_SIZE = 64 * 1024  # bytes, beyond what came with its first ones
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: "
    b"close\r\nContent-Length: "
    b"0\r\n\r\n"
)
MAX_PIPELINED = 16  # requests of one connection that may wait for the one before
SPARE_FILES = 128  # files that are open besides connections


class Connection(HttpToolsProtocol):
    """A uvicorn connection with limits on the bytes of an incomplete header and on bytes without a
    part of a body. Trailers count as headers. The requests that wait for the one before are limited
    too.

    A request that asks for another protocol, as Java's client does for HTTP/2, is answered as if it
    did not. httptools would leave out its body.
    """

    _size = 0  # bytes without a sign of life
    _data = _again = b""  # bytes being read, and bytes to read after them

    def data_received(self, data: bytes) -> None:
        self._again = data
        self._size += len(data)
        while self._again and self.parser is not None and len(self.pipeline) <= MAX_PIPELINED:
            self._data, self._again = self._again, b""
            super().data_received(self._data)
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
        if self._size > MAX_HEADER_SIZE and not self.transport.is_closing():
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._size = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # which it has when its header is whole; nobody reads trailers
        if "method" not in self.scope:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._size = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._size = 0
        super().on_body(body)

    def _should_upgrade(self) -> bool:
        """Return True if `handle_websocket_upgrade` gets the request in place of the application,
        which is so for requests to upgrade but not for CONNECT."""
        return self.parser.get_method() != b"CONNECT"  # CONNECT asks for no other protocol

    def handle_websocket_upgrade(self) -> None:
        """Read the request again without its upgrade."""
        wish = sys.exception()
        assert isinstance(wish, httptools.HttpParserUpgrade)
        [end] = wish.args  # end of the header in `_data`
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self._again = b"\r\n".join([*lines, b"", self._data[end:]])


class RejectedConnection(asyncio.Protocol):
    """A connection beyond the limit, which is closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class Connections:
    """The open connections of one server.

    Args:
        most: open at once; those that come above are closed.
        idle: seconds without a request, of which the header may have begun, until a connection is
            closed.
        unread: seconds that an answer may lie here because the client does not read it.
    """

    def __init__(
        self,
        max_connections: int,
        idle: float,
        unread: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_connections = max_connections
        self.idle = idle
        self.unread = unread
        self._clock = clock
        # the last request, and since when there is no other
        self._since: dict[HttpToolsProtocol, tuple[Any, float]] = {}

    def open(self, **settings: Any) -> asyncio.Protocol:
        """Return the protocol of a new connection, which uvicorn asks for."""
        is_full = len(settings["server_state"].connections) >= self.max_connections
        return RejectedConnection() if is_full else Connection(**settings)

    def sweep(self, connections: set[Any]) -> None:
        """Close connections that are idle or do not read. Call it about once a second."""
        self.look(connections)
        now = self._clock()
        for connection, (_, since) in self._since.items():
            has_unread = connection.transport.get_write_buffer_size() > 0
            if now - since > (self.unread if has_unread else self.idle):
                connection.transport.abort()

    def look(self, connections: set[Any]) -> None:
        """Find connections without a request, and since when, by whether they had the same request
        before."""
        now = self._clock()
        before, self._since = self._since, {}
        for connection in connections:
            request = connection.cycle
            if request is None or request.response_complete or connection.transport.is_closing():
                last, since = before.get(connection, (request, now))
                self._since[connection] = (request, since if last is request else now)


def available_connections(connections: int) -> int:
    """Return how many connections this process may open, at most `connections`. Increase the limit
    of open files as far as the system allows."""
    import resource  # not available on Windows

    required = connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < required:
        soft = required if hard == resource.RLIM_INFINITY else min(required, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        connections
        if soft == resource.RLIM_INFINITY
        else max(1, min(connections, soft - SPARE_FILES))
    )
