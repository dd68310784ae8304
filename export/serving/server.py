"""Serving from the first socket to the last answer: listens, loads the models, lets each answer once, and drains at the end."""

import asyncio
import contextlib
import functools
import gc
import itertools
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ..engine.engine import Engine
from ..engine.sizing import arrangement
from ..errors import UsageError
from ..runtime.artifact import MANIFEST, json_object
from ..runtime.devices import processors
from ..runtime.predictions import GENERATORS, open_runtime
from . import libretranslate, open_inference, openai_api, page, pipelines, text_embeddings
from .app import create_app
from .connections import Connections, files_for, taking_all
from .language_pairs import languages_of_model
from .lifecycle import Lifecycle
from .logs import Log, described, taking_over
from .metrics import Metrics
from .middleware import Frame
from .models import ServedModel, ServedModels
from .protocols import Protocol
from .reading import batched
from .settings import Settings

PROTOCOLS: tuple[Protocol, ...] = tuple(
    each.PROTOCOL for each in (libretranslate, openai_api, text_embeddings, pipelines, open_inference, page)
)
CONFIG = "config.json"
NAME = re.compile(r"[\w.-]+", re.ASCII)
Say = Callable[[str], None]
# Seconds after which a thread must hand over the interpreter: a lane waits for it after each run of a graph, and Python's 5 ms
# are more than a step of a small model takes. Measured: 30 % more requests in a second.
SWITCH_INTERVAL = 0.0002
SIGNALS = (signal.SIGTERM, signal.SIGINT)
TICK, TICKS = 0.1, 5  # seconds between two looks at all requests, and how many there are to one at all connections
LAST_WORDS = 1  # seconds that uvicorn waits for clients that do not read their answers


@dataclass(frozen=True)
class Source:
    """An export that is to be served."""

    name: str
    directory: Path
    architecture: str
    languages: list[tuple[str, str]]

    @property
    def generates(self) -> bool:
        return self.architecture.endswith(GENERATORS)


def sources(exports: Sequence[str], languages: Sequence[tuple[str | None, str, str]]) -> list[Source]:
    """What `exports` are, each PATH or NAME=PATH, as far as can be told at once.

    Raises:
        UsageError: for a name that no path of a request can have, for two of one name, and for languages of no model.
        FileNotFoundError, ValueError: for a directory that is no export.
    """
    found: dict[str, Source] = {}
    for text in exports:
        name, directory = named(text)
        if name in found:
            raise UsageError(
                f"two exports {name!r}, {found[name].directory} and {directory}: expected NAME=PATH for one of them"
            )
        path = directory / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{directory} has no {MANIFEST}: expected a directory `vanilla-transformer export` wrote")
        found[name] = Source(name, directory, str(json_object(path, path.read_bytes()).get("architecture")), [])
    for model, source, target in languages:
        chosen(found, model, f"{source}-{target}").languages.append((source, target))
    return list(found.values())


def named(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator or Path(text).is_dir():
        name, path = os.path.basename(os.path.abspath(text)), text
    if not path:
        raise UsageError(f"expected NAME=PATH, got {text!r}")
    if not NAME.fullmatch(name) or name in (".", ".."):
        raise UsageError(f"the name {name!r} has other characters than letters, digits, '.', '_' and '-': expected NAME=PATH")
    return name, Path(path)


def chosen(found: Mapping[str, Source], name: str | None, pair: str) -> Source:
    """The one that translates the pair of `--languages`."""
    if name is not None and name not in found:
        raise UsageError(f"--languages {name}:{pair}: no model {name!r}, expected one of {', '.join(found)}")
    fitting = [each for each in found.values() if each.architecture.endswith(GENERATORS[1]) and name in (None, each.name)]
    if len(fitting) != 1:
        names = ", ".join(each.name for each in fitting) or "none"
        raise UsageError(f"--languages {pair}: expected one model that translates, or NAME:{pair}; these do: {names}")
    return fitting[0]


def load(source: Source, settings: Settings, metrics: Metrics) -> ServedModel:
    """Raises what the runtime raises for a damaged export, and UsageError for a setting that the model cannot have."""
    path = source.directory / CONFIG
    arranged = arrangement(json_object(path, path.read_bytes()), processors(), settings.lanes, settings.threads)
    events = metrics.of_engine(source.name)
    if source.generates:
        runtime = open_runtime(source.directory, arranged.threads, dtype=settings.dtype, continuous=True)
        sizes = (settings.slots, settings.max_source, settings.max_length, settings.queue)
        engine = Engine(runtime.runtime, arranged.lanes, *sizes, events=events).start()
        model = ServedModel(source.name, runtime, engine, languages_of_model(runtime, source.languages))
    else:
        runtime = open_runtime(source.directory, arranged.threads, dtype=settings.dtype)
        reader = batched(runtime, arranged.lanes, settings.queue, longest=settings.max_source, events=events)
        model = ServedModel(source.name, runtime, reader=reader)
    metrics.watch_rows(source.name, lambda: model.worker.waiting, lambda: model.worker.running)
    return model


def description(model: ServedModel) -> str:
    """One line of what is served."""
    artifact = model.runtime.runtime.artifact
    facts = [model.architecture, artifact.manifest.get("target", "portable"), model.runtime.runtime.dtype]
    return f"{model.name}: {', '.join([*facts, model.worker.describe()])}"


async def warm(model: ServedModel) -> None:
    """The first run of a graph takes longer than those after it."""
    if model.engine is not None:
        await model.engine.answers([model.engine.job([0], {"max_new_tokens": 2, "num_beams": 1})])


# ---------------------------------------------------------------------------------------------------------- the server


def serve(exports: Sequence[str], settings: Settings, token: bytes | None, say: Say) -> None:
    """Serves until it is told to stop by SIGTERM or SIGINT; a second signal ends the process at once.

    Raises:
        UsageError, ValueError, OSError: for what is wrong with the settings, the exports or the address, before or while the
            models are loaded.
    """
    found = sources(exports, settings.languages)
    sys.setswitchinterval(SWITCH_INTERVAL)
    with listening(settings.host, settings.port) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = Server(found, settings, token, say, PROTOCOLS)
        runner.run(server.run(listener))
        if server.gave_up:  # threads may be at work for them still, for which Python would wait
            os._exit(0)


def listening(host: str, port: int) -> socket.socket:
    """Raises OSError if that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror or error}, expected a free address") from None
    listener.listen(2048)
    return listener


class Server:
    """uvicorn with the application of `protocols`, from before the sources are loaded on."""

    def __init__(
        self,
        found: Sequence[Source],
        settings: Settings,
        token: bytes | None,
        say: Say,
        protocols: tuple[Protocol, ...],
    ):
        self.sources = found
        self.settings = settings
        self.say = say
        self.log = Log(settings.log_level)
        self.lifecycle = Lifecycle(loading=True)
        self.metrics = Metrics()
        self.models = ServedModels({})
        app = create_app(self.models, protocols, settings, self.lifecycle, self.metrics)
        app.state.needs_token = token is not None
        self.frame = Frame(app, app.state.errors, settings, self.lifecycle, self.metrics, self.log, token)
        self.connections = Connections(files_for(settings.connections), settings.header_timeout, settings.timeout)
        self.uvicorn = uvicorn.Server(self.config(with_cors(self.frame, settings.cors_origin)))
        self.stopping = asyncio.Event()
        self.gave_up = False  # on requests that did not end in time

    def config(self, app: ASGIApp) -> uvicorn.Config:
        off: dict[str, Any] = dict(log_config=None, access_log=False, server_header=False, proxy_headers=False)
        idle = math.ceil(self.settings.header_timeout)
        times: dict[str, Any] = dict(timeout_keep_alive=idle, timeout_graceful_shutdown=LAST_WORDS)
        opened: Any = self.connections.open  # any callable that makes a protocol will do
        return uvicorn.Config(app, http=opened, ws="none", lifespan="off", **off, **times)

    async def run(self, listener: socket.socket) -> None:
        """Raises what `load` raises, when the server has stopped again."""
        with taking_over(self.log):
            await self._run(listener)

    async def _run(self, listener: socket.socket) -> None:
        serving = asyncio.create_task(self.uvicorn.serve(sockets=[listener]))
        while not self.uvicorn.started and not serving.done():
            await asyncio.sleep(0.001)
        watching = asyncio.create_task(self.watch())
        try:
            with self.signals(), taking_all(listener, self.opened):
                host, port = listener.getsockname()[:2]
                self.say(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")
                if await self.start():
                    await self.stopping.wait()
                    await self.drain()
        finally:
            watching.cancel()
            self.uvicorn.should_exit = True
            await serving
            gc.unfreeze()
            for model in self.models:
                model.worker.close()

    def opened(self) -> asyncio.Protocol:
        """Of a new connection, as uvicorn makes it."""
        return self.connections.open(config=self.uvicorn.config, server_state=self.uvicorn.server_state, app_state={})

    async def watch(self) -> None:
        """Ends what takes too long."""
        for tick in itertools.count():
            await asyncio.sleep(TICK)
            try:
                self.frame.sweep()
                if tick % TICKS == 0:
                    self.connections.sweep(self.uvicorn.server_state.connections)
            except Exception as error:  # of one look; the next one comes
                self.log.write("error", "a look at what is running failed", error=described(error))

    async def start(self) -> bool:
        """Loads the models and lets each answer once; `False` if a signal came before that was done."""
        stopped = asyncio.create_task(self.stopping.wait())
        for source in self.sources:
            loading = in_thread(functools.partial(load, source, self.settings, self.metrics))
            await asyncio.wait([loading, stopped], return_when=asyncio.FIRST_COMPLETED)
            if self.stopping.is_set():
                return False
            model = loading.result()
            self.say(description(model))
            await warm(model)
            self.models.models[source.name] = model
        stopped.cancel()
        gc.freeze()  # what is loaded stays: looking for garbage in it would hold all requests up
        self.lifecycle.loading = False
        self.say("ready")
        return True

    async def drain(self) -> None:
        """Lets balancers see that this server leaves, refuses what comes then, and waits for the answers that are due."""
        self.log.write("info", "stopping", running=len(self.frame.running))
        await asyncio.sleep(self.settings.grace)
        self.lifecycle.draining = True
        limit = time.monotonic() + self.settings.drain
        while self.frame.running and time.monotonic() < limit:
            await asyncio.sleep(0.01)
        if self.frame.running:
            self.log.write("warning", f"{len(self.frame.running)} requests had no answer after {self.settings.drain:g} seconds")
            self.gave_up = True
            self.frame.end_all()
            await asyncio.sleep(0.1)  # for the last refusals

    def stop(self, number: int) -> None:
        """Of a signal."""
        if self.stopping.is_set():
            self.log.flush(0.1)
            os._exit(128 + number)
        self.lifecycle.leaving = True
        self.stopping.set()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """uvicorn has handlers of its own, which close the door at once."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():  # which alone may set what signals do
            yield
            return
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop, number)
        yield
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def in_thread(function: Callable[[], Any]) -> asyncio.Future:
    """What `function` returns. Unlike those of asyncio, the thread does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future = loop.create_future()

    def run() -> None:
        try:
            done = functools.partial(found.set_result, function())
        except Exception as error:
            done = functools.partial(found.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
            loop.call_soon_threadsafe(done)

    threading.Thread(target=run, daemon=True).start()
    return found


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    if not origins:
        return app
    allowed: dict[str, Any] = dict(allow_methods=["GET", "POST"], allow_headers=["*"])
    return CORSMiddleware(app, allow_origins=origins, expose_headers=["Retry-After", "X-Request-ID"], **allowed)
