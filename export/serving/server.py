"""The HTTP server. It listens, lets the service load the models, and finishes running requests
before it stops."""

import asyncio
import contextlib
import functools
import math
import os
import socket
import threading
from collections.abc import Iterator, Sequence

import uvicorn
import uvloop

from ..engine.forking import SIGNALS
from ..engine.process import EngineProcess
from .limits import Connections, available_connections
from .observability import capture_library_logs
from .service import PROTOCOLS, Say, Service
from .settings import Settings, Source

SHUTDOWN_TIMEOUT = 1  # seconds that uvicorn waits for clients that do not read their responses


def serve(
    sources: Sequence[Source],
    settings: Settings,
    token: bytes | None,
    say: Say,
    process: EngineProcess | None = None,
) -> None:
    """Serve the exports `sources` until SIGTERM or SIGINT. A second signal ends the process at
    once.

    The process also exits, with code 0, if requests did not finish in time after the signal.

    Args:
        token: the token that clients must send; None if no token is required.
        say: called with each line to print, such as the address.
        process: child process that runs the engines; None to run them in this process.

    Raises:
        UsageError, ValueError, OSError: if settings, exports or the address are invalid, before or
            while the models are loaded.
        ChildProcessError: if `process` has ended.
    """
    with (
        listening(settings.host, settings.port) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        server = Server(Service(sources, settings, token, say, PROTOCOLS, process=process))
        runner.run(server.run(listener))
        if server.gave_up:  # Python would wait for threads that still work on these requests
            os._exit(0)


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address `host` and `port`. Raises OSError if the address
    cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror or error}, expected a free "
            f"address and port"
        ) from None
    listener.listen(2048)
    return listener


class UvicornServer(uvicorn.Server):
    """A uvicorn server that sleeps while nothing happens. uvicorn's own wakes up ten times a
    second, for the header Date and to see whether it must exit."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.must_exit = asyncio.Event()

    async def main_loop(self) -> None:
        await self.must_exit.wait()


class Server:
    """A uvicorn server with a `service`. It listens before the models are loaded."""

    def __init__(self, service: Service):
        self.service, self.settings = service, service.settings
        if service.process is not None:
            service.process.failed = self.fail
        settings = self.settings
        allowed = available_connections(settings.connections)
        if allowed < settings.connections:
            service.log.write(
                "warning",
                f"the limit of open files allows {allowed} connections, expected "
                f"{settings.connections} as set by --connections",
            )
        self.connections = Connections(
            allowed, settings.header_timeout, settings.timeout, service.changed.set
        )
        self.uvicorn = UvicornServer(
            uvicorn.Config(
                service.app,
                # uvicorn accepts any callable that returns a protocol
                http=self.connections.open,  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=math.ceil(settings.header_timeout),
                timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
            )
        )
        self.stopping = asyncio.Event()
        self.gave_up = False  # True if requests did not finish before the end of `drain`
        self.error: Exception | None = None  # the error that stopped the server

    async def run(self, listener: socket.socket) -> None:
        """Run the server with the socket `listener` until it is stopped.

        Raises the error that stopped it, such as an error of loading a model.
        """
        with capture_library_logs(self.service.log):
            await self._run(listener)

    async def _run(self, listener: socket.socket) -> None:
        serving = asyncio.create_task(self.uvicorn.serve(sockets=[listener]))
        while not self.uvicorn.started and not serving.done():
            await asyncio.sleep(0.001)
        sweep = functools.partial(self.connections.sweep, self.uvicorn.server_state.connections)
        watching = asyncio.create_task(self.service.watch(sweep))
        try:
            with self.signals():
                host, port = listener.getsockname()[:2]
                self.service.say(
                    f"listening on http://{f'[{host}]' if ':' in host else host}:{port}"
                )
                if await self.start():
                    await self.stopping.wait()
                    await self.drain()
                if self.error is not None:
                    raise self.error
        finally:
            watching.cancel()
            self.uvicorn.must_exit.set()
            await serving
            self.service.close()

    async def start(self) -> bool:
        """Load the models. Return False if a signal or `fail` stopped the server before they were
        loaded. Raises the errors of `Service.start`."""
        starting, stopped = (
            asyncio.create_task(self.service.start()),
            asyncio.create_task(self.stopping.wait()),
        )
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if self.stopping.is_set():
            starting.cancel()
            return False
        stopped.cancel()
        starting.result()
        return True

    async def drain(self) -> None:
        """Report the shutdown to load balancers for `grace` seconds. Then reject new requests and
        wait for the running ones.

        After `drain` seconds the running ones are cancelled, and `gave_up` is True.
        """
        self.service.log.write("info", "stopping", running=len(self.service.frame.running))
        await asyncio.sleep(self.settings.grace)
        self.gave_up = not await self.service.drain()

    def stop(self, number: int) -> None:
        """Start the shutdown after the signal `number`. A second signal ends the process at
        once."""
        if self.stopping.is_set():
            self.service.log.flush(0.1)
            os._exit(128 + number)
        self.service.lifecycle.leaving = True
        self.stopping.set()

    def fail(self, error: Exception) -> None:
        """Stop the server because of the fatal `error`, which `run` then raises."""
        self.service.log.write("error", str(error))
        self.error = error
        self.service.lifecycle.leaving = True
        self.stopping.set()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT with `stop` in the block, but only in the main thread.
        uvicorn's own handlers close the listening socket at once."""
        loop = asyncio.get_running_loop()
        # only the main thread may set signal handlers
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop, number)
        yield
        for number in SIGNALS:
            loop.remove_signal_handler(number)
