"""The models, the application, its limits and its metrics, without the HTTP server. Ray Serve runs
the same service."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ..engine.client import Client
from ..engine.limits import Admission, Arrangement, arrange_workers
from ..engine.loop import SWITCH_INTERVAL, Engine
from ..engine.model import check_threads, find_target, open_export
from ..engine.process import EngineProcess
from ..errors import UsageError
from ..inference.devices import available_cpus
from ..inference.export_info import ExportInfo, json_object
from ..text.language_pairs import model_languages
from ..text_runtime import TextRuntime, open_runtime
from . import page
from .app import create_app
from .encoder_runtime import batched
from .lifecycle import Lifecycle
from .logs import Log, format_error
from .metrics import Metrics
from .middleware import Frame
from .models import ServedModel, ServedModels
from .protocols import libretranslate, open_inference, openai_api, pipelines, text_embeddings
from .protocols.protocol import Protocol
from .settings import Settings
from .sources import Source

PROTOCOLS: tuple[Protocol, ...] = tuple(
    module.PROTOCOL
    for module in (libretranslate, openai_api, text_embeddings, pipelines, open_inference, page)
)
CONFIG = "config.json"
Say = Callable[[str], None]
# seconds between two checks of the requests, and their number per check of the connections
TICK, TICKS = 0.1, 5


async def load(
    source: Source,
    settings: Settings,
    metrics: Metrics,
    cores: int,
    process: EngineProcess | None,
) -> ServedModel:
    """Return the loaded model of `source`. The default number of threads is `cores`, that of CPU
    cores.

    If there is a `process`, it runs the workers of models that generate. `metrics` counts what the
    workers of the model do. The caller closes the model's `backend`.

    Raises:
        UsageError: if a setting is not possible for the model.
        ValueError, OSError: if the export is damaged or cannot be run.
    """
    arranged = arrangement_for(source, settings, cores)
    info = await in_thread(functools.partial(open_export, source.directory, settings.dtype))
    arranged = limit_workers(arranged, info, settings)
    observe = metrics.of_engine(source.name)
    if source.generates:
        runtime, client = await generator(source, info, settings, arranged, process)
        client.start(observe)
        languages = model_languages(runtime, source.languages)
        model = ServedModel(source.name, runtime, client, languages)
    else:
        options: dict[str, Any] = dict(threads=arranged.threads, dtype=settings.dtype)
        runtime = await in_thread(functools.partial(open_runtime, source.directory, **options))
        encoder = batched(
            runtime,
            arranged.workers,
            settings.queue,
            max_source=settings.max_source,
            observe=observe,
        )
        model = ServedModel(source.name, runtime, encoder=encoder)
    engine = model.backend.engine
    metrics.watch_rows(source.name, lambda: engine.waiting, lambda: engine.running)
    if model.scheduler is not None:
        metrics.watch_slots(source.name, model.admission.slots, lambda: engine.running)
    return model


async def generator(
    source: Source,
    info: ExportInfo,
    settings: Settings,
    arranged: Arrangement,
    process: EngineProcess | None,
) -> tuple[TextRuntime, Client]:
    """Return the text runtime of the model `source`, which generates, and the client of its engine,
    which is not started.

    The engine runs in `process`, or in this process if it is None. `arranged` has the numbers of
    workers and threads.

    Raises:
        UsageError: if a setting is not possible for the model.
        ValueError, OSError: if the export is damaged.
    """
    sizes = {
        **dataclasses.asdict(arranged),
        "slots": settings.slots,
        "max_source": settings.max_source,
        "max_length": settings.max_length,
    }
    admission = Admission(info, max_waiting=settings.queue, **sizes)
    runtime = await in_thread(functools.partial(TextRuntime.around, admission))
    if process is not None:
        return runtime, await process.open(source.name, admission, settings.dtype, sizes)
    engine = await in_thread(functools.partial(Engine.open, admission))
    return runtime, Client(admission, engine)


def limit_workers(arranged: Arrangement, info: ExportInfo, settings: Settings) -> Arrangement:
    """Return `arranged` with at most the number of workers that the target supports. They share the
    threads that the settings ask for.

    Raises UsageError if the settings ask for more workers.
    """
    max_workers = find_target(info).max_workers
    if max_workers is None or arranged.workers <= max_workers:
        return arranged
    if settings.workers is not None:
        target = info.manifest["target"]
        raise UsageError(
            f"workers is {settings.workers}, expected at most {max_workers} with the target "
            f"{target!r}"
        )
    threads = arranged.threads if settings.threads is None else settings.threads // max_workers
    return Arrangement(max_workers, threads)


def arrangement_for(source: Source, settings: Settings, cores: int) -> Arrangement:
    """Return the numbers of workers and of threads for a model, by its size, `settings` and `cores`
    CPU cores.

    Raises:
        UsageError: for more workers than threads, or too many threads.
        ValueError: if config.json lacks a size of the model or has an invalid one; the runtime
            checks the other fields later.
    """
    check_threads(settings.threads)
    path = source.directory / CONFIG
    config = json_object(path, path.read_bytes())
    try:
        return arrange_workers(config, settings.threads or cores, settings.workers)
    except (KeyError, TypeError) as error:
        reason = (
            f"lacks {error}" if isinstance(error, KeyError) else f"has an invalid size: {error}"
        )
        raise ValueError(f"{path} {reason}: export again") from None


async def warm(model: ServedModel) -> None:
    """Generate once with a model that generates, because the first run of a graph takes longer than
    later runs."""
    if model.scheduler is not None:
        tokens = min(2, model.admission.slot_size.length)
        await model.scheduler.generate(
            [model.admission.admit([0], {"max_new_tokens": tokens, "num_beams": 1})]
        )


# -------------------------------------------------------------------------------------- the service


class Service:
    """The application of `protocols` with its limits. It exists before the models are loaded.

    Args:
        token: the token that clients must send; `None` if no token is required.
        say: called with a line for each model that is loaded.
        cores: CPU cores that the models share; by default all that this process may use.
        process: runs the engines of models that generate; by default they run in this process.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        settings: Settings,
        token: bytes | None,
        say: Say,
        protocols: tuple[Protocol, ...] = PROTOCOLS,
        cores: int | None = None,
        process: EngineProcess | None = None,
    ):
        self.sources = sources
        self.settings = settings
        self.say = say
        self.cores = cores or available_cpus()
        self.process = process
        self.log = Log(settings.log_level)
        self.lifecycle = Lifecycle(loading=True)
        self.metrics = Metrics()
        self.models = ServedModels({})
        app = create_app(self.models, protocols, settings, self.lifecycle, self.metrics)
        app.state.needs_token = token is not None
        self.frame = Frame(app, self.log, token)
        self.app = with_cors(self.frame, settings.cors_origin)

    async def start(self) -> None:
        """Load the models and run each model that generates once. Then accept requests.

        Raises:
            UsageError: if a setting is not possible for a model.
            ValueError, OSError: if an export is damaged.
        """
        sys.setswitchinterval(SWITCH_INTERVAL)
        if self.process is not None:
            await self.process.connect()
            self.metrics.watch_process(self.process.pid)
        for source in self.sources:
            model = await load(source, self.settings, self.metrics, self.cores, self.process)
            self.models.models[source.name] = model
            info = model.runtime.info
            facts = [model.architecture, info.manifest["target"], info.dtype, model.describe()]
            self.say(f"{model.name}: {', '.join(facts)}")
            await warm(model)
        gc.freeze()  # loaded objects stay: garbage collection of them would delay all requests
        self.lifecycle.loading = False
        self.say("ready")

    async def watch(self, sometimes: Callable[[], None] = lambda: None) -> None:
        """Cancel requests that take too long, until the task is cancelled. `sometimes` is called
        every half second. Errors are logged, also those of `sometimes`."""
        for tick in itertools.count():
            await asyncio.sleep(TICK)
            try:
                self.frame.sweep()
                if tick % TICKS == 0:
                    self.check_process()
                    sometimes()
            except Exception as error:  # the next check runs anyway
                self.log.write(
                    "error", "the check of the running requests failed", error=format_error(error)
                )

    def check_process(self) -> None:
        """Set `lifecycle.silent` if the process of the workers does not answer. Log each change."""
        if self.process is None or self.lifecycle.loading:  # it loads models, and answers nothing
            return
        is_silent = not self.process.is_responsive()
        if is_silent != self.lifecycle.silent:
            state = "does not answer" if is_silent else "answers again"
            self.log.write("warning", f"the process of the workers {state}")
        self.lifecycle.silent = is_silent

    async def drain(self) -> bool:
        """Reject new requests and wait for the running ones, at most for the setting `drain` in
        seconds.

        Returns True if all of them finished in time. Otherwise the others are cancelled.
        """
        self.lifecycle.draining = True
        limit = time.monotonic() + self.settings.drain
        while self.frame.running and time.monotonic() < limit:
            await asyncio.sleep(0.01)
        if not self.frame.running:
            return True
        self.log.write(
            "warning",
            f"{len(self.frame.running)} requests did not finish within {self.settings.drain:g} "
            f"seconds and are cancelled",
        )
        self.frame.end_all()
        await asyncio.sleep(0.1)  # for the last rejections
        return False

    def close(self) -> None:
        gc.unfreeze()
        for model in self.models:
            model.backend.close()
        if self.process is not None:
            self.process.close()


def in_thread(function: Callable[[], Any]) -> asyncio.Future:
    """Run `function` in a thread and return a future of its result.

    Call it in the event loop. Unlike a thread of asyncio, the thread does not keep the process from
    ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future = loop.create_future()

    def deliver(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():  # done: the caller was cancelled
            setter(value)

    def run() -> None:
        try:
            done = functools.partial(deliver, future.set_result, function())
        except Exception as error:
            done = functools.partial(deliver, future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(done)

    threading.Thread(target=run, daemon=True).start()
    return future


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    if not origins:
        return app
    allowed: dict[str, Any] = dict(allow_methods=["GET", "HEAD", "POST"], allow_headers=["*"])
    return CORSMiddleware(
        app, allow_origins=origins, expose_headers=["Retry-After", "X-Request-ID"], **allowed
    )
