"""The ASGI layer between the server and the application: limits, tokens, request ids, cancellation,
metrics and log lines."""

import asyncio
import hmac
import itertools
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from ..engine.limits import shutting_down
from ..errors import RequestError
from . import health
from .app import MODEL_IN_PATH, Errors
from .generation import call_off_loop
from .health import Lifecycle
from .limits import check_size, check_values, json_text
from .models import ServedModels
from .observability import Log, Metrics, format_error
from .settings import Settings

# reasons to cancel a request: disconnect, slow body, timeout, shutdown
GONE, SLOW, LATE, ENDED = "gone", "slow", "late", "ended"
UNWATCHED = 0.1  # seconds that a request runs before a disconnected client is noticed
CLIENT_GONE = 499  # in metrics and in the log only
JSON_COST = 64  # bytes of JSON that are checked in the time that a character is tokenized
JSON_LENGTH = b"inference-header-content-length"  # of the Open Inference Protocol
LENGTH = re.compile(rb"\d{1,18}")
REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class Exchange:
    """One request and its response. It wraps ASGI's `receive` and `send`, and can cancel the
    application's task.

    The application sees a HEAD request as GET; uvicorn omits the body of the response
    (RFC 9110)."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.method = scope["method"]
        self.scope = {**scope, "method": "GET"} if self.method == "HEAD" else scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.id = b""
        self.started = time.perf_counter()
        self.until = math.inf  # time at which it is cancelled with `reason`
        self.reason = SLOW
        self.watcher: asyncio.Task | None = None
        self.status = 0
        self.is_complete = False
        self.cancelled: str | None = None
        self.body: bytes | None = b""
        self._receive = receive
        self._send = send
        self._task = asyncio.current_task()
        self._gone = asyncio.Event()

    async def receive(self) -> Message:
        """Return the body as one ASGI message. Later calls wait until the request is cancelled, for
        example because the client has disconnected, and return `http.disconnect`."""
        if self.body is not None:
            body, self.body = self.body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a message of the application. If the request was cancelled, drop the message and
        re-raise the cancellation at the application's next await, so that it closes its
        generators."""
        try:
            await (self.answer(message) if self.cancelled is None else asyncio.sleep(0))
        except asyncio.CancelledError:
            if self.cancelled is None:
                raise
        if self.cancelled is not None and self._task is not None:
            self._task.cancel()

    async def answer(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {
                **message,
                "headers": [*message.get("headers", ()), (b"x-request-id", self.id)],
            }
        elif not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)

    async def read(self, max_size: int) -> None:
        """Read the whole body into `body`.

        Raises:
            RequestError: 413 if it has more than `max_size` bytes.
            ClientDisconnect: if the client has disconnected.
        """
        # uvicorn has checked that the header is a number
        length = self.headers.get(b"content-length")
        if length is not None and int(length) > max_size:
            raise too_large(int(length), max_size)
        chunks, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > max_size:
                raise too_large(size, max_size)
            if not message.get("more_body", False):
                break
        self.body = chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def json_text(self) -> bytes:
        """Return the JSON in `body`, without binary data after it, or empty bytes without JSON."""
        length = self.headers.get(JSON_LENGTH, b"")
        body = self.body or b""
        # the endpoint rejects another length
        return json_text(body[: int(length)] if LENGTH.fullmatch(length) else body)

    async def watch(self) -> None:
        """Cancel the application when the client disconnects before the response is complete.

        This needs a task, so only requests that take longer than `UNWATCHED` are watched.
        """
        while (await self._receive())["type"] != "http.disconnect":
            pass  # the rest of the body, which the application does not read
        if not self.is_complete:
            self.cancel(GONE)

    def cancel(self, reason: str) -> None:
        if self.cancelled is None and self._task is not None:
            self.cancelled = reason
            self._gone.set()
            self._task.cancel()


class Frame:
    """An ASGI application that adds limits, authorization, metrics and log lines to `app`.

    Args:
        app: the application, from `create_app`, whose state it reads.
        token: the token that clients must send; `None` if no token is required.
    """

    def __init__(
        self,
        app: FastAPI,
        log: Log,
        token: bytes | None = None,
    ):
        self.app = app
        self.errors: Errors = app.state.errors
        self.settings: Settings = app.state.settings
        self.lifecycle: Lifecycle = app.state.lifecycle
        self.metrics: Metrics = app.state.metrics
        self.models: ServedModels = app.state.models
        self.log = log
        self.token = token
        self.running: set[Exchange] = set()
        self._started = asyncio.Event()  # a request runs
        self._prefix = os.urandom(4).hex()
        self._numbers = itertools.count(1)
        self.metrics.in_flight.set_function(lambda: len(self.running))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        exchange = Exchange(scope, receive, send)
        exchange.id = self._id(exchange)
        try:
            if scope["path"] in health.PATHS:
                await self.app(exchange.scope, receive, exchange.send)
            else:
                await self._limited(exchange)
        except ClientDisconnect:
            pass  # nobody reads a response; `_note` counts it as CLIENT_GONE
        except Exception as error:
            self.metrics.failed()
            self.log.write(
                "error",
                str(error) or type(error).__name__,
                id=exchange.id.decode(),
                error=format_error(error),
            )
            if not exchange.status:
                await self._reject(exchange, error)
        finally:
            self._note(exchange, time.perf_counter() - exchange.started)

    async def _limited(self, exchange: Exchange) -> None:
        try:
            self._admit()
            self.running.add(exchange)
            self._started.set()
            check_encoding(exchange.headers)
            check_origin(exchange.method, exchange.headers, self.settings.cors_origin)
            exchange.until = exchange.started + self.settings.body_timeout
            await exchange.read(self.settings.max_body)
            text = exchange.json_text()
            cost = len(text) // JSON_COST
            await call_off_loop(cost, check_size, text, self.settings.max_body)
            await self._authorize(exchange)
            if match := MODEL_IN_PATH.match(exchange.scope["path"]):
                self.models.find(match[1])
            validation = self.errors.protocol(exchange.scope["path"]).validation
            await call_off_loop(cost, check_values, text, validation)
            exchange.until, exchange.reason = time.perf_counter() + self.settings.timeout, LATE
            # Starlette then does not watch the client of a stream; `Exchange.watch` does
            exchange.scope["asgi"] = {**exchange.scope["asgi"], "spec_version": "2.4"}
            await self.app(exchange.scope, exchange.receive, exchange.send)
        except RequestError as rejection:
            await self._reject(exchange, rejection)
        except asyncio.CancelledError:
            await self._end(exchange)
        finally:
            self.running.discard(exchange)
            if exchange.watcher is not None:
                exchange.watcher.cancel()

    async def wait(self) -> None:
        """Wait until a request runs."""
        if not self.running:
            self._started.clear()
            await self._started.wait()

    def sweep(self) -> None:
        """Cancel requests that are too late, and watch the clients of long ones. Call it about ten
        times a second while requests run.

        Timers and a task per request would cost more than a short request.
        """
        now = time.perf_counter()
        for exchange in list(self.running):
            if now > exchange.until:
                exchange.cancel(exchange.reason)
            elif (
                exchange.reason is LATE
                and exchange.watcher is None
                and now > exchange.started + UNWATCHED
            ):
                exchange.watcher = asyncio.create_task(exchange.watch())

    def _admit(self) -> None:
        """Raise RequestError if a new request is rejected before its body is read: while loading,
        while shutting down, or if too many are running."""
        if self.lifecycle.loading:
            message = "the server is loading its models: try again later"
            raise RequestError(503, message, retry_after=2)
        if self.lifecycle.draining:
            raise shutting_down()
        if len(self.running) >= self.settings.requests:
            raise RequestError(
                429,
                f"{self.settings.requests} requests are running, which is the limit of this "
                "server: try again later",
                retry_after=1,
            )

    async def _authorize(self, exchange: Exchange) -> None:
        """Raise RequestError 401 unless the request `exchange` has the token, as a bearer token or
        as LibreTranslate's `api_key`.

        GET requests to public paths need no token. If the server has no token, no request needs
        one. A request with a header Authorization is never checked for `api_key`.
        """
        if self.token is None or self.errors.is_public(
            exchange.scope["method"], exchange.scope["path"]
        ):
            return
        header = exchange.headers.get(b"authorization")
        scheme, _, token = (header or b"").partition(b" ")
        if header is None:
            token = await api_key(exchange)
        elif scheme.lower() != b"bearer":
            token = b""
        if not token:
            raise RequestError(
                401, "the request has no token, expected the header Authorization: Bearer TOKEN"
            )
        if not hmac.compare_digest(token.strip(), self.token):
            raise RequestError(401, "the token is wrong, expected the token of this server")

    async def _reject(self, exchange: Exchange, error: Exception) -> None:
        response = self.errors.response(exchange.scope["path"], error)
        # a slow client may never send the rest; a server that drains takes no more requests
        if response.status_code == 408 or self.lifecycle.draining:
            response.headers["Connection"] = "close"
        await response(exchange.scope, exchange.receive, exchange.answer)

    async def _end(self, exchange: Exchange) -> None:
        """Send the error response of the cancelled request `exchange`, by the reason of the
        cancellation.

        A response that has started stays incomplete, which the client notices. A client that is
        gone gets none.
        """
        task = asyncio.current_task()
        while exchange.cancelled is not None and task is not None and task.uncancel():
            pass  # each `cancel` is undone, so that the response can be awaited
        if exchange.cancelled == GONE or exchange.status:
            return
        if exchange.cancelled == SLOW:
            rejection = RequestError(
                408,
                f"the body was not complete after {self.settings.body_timeout:g} seconds, the "
                f"limit of this server",
            )
        elif exchange.cancelled == LATE:
            rejection = RequestError(
                503,
                f"the request took longer than {self.settings.timeout:g} seconds, the limit of "
                "this server",
                retry_after=1,
            )
        else:
            rejection = shutting_down()
        await self._reject(exchange, rejection)

    def end_all(self) -> None:
        """Cancel all running requests, because the server stops."""
        for exchange in list(self.running):
            exchange.cancel(ENDED)

    def _note(self, exchange: Exchange, seconds: float) -> None:
        """Count the finished request in the metrics and write its log line. `seconds` is its
        duration."""
        status = exchange.status or CLIENT_GONE
        self.metrics.answered(self.errors.template(exchange.scope), status, seconds)
        level = (
            "error"
            if status == 500
            else "debug"
            if exchange.scope["path"] in health.PATHS
            else "info"
        )
        if not self.log.is_enabled(level):
            return
        facts: dict[str, Any] = {
            "id": exchange.id.decode(),
            "method": exchange.method,
            "path": exchange.scope["path"][:200],
            "status": status,
            "seconds": round(seconds, 6),
        }
        if exchange.status and not exchange.is_complete:
            facts["cut"] = exchange.cancelled or "error"
        traceparent = exchange.headers.get(b"traceparent")
        if traceparent is not None:
            facts["traceparent"] = traceparent[:128].decode("latin-1")
        self.log.write(level, "request", **facts)

    def _id(self, exchange: Exchange) -> bytes:
        """Return the header X-Request-ID of the request if it is 1 to 128 printable ASCII
        characters without spaces, or else a new id."""
        request_id = exchange.headers.get(b"x-request-id")
        if request_id is not None and REQUEST_ID.fullmatch(request_id):
            return request_id
        return f"{self._prefix}-{next(self._numbers):x}".encode()


def check_encoding(headers: Mapping[bytes, bytes]) -> None:
    """Raise RequestError 415 if the body of a request is compressed."""
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding.lower() not in (b"identity", b""):
        raise RequestError(
            415,
            f"Content-Encoding is {encoding.decode('latin-1')!r:.60}, expected none: compressed "
            "bodies are not supported",
        )


def too_large(seen: int, max_size: int) -> RequestError:
    return RequestError(413, f"the body has at least {seen} bytes, expected at most {max_size}")


async def api_key(exchange: Exchange) -> bytes:
    """Return the field `api_key` of the JSON or form body of a request, or empty bytes without
    one."""
    body = exchange.body or b""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        async with Request(
            exchange.scope, receive
        ).form() as form:  # empty if the body is not a form
            key = form["api_key"] if "api_key" in form else json.loads(body).get("api_key")
    except Exception:  # parsers of forms raise errors of many classes
        return b""
    return key.encode("utf-8", "surrogatepass") if isinstance(key, str) else b""


# --------------------------------------------------------------------------------------- origins

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
SAME_SITE = (b"same-origin", b"none")  # values of Sec-Fetch-Site; none is a user's own request


def check_origin(method: str, headers: Mapping[bytes, bytes], allowed: Sequence[str]) -> None:
    """Check that a request does not come from a web page of another host. A browser sends those to
    any server that it reaches, also to one on this machine.

    A page needs no permission for a POST of text or a form; it only cannot read the response.
    Programs send no Origin. That of a browser extension has another scheme than http and https. A
    reverse proxy may replace Host; the browser then reports a page of the same origin in
    Sec-Fetch-Site, or the proxy the original host in X-Forwarded-Host. `allowed` are the origins of
    `--cors-origin`.

    Raises:
        RequestError: 403 if it does.
    """
    origin = headers.get(b"origin", b"").decode("latin-1")
    if method in SAFE_METHODS or not origin or "*" in allowed or origin in allowed:
        return
    if headers.get(b"sec-fetch-site") in SAME_SITE or is_extension(origin):
        return
    hosts = b",".join(headers.get(name, b"") for name in (b"host", b"x-forwarded-host"))
    names = set(map(hostname, hosts.decode("latin-1").split(","))) - {None}
    if hostname(origin) not in names:
        raise RequestError(
            403,
            f"Origin is {origin!r:.200}, expected a page of this server: allow others with "
            "--cors-origin",
        )


def is_extension(origin: str) -> bool:
    """Return True unless `origin` is that of a web page, or "null", which pages can choose."""
    scheme, separator, _ = origin.partition("://")
    return bool(separator) and scheme.lower() not in ("http", "https")


def hostname(origin: str) -> str | None:
    """Return the host of `origin`, or of a header such as Host, without its port; None without
    one."""
    try:
        return urlsplit(origin if "://" in origin else f"//{origin.strip()}").hostname
    except ValueError:  # brackets that do not match
        return None
