"""A server in a thread of this process, with endpoints that do what the tests of the frame need,
and no model."""

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import uvloop
from fastapi import APIRouter
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from vanilla_transformer_export.errors import RequestError, TooLong
from vanilla_transformer_export.serving.protocols.protocol import Protocol
from vanilla_transformer_export.serving.server import Server, listening
from vanilla_transformer_export.serving.service import PROTOCOLS, Service
from vanilla_transformer_export.serving.settings import Settings, Source, sources

router = APIRouter(tags=["stub"])
# for paths with its name
MODEL = SimpleNamespace(
    name="a",
    state="ready",
    backend=SimpleNamespace(close=lambda: None),
    unload_if_idle=lambda seconds: None,
)
SEEN: list[str] = []  # outcomes of the slow requests


class Body(BaseModel):
    q: str | list[str]
    n: int = Field(1, ge=1, le=10)
    x: float = 0.0


@router.post("/stub")
async def stub(body: Body) -> JSONResponse:
    return JSONResponse({"q": body.q, "n": body.n})


@router.post("/slow")
async def slow(body: Body) -> JSONResponse:
    """Answer {} after `x` seconds."""
    SEEN.append("begun")
    try:
        await asyncio.sleep(body.x)
    except asyncio.CancelledError:
        SEEN.append("cancelled")
        raise
    SEEN.append("done")
    return JSONResponse({})


@router.post("/stream")
async def stream(body: Body) -> StreamingResponse:
    """Stream events of 10 kB without end, `x` seconds apart."""

    async def events():
        try:
            while True:
                SEEN.append("event")
                yield b"data: " + b"x" * 10_000 + b"\n\n"
                await asyncio.sleep(body.x)
        finally:
            SEEN.append("closed")

    return StreamingResponse(events(), media_type="text/event-stream")


RAISED = {
    "refusal": RequestError(429, "too many, expected fewer", retry_after=3),
    "long": TooLong("9 tokens, expected at most 8"),
    "deep": RecursionError("maximum recursion depth exceeded"),
    "value": ValueError("a\nb is \ud800, expected c"),
    "mistake": KeyError("secret"),
}


@router.get("/raise/{name}")
async def fail(name: str) -> JSONResponse:
    if name == "nan":
        return JSONResponse({"x": float("nan")})
    if name == "half":
        return JSONResponse({"x": "\ud800"})
    raise RAISED[name]


PROTOCOL = Protocol(
    router,
    lambda error: {"stub": {"status": error.status, "message": error.message}},
    validation=422,
)


class Served:
    """A server in a thread of this process, at `port`. `lines` are what it says, `error` how it
    failed. `sources` are the exports that it serves."""

    def __init__(
        self,
        settings: Settings,
        token: bytes | None,
        protocols: tuple[Protocol, ...],
        sources: Sequence[Source] = (),
    ):
        self.lines: list[str] = []
        self.listener = listening("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.error: BaseException | None = None
        self._is_made = threading.Event()
        self._arguments = (sources, settings, token, self.lines.append, protocols)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self._is_made.wait()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self.loop = runner.get_loop()
                self.server = Server(Service(*self._arguments))
                if self.server.service.log.descriptor == 2:  # tests do not read this log
                    self.server.service.log.descriptor = os.open(os.devnull, os.O_WRONLY)
                self._is_made.set()
                runner.run(self.server.run(self.listener))
        except BaseException as error:
            self.error = error
        finally:
            self._is_made.set()

    def stop(self) -> None:
        """Stop the server as SIGTERM does, unless it has ended. A second signal would end this
        process."""
        if not self.server.stopping.is_set():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self.loop.call_soon_threadsafe(self.server.stop, 15)

    def send(self, content: bytes) -> socket.socket:
        """Open a connection, send `content` and return the connection."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(content)
        return connection


@contextlib.contextmanager
def served(
    token: bytes | None = None,
    protocols: tuple[Protocol, ...] = (PROTOCOL,),
    exports: Sequence[Source] = (),
    **settings,
):
    """Yield a `Served` that is ready, and stop it. Raise the error with which it failed."""
    given = Settings(**{"grace": 0.05, "drain": 5.0, "log_level": "error", **settings})
    server = Served(given, token, protocols, exports)
    wait_for(lambda: "ready" in server.lines or server.error, 60)
    try:
        yield server
    finally:
        if server.thread.is_alive():
            server.stop()
        server.thread.join(20)
    if server.error is not None:
        raise server.error


def served_exports(*exports: str, token: bytes | None = None, languages=(), **settings):
    """Return `served` of all protocols, with `exports`, each PATH or NAME=PATH."""
    found = sources(exports, languages)
    return served(token, PROTOCOLS, found, languages=languages, **settings)


def wait_for(holds, seconds: float = 10.0):
    """Wait until `holds()` returns a true value, and return it; fail after `seconds`."""
    limit = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < limit, "nothing happened"
        time.sleep(0.005)
    return value


def request(path: str, body: object = None, *headers: str) -> bytes:
    """Return the bytes of a POST of `body` to `path`, or of a GET without a body.

    `headers` are further lines.
    """
    content = (
        b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    )
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        *headers,
    ]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content
