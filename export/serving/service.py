"""The models, the application, its limits and its metrics, without the HTTP server. Ray Serve runs
the same service."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ..engine.encoder import EncoderScheduler
from ..engine.forking import share_heap
from ..engine.limits import Admission, Arrangement, arrange_workers
from ..engine.loop import SWITCH_INTERVAL, Client, Engine, Observe
from ..engine.model import check_threads, find_target, open_export, weight_bytes
from ..engine.process import MAX_SILENCE, EngineProcess, ProcessEngine
from ..errors import UsageError
from ..inference.devices import available_cpus
from ..inference.export_info import TOKENIZERS, ExportInfo, json_object
from ..text.languages import read_directions, read_languages
from ..text_runtime import TextRuntime, open_runtime
from . import page
from .app import create_app
from .health import Lifecycle
from .middleware import Frame
from .models import READY, ModelPlan, OpenModel, ServedModel, ServedModels, batched, megabytes
from .observability import Log, Metrics, format_error
from .protocols import (
    libretranslate,
    model_repository,
    open_inference,
    openai_api,
    pipelines,
    rerank_api,
    text_embeddings,
)
from .protocols.protocol import Protocol
from .settings import Settings, Source

PROTOCOLS: tuple[Protocol, ...] = tuple(
    module.PROTOCOL
    for module in (
        libretranslate,
        openai_api,
        text_embeddings,
        pipelines,
        open_inference,
        model_repository,
        rerank_api,
        page,
    )
)
CONFIG = "config.json"
TOKENIZER_SHARE = 11  # bytes in memory per byte of tokenizer.json; measured, WordPiece of 30,000
Say = Callable[[str], None]
# seconds between two checks of running requests, and of all else
REQUEST_INTERVAL, INTERVAL = 0.1, 0.5


def make_plan(source: Source, settings: Settings, cores: int, hashes: bool = False) -> ModelPlan:
    """Return how the model `source` will run. The default number of threads is `cores`, that of CPU
    cores. With `hashes`, threads check those of its files.

    Raises:
        UsageError: if a setting is not possible for the model.
        ValueError, OSError: if the export is damaged, or has another model than at the start.
    """
    arranged = arrangement_for(source, settings, cores)
    info = open_export(source.directory, settings.dtype, hashes)
    if info.architecture != source.architecture:
        raise ValueError(
            f"{source.directory} has a {info.architecture}, expected a {source.architecture} as "
            "when the server started: start it again"
        )
    arranged = limit_workers(arranged, info, settings)
    admission = None
    if source.generates:
        sizes = slot_sizes(arranged, settings)
        admission = Admission(info, max_waiting=settings.queue, **sizes)
    directions = read_directions(info, read_languages(info), source.languages)
    slot_bytes = 0 if admission is None else admission.slot_bytes
    files = info.manifest["files"]
    tokenizers = sum(files[name]["bytes"] for name in TOKENIZERS if name in files)
    num_bytes = weight_bytes(info) + TOKENIZER_SHARE * tokenizers + slot_bytes
    created = int(info.directory.stat().st_mtime)
    return ModelPlan(info, arranged, admission, directions, num_bytes, created)


def slot_sizes(arranged: Arrangement, settings: Settings) -> dict[str, Any]:
    """Return the arguments of `Admission` about workers and slots, by name."""
    names = ("slots", "max_source", "max_length")
    return dataclasses.asdict(arranged) | {name: getattr(settings, name) for name in names}


async def open_model(
    source: Source,
    plan: ModelPlan,
    settings: Settings,
    observe: Observe,
    process: EngineProcess | None,
) -> OpenModel:
    """Open the model `source` by its `plan`, and run it once if it generates. If there is a
    `process`, it runs the workers of models that generate.

    `observe` gets what the workers do. The caller calls `free` of the result.

    Raises:
        UsageError: if the slots do not fit into memory.
        ValueError, OSError: if the export is damaged or cannot be run.
    """
    if plan.admission is None:
        return await open_encoder(source, plan, settings, observe)
    runtime = await in_thread(functools.partial(TextRuntime.around, plan.admission))
    engine: Engine | ProcessEngine
    free: Callable[[], Awaitable[None]]
    if process is not None:
        sizes, directory = slot_sizes(plan.arrangement, settings), str(plan.info.directory)
        engine = await process.open(source.name, directory, settings.dtype, sizes)
        free = functools.partial(process.close_engine, source.name)
    else:
        engine = await in_thread(functools.partial(Engine.open, plan.admission))
        free = functools.partial(in_thread, engine.close)
    client = Client(plan.admission, engine).start(observe)
    try:
        await warm(client)
    except BaseException:
        await free()
        raise
    return OpenModel(plan, runtime, client, free)


async def open_encoder(
    source: Source, plan: ModelPlan, settings: Settings, observe: Observe
) -> OpenModel:
    arrangement = plan.arrangement

    def open_both() -> tuple[Any, EncoderScheduler]:
        runtime = open_runtime(source.directory, threads=arrangement.threads, dtype=settings.dtype)
        return runtime, batched(
            runtime,
            arrangement.workers,
            settings.queue,
            max_source=settings.max_source,
            observe=observe,
        )

    runtime, encoder = await in_thread(open_both)

    def close() -> None:
        encoder.free()
        runtime.close()

    return OpenModel(plan, runtime, encoder, functools.partial(in_thread, close))


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


async def warm(client: Client) -> None:
    """Generate once, because the first run of a graph takes longer than later runs."""
    tokens = min(2, client.admission.slot_size.length)
    await client.generate([client.admission.admit([0], {"max_new_tokens": tokens, "num_beams": 1})])


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
        self.can_unload = bool(settings.lazy or settings.idle_unload or token is not None)
        if self.can_unload:
            share_heap()  # before there are threads
        self.log = Log(settings.log_level)
        # set when a connection is opened, and when a model was loaded or unloaded
        self.changed = asyncio.Event()
        self.models = ServedModels({}, settings.max_memory)
        app = create_app(self.models, protocols, settings)
        app.state.needs_token = token is not None
        self.metrics: Metrics = app.state.metrics
        self.lifecycle: Lifecycle = app.state.lifecycle
        self.lifecycle.loading = True
        self.frame = Frame(app, self.log, token)
        self.app = with_cors(self.frame, settings.cors_origin)

    async def start(self) -> None:
        """Check the models, and load them unless the setting `lazy` is set. Then accept requests.

        Raises:
            UsageError: if a setting is not possible for a model, or the models do not fit into
                the setting `max_memory`.
            ValueError, OSError: if an export is damaged.
        """
        sys.setswitchinterval(SWITCH_INTERVAL)
        if self.process is not None:
            await self.process.connect()
            self.metrics.watch_process(self.process.pid)
        for source in self.sources:
            await self.add(source)
        self.check_memory()
        for model in self.models:
            if not self.settings.lazy:
                await model.load()
            self.say(self.describe(model))
        gc.freeze()  # loaded objects stay: garbage collection of them would delay all requests
        self.lifecycle.loading = False
        self.say("ready")

    async def add(self, source: Source) -> None:
        """Add the model `source` and its metrics. It is not loaded."""
        plan = functools.partial(make_plan, source, self.settings, self.cores)
        observe = self.metrics.of_engine(source.name)

        # an engine of this process opens the files of the plan, others their own
        hashes = source.generates and self.process is None

        async def open_again() -> OpenModel:
            new = await in_thread(functools.partial(plan, hashes))
            self.models.check_memory(source.name, new)
            return await open_model(source, new, self.settings, observe, self.process)

        model = ServedModel(source.name, await in_thread(plan), open_again, self.log_state)
        self.models.models[source.name] = model
        self.metrics.watch(model)

    def log_state(self, model: ServedModel, seconds: float) -> None:
        """Log that `model` was loaded or unloaded in `seconds`, or why not. At the start nothing is
        logged, because `start` says it."""
        self.changed.set()
        if self.lifecycle.loading:
            return
        if model.problem:
            self.log.write("error", f"the model {model.name} cannot be loaded: {model.problem}")
        else:
            self.log.write(
                "info", f"model {model.state}", model=model.name, seconds=round(seconds, 3)
            )

    def check_memory(self) -> None:
        """Raise UsageError if the models do not fit into the setting `max_memory`: all of them
        together, or with `lazy` each alone."""
        sizes = {model.name: model.plan.num_bytes for model in self.models}
        seen = max(sizes.values(), default=0) if self.settings.lazy else sum(sizes.values())
        limit = self.settings.max_memory
        if limit is not None and seen > limit:
            sizes_text = ", ".join(f"{name} {megabytes(size)}" for name, size in sizes.items())
            together = "the largest model takes" if self.settings.lazy else "the models take"
            raise UsageError(
                f"{together} about {megabytes(seen)} ({sizes_text}), expected at most "
                f"{megabytes(limit)}, the value of --max-memory"
            )

    def describe(self, model: ServedModel) -> str:
        """Return one line about how `model` runs, for the log."""
        info = model.info
        facts = [model.architecture, info.manifest["target"], info.dtype]
        if model.state == READY:
            facts.append(model.describe())
        else:
            facts.append(f"loaded at its first request, about {megabytes(model.plan.num_bytes)}")
        return f"{model.name}: {', '.join(facts)}"

    async def watch(self, sweep: Callable[[], bool] = lambda: False) -> None:
        """Cancel requests that take too long, watch the process of the workers, and unload idle
        models, until the task is cancelled. Errors are logged, also those of `sweep`.

        While nothing runs, this sleeps. `sweep` is called every half second after a connection was
        opened, as long as it returns True.
        """
        await asyncio.gather(self.watch_requests(), self.watch_rest(sweep))

    async def watch_requests(self) -> None:
        """Check the running requests ten times a second, and wait while there are none."""
        while True:
            await self.frame.wait()
            await asyncio.sleep(REQUEST_INTERVAL)
            self.attempt(self.frame.sweep)

    async def watch_rest(self, sweep: Callable[[], bool]) -> None:
        """Check connections, the process and idle models twice a second. While none of them needs a
        check, wait until something changes."""
        is_idle = False
        while True:
            if is_idle:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), self.seconds_until_unload())
            self.changed.clear()
            self.attempt(self.ask_process)
            await asyncio.sleep(INTERVAL)
            self.attempt(self.unload_idle)
            checks = self.attempt(self.check_process), self.attempt(sweep)
            is_idle = not any(checks)

    def attempt(self, check: Callable[[], Any]) -> Any:
        """Return the result of `check`, or log its error and return True, so that checks go on."""
        try:
            return check()
        except Exception as error:
            message = "the check of the running requests failed"
            self.log.write("error", message, error=format_error(error))
            return True

    def seconds_until_unload(self) -> float | None:
        """Return the seconds until a loaded model is idle for long enough to be unloaded, or None
        if none will be."""
        if (limit := self.settings.idle_unload) is None:
            return None
        used = [model.used_at for model in self.models if model.state == READY]
        return max(0.0, min(used) + limit - time.monotonic()) if used else None

    def unload_idle(self) -> None:
        for model in self.models:
            model.unload_if_idle(self.settings.idle_unload)

    def ask_process(self) -> None:
        if self.process is not None and not self.lifecycle.loading:  # then it answers nothing
            self.process.ping()

    def check_process(self) -> bool:
        """Set `lifecycle.silent` if the process of the workers does not answer. Log each change.
        Return True if an answer is still to come."""
        if self.process is None or self.lifecycle.loading:
            return False
        is_silent = self.process.seconds_silent >= MAX_SILENCE
        if is_silent != self.lifecycle.silent:
            state = "does not answer" if is_silent else "answers again"
            self.log.write("warning", f"the process of the workers {state}")
        self.lifecycle.silent = is_silent
        return self.process.seconds_silent > 0

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
            if model.backend is not None:
                model.backend.close()
        if self.process is not None:
            self.process.close()


def in_thread(function: Callable[[], Any]) -> asyncio.Future:
    """Run `function` in a thread and return a future of its result.

    Call it in the event loop. Unlike a thread of asyncio, the thread does not keep the process from
    ending.
    """
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from now on nothing cancels it but the wrapper

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(future)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After", "X-Request-ID"],
    )
