"""Limits of what clients send: of HTTP connections, and of JSON bodies before they are parsed.

Connections have limits of their number, their idle time, and the size and time of a header. uvicorn
limits neither the header nor the time that a client may leave a response unread.

Parsers of JSON keep the GIL: 4 MB of `[],[],…` would stop all other requests for half a second, and
take 22 times its size. So the values are counted in the bytes, which takes milliseconds.
"""

import asyncio
import codecs
import functools
import json
import re
import sys
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import httptools
import numpy as np
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import RequestError

MAX_HEADER_SIZE = 64 * 1024  # bytes, not counting the packet that begins the header
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: "
    b"close\r\nContent-Length: "
    b"0\r\n\r\n"
)
# a name or an address, and a port; empty for a target without a host (RFC 3986, 3.2)
HOST = re.compile(rb"(\[[\w:.%~-]+\]|[\w.~!$&'()*+,;=%-]*)(:\d*)?")
MAX_PIPELINED = 16  # requests of one connection that may wait for an earlier response
SPARE_FILES = 128  # open files besides connections


class Connection(HttpToolsProtocol):
    """A uvicorn connection that limits the size of a header and the number of pipelined requests.

    It is closed if a limit is exceeded, with an error response if the header is too large. Trailers
    count as headers.

    A request to upgrade to another protocol is answered as if it did not ask. Java's client asks
    for HTTP/2 in this way, and httptools would omit the body.
    """

    _size = 0  # bytes since the last header or part of a body
    _data = _again = b""  # bytes being parsed, and bytes to parse after them
    _fault = ""  # the reason of a response 400, if it is known

    def data_received(self, data: bytes) -> None:
        self.server_state.default_headers = date_header(int(time.time()))
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
        # the scope has a method once the header is complete; later headers are trailers
        if "method" not in self.scope:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request. Raises ValueError, which becomes a response 400, for a Host that is
        invalid, occurs twice or is missing in HTTP/1.1 (RFC 9112, 3.2)."""
        self._size = 0
        hosts = [value for name, value in self.headers if name == b"host"]
        is_missing = not hosts and self.parser.get_http_version() == "1.1"
        if is_missing or len(hosts) > 1 or not all(map(HOST.fullmatch, hosts)):
            self._fault = f"the request has the hosts {hosts!a:.200}, expected one valid Host"
            raise ValueError(self._fault)
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self._fault or msg)

    def on_body(self, body: bytes) -> None:
        self._size = 0
        super().on_body(body)

    def _should_upgrade(self) -> bool:
        """Return True unless the method is CONNECT. uvicorn asks this for a request to upgrade to
        another protocol, and then calls `handle_websocket_upgrade`."""
        return self.parser.get_method() != b"CONNECT"

    def handle_websocket_upgrade(self) -> None:
        """Parse the request again without the header `Upgrade`, so that it is answered like any
        other request."""
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        [end] = upgrade.args  # end of the header in `_data`
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self._again = b"\r\n".join([*lines, b"", self._data[end:]])


@functools.lru_cache(1)
def date_header(seconds: int) -> list[tuple[bytes, bytes]]:
    """Return the header Date of a response at this time, in `seconds` since 1970."""
    return [(b"date", formatdate(seconds, usegmt=True).encode())]


class RejectedConnection(asyncio.Protocol):
    """A connection beyond the limit. It is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class Connections:
    """The open connections of one server.

    Args:
        max_connections: open at once; further connections are closed.
        idle: seconds without a complete request header after which a connection is closed.
        unread: seconds after which a connection is closed if the client does not read a response.
        opened: called for each new connection.
    """

    def __init__(
        self,
        max_connections: int,
        idle: float,
        unread: float,
        opened: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_connections = max_connections
        self.idle = idle
        self.unread = unread
        self._opened = opened
        self._clock = clock
        # last request of each idle connection, and the time since when it is idle
        self._since: dict[HttpToolsProtocol, tuple[Any, float]] = {}

    def open(self, **settings: Any) -> asyncio.Protocol:
        """Return the asyncio protocol of a new connection; it closes at once if there are too many.
        uvicorn calls this, with the `settings` of its own protocol."""
        self._opened()
        is_full = len(settings["server_state"].connections) >= self.max_connections
        return RejectedConnection() if is_full else Connection(**settings)

    def sweep(self, connections: set[Any]) -> bool:
        """Close those of the open `connections` that are idle or do not read for too long. Return
        True if there are any: call it about once a second then."""
        self.find_idle(connections)
        now = self._clock()
        for connection, (_, since) in self._since.items():
            has_unread = connection.transport.get_write_buffer_size() > 0
            if now - since > (self.unread if has_unread else self.idle):
                connection.transport.abort()
        return bool(connections)

    def find_idle(self, connections: set[Any]) -> None:
        """Record which of the open `connections` are idle, and since when.

        A connection with the same last request as in the call before stayed idle.
        """
        now = self._clock()
        before, self._since = self._since, {}
        for connection in connections:
            request = connection.cycle
            if request is None or request.response_complete or connection.transport.is_closing():
                last, since = before.get(connection, (request, now))
                self._since[connection] = (request, since if last is request else now)


def available_connections(connections: int) -> int:
    """Raise the limit of open files as far as `connections` need and the system allows.

    Returns the number of connections that fit, at most `connections`.
    """
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


# ------------------------------------------------------------------------------------ JSON bodies

# A body of the maximum size may have a value per 16 bytes, and one of STRUCTURE per 256 bytes. The
# first allows images in JSON, and one as large is parsed in 30 ms.
BYTES_PER_VALUE, BYTES_PER_CONTAINER = 16, 256
STRUCTURE = (b"[", b"{", b":")  # begin an array, an object, and the value of a field
CONSTANTS = re.compile(rb"-?Infinity|NaN")  # values that `json.loads` accepts and JSON does not
SURROGATE_BITS, HIGH, LOW = 0xFC00, 0xD800, 0xDC00  # the bits that tell halves of surrogate pairs
RAW_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


def json_text(body: bytes) -> bytes:
    """Return the JSON array or object in `body` as UTF-8, or empty bytes if it is something else.

    `body` may be in UTF-16 or UTF-32, as for `json.loads`. A body that only begins like JSON is
    returned too.
    """
    encoding = json.detect_encoding(body)
    if encoding != "utf-8":
        body = body.decode(encoding, "replace").encode("utf-8", "replace")
    text = body.removeprefix(codecs.BOM_UTF8)
    return text if text.lstrip()[:1] in (b"{", b"[") else b""


def check_size(text: bytes, max_body: int) -> None:
    """Check the number of values, and that of arrays, objects and fields, in the JSON `text`.

    Raises:
        RequestError: 413 if one exceeds its limit, which follows from `max_body`, the maximum size
            of a body in bytes.
    """
    limits = {
        "values": ((b",",), max_body // BYTES_PER_VALUE),
        "arrays, objects and fields": (STRUCTURE, max_body // BYTES_PER_CONTAINER),
    }
    if all(count(text, symbols) <= limit for symbols, limit in limits.values()):
        return
    outside = outside_strings(text)
    for name, (symbols, limit) in limits.items():
        if (number := count(outside, symbols)) > limit:
            raise RequestError(
                413, f"the body has more than {number} {name}, expected at most {limit}"
            )


def check_values(text: bytes, validation: int) -> None:
    """Check that the JSON `text` has no NaN, Infinity or half of a surrogate pair, which
    `json.loads` accepts. Text that is not JSON passes, or is rejected for the same reasons.

    Raises:
        RequestError: with the status `validation`, if it has one of them.
    """
    is_suspicious = b"NaN" in text or b"Infinity" in text
    if is_suspicious and (constant := CONSTANTS.search(outside_strings(text))):
        raise RequestError(
            validation,
            f"the body has the value {constant[0].decode()}, expected numbers that JSON allows",
        )
    if surrogate := lone_surrogate(text):
        raise RequestError(
            validation,
            f"the body has the lone surrogate {surrogate!a}, expected Unicode characters",
        )


def count(text: bytes, symbols: tuple[bytes, ...]) -> int:
    return sum(map(text.count, symbols))


def outside_strings(text: bytes) -> bytes:
    """Return what is outside of the strings in the JSON `text`, with one quote for each string."""
    text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    values = np.frombuffer(text, np.uint8)
    is_inside = np.bitwise_xor.accumulate(values == ord('"'))
    return values[~is_inside].tobytes()


def lone_surrogate(text: bytes) -> str | None:
    """Return the first half of a surrogate pair without its other half in the JSON `text`, or None.

    It is written as bytes or as an escape."""
    if b"\xed" in text and (raw := RAW_SURROGATE.search(text)):
        return raw[0].decode("utf-8", "surrogatepass")
    if rb"\ud" not in text and rb"\uD" not in text:
        return None
    try:  # each escape becomes a character, and each other byte one below 256
        letters = np.array([text.decode("raw_unicode_escape")]).view(np.uint32)
    except UnicodeDecodeError:  # no escape of JSON, which the endpoint reports
        return None
    kinds = np.pad(letters & SURROGATE_BITS, 1)
    is_lone = (kinds[:-1] == HIGH) != (kinds[1:] == LOW)
    place = int(is_lone.argmax())
    return chr(letters[place - (kinds[place] == HIGH)]) if is_lone[place] else None
