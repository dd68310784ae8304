"""The service of a process, without the server in front: the models, the application, its limits
and metrics."""

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

from ..errors import UsageError
from ..inference.devices import processors
from ..inference.export_info import ExportInfo, json_object
from ..model import open_export, open_for_workers, target_of
from ..scheduler.admission import Admission
from ..scheduler.capacity import Arrangement, arrange_workers
from ..scheduler.client import Client, LocalScheduler
from ..scheduler.process import SchedulerProcess
from ..scheduler.worker import SWITCH_INTERVAL, SchedulerEvents
from ..text.language_pairs import languages_of_model
from ..text_runtime import TextRuntime, open_runtime
from . import page, protocols
from .app import create_app
from .encoder_runtime import batched
from .lifecycle import Lifecycle
from .logs import Log, described
from .metrics import Metrics
from .middleware import Frame
from .models import ServedModel, ServedModels
from .protocols.protocol import Protocol
from .settings import Settings
from .sources import Source

PROTOCOLS: tuple[Protocol, ...] = (*protocols.PROTOCOLS, page.PROTOCOL)
CONFIG = "config.json"
Say = Callable[[str], None]
# seconds between two looks at all requests, and how many there are to one at all connections
TICK, TICKS = 0.1, 5


async def load(
    source: Source,
    settings: Settings,
    metrics: Metrics,
    cores: int,
    process: SchedulerProcess | None,
) -> ServedModel:
    """Load a model. Workers and threads are for `cores` cores. Workers of models that generate are
    in `process`, if there is one.

    Raises what the runtime raises for a damaged export, and UsageError for a setting that the model
    cannot have.
    """
    arranged = arrangement_for(source, settings, cores)
    events = metrics.of_engine(source.name)
    if source.generates:
        runtime, scheduler = await generator(source, settings, events, arranged, process)
        languages = languages_of_model(runtime, source.languages)
        model = ServedModel(source.name, runtime, scheduler, languages)
    else:
        options: dict[str, Any] = dict(threads=arranged.threads, dtype=settings.dtype)
        runtime = await in_thread(functools.partial(open_runtime, source.directory, **options))
        encoder = batched(
            runtime, arranged.workers, settings.queue, max_source=settings.max_source, events=events
        )
        model = ServedModel(source.name, runtime, encoder=encoder)
    metrics.watch_rows(source.name, lambda: model.backend.waiting, lambda: model.backend.running)
    if model.scheduler is not None:
        metrics.watch_slots(source.name, model.admission.slots, lambda: model.backend.running)
    return model


async def generator(
    source: Source,
    settings: Settings,
    events: SchedulerEvents,
    arranged: Arrangement,
    process: SchedulerProcess | None,
) -> tuple[TextRuntime, Client]:
    """Return the text side of a model that generates, and its scheduler, whose graphs are open in
    `process`, or here without one. Raise as `load`."""
    info = await in_thread(functools.partial(open_export, source.directory, settings.dtype))
    arranged = limited(arranged, info, settings)
    sizes: dict[str, Any] = dict(workers=arranged.workers, slots=settings.slots)
    sizes |= dict(max_source=settings.max_source, max_length=settings.max_length)
    admission = Admission(info, threads=arranged.threads, max_waiting=settings.queue, **sizes)
    runtime = await in_thread(functools.partial(TextRuntime.around, admission))
    if process is None:
        model = await in_thread(functools.partial(open_for_workers, info, arranged.threads))
        return runtime, LocalScheduler(admission, model, events).start()
    opened = dict(directory=str(source.directory), threads=arranged.threads, dtype=settings.dtype)
    return runtime, await process.open(source.name, admission, events, **opened, sizes=sizes)


def limited(arranged: Arrangement, info: ExportInfo, settings: Settings) -> Arrangement:
    """Return `arranged` with as many workers as the target has at most. Raise UsageError if the
    settings ask for more."""
    most = target_of(info).max_workers
    if most is None or arranged.workers <= most:
        return arranged
    if settings.workers is not None:
        target = info.manifest["target"]
        raise UsageError(
            f"workers is {settings.workers}, expected at most {most} with the target {target!r}"
        )
    return dataclasses.replace(arranged, workers=most)


def arrangement_for(source: Source, settings: Settings, cores: int) -> Arrangement:
    """Return the arrangement of workers and threads, before the runtime checks the config. Raises
    ValueError for a config without the sizes of a model."""
    path = source.directory / CONFIG
    config = json_object(path, path.read_bytes())
    try:
        return arrange_workers(config, cores, settings.workers, settings.threads)
    except (KeyError, TypeError) as error:
        found = (
            f"lacks {error}"
            if isinstance(error, KeyError)
            else f"has a size that is no number: {error}"
        )
        raise ValueError(f"{path} {found}: export again") from None


async def warm(model: ServedModel) -> None:
    """Run the model once, because the first run of a graph takes longer than later runs."""
    if model.scheduler is not None:
        tokens = min(2, model.admission.slot_size.length)
        await model.scheduler.generate(
            [model.admission.admit([0], {"max_new_tokens": tokens, "num_beams": 1})]
        )


# -------------------------------------------------------------------------------------- the service


class Service:
    """The application of `protocols` with its limits, from before the sources are loaded on.

    Args:
        token: what clients have to send; `None` if they need none.
        say: is told of each model that is loaded.
        cores: processors that the models share; all that this process may use if not given.
        process: for the schedulers of what generates, which run in this one if it is not given.
    """

    def __init__(
        self,
        found: Sequence[Source],
        settings: Settings,
        token: bytes | None,
        say: Say,
        protocols: tuple[Protocol, ...] = PROTOCOLS,
        cores: int | None = None,
        process: SchedulerProcess | None = None,
    ):
        self.sources = found
        self.settings = settings
        self.say = say
        self.cores = cores or processors()
        self.process = process
        self.log = Log(settings.log_level)
        self.lifecycle = Lifecycle(loading=True)
        self.metrics = Metrics()
        self.models = ServedModels({})
        app = create_app(self.models, protocols, settings, self.lifecycle, self.metrics)
        app.state.needs_token = token is not None
        self.frame = Frame(
            app, app.state.errors, settings, self.lifecycle, self.metrics, self.log, token
        )
        self.app = with_cors(self.frame, settings.cors_origin)

    async def start(self) -> None:
        """Load the models and let each answer once. Raises the errors of `load`."""
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
        """Cancel requests that take too long, until the task is cancelled. Calls `sometimes` every
        half second."""
        for tick in itertools.count():
            await asyncio.sleep(TICK)
            try:
                self.frame.sweep()
                if tick % TICKS == 0:
                    sometimes()
            except Exception as error:  # of one sweep; the next sweep runs anyway
                self.log.write("error", "a look at what is running failed", error=described(error))

    async def drain(self) -> bool:
        """Reject new requests and wait for running ones. Return whether all of them finished in
        time."""
        self.lifecycle.draining = True
        limit = time.monotonic() + self.settings.drain
        while self.frame.running and time.monotonic() < limit:
            await asyncio.sleep(0.01)
        if not self.frame.running:
            return True
        self.log.write(
            "warning",
            f"{len(self.frame.running)} requests had no answer after {self.settings.drain:g} "
            f"seconds",
        )
        self.frame.end_all()
        await asyncio.sleep(0.1)  # for the last refusals
        return False

    def close(self) -> None:
        gc.unfreeze()
        for model in self.models:
            model.backend.close()
        if self.process is not None:
            self.process.close()


def in_thread(function: Callable[[], Any]) -> asyncio.Future:
    """Run `function` in a thread and return a future of its result. Unlike a thread of asyncio, the
    thread does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future = loop.create_future()

    def deliver(give: Callable[[Any], None], what: Any) -> None:
        if not found.done():  # nobody waits any more
            give(what)

    def run() -> None:
        try:
            done = functools.partial(deliver, found.set_result, function())
        except Exception as error:
            done = functools.partial(deliver, found.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
            loop.call_soon_threadsafe(done)

    threading.Thread(target=run, daemon=True).start()
    return found


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    if not origins:
        return app
    allowed: dict[str, Any] = dict(allow_methods=["GET", "HEAD", "POST"], allow_headers=["*"])
    return CORSMiddleware(
        app, allow_origins=origins, expose_headers=["Retry-After", "X-Request-ID"], **allowed
    )
