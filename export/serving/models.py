"""The models that are served, by name. Each is loaded while requests need it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from ..engine.encoder import MAX_WAITING, EncoderScheduler
from ..engine.forking import trim_heap
from ..engine.limits import Admission, Arrangement
from ..engine.loop import Client
from ..engine.model import OnnxModel, find_target
from ..errors import RequestError, did_you_mean
from ..heads import EMBED, EMBED_SPARSE, HEADS, Task
from ..inference.config import VISION
from ..inference.export_info import ExportInfo
from ..inference.inputs import max_run_tokens
from ..text.languages import Directions

UNLOADED, LOADING, READY, UNLOADING = "unloaded", "loading", "ready", "unloading"


@dataclass(frozen=True)
class ModelPlan:
    """The facts of a model that are known before it is loaded.

    Attributes:
        info: the export. The hashes of its files need not be checked.
        arrangement: the numbers of workers and of threads.
        admission: limits of a model that generates; None for encoders.
        directions: the directions that the model translates.
        num_bytes: about how much memory the loaded model takes.
        created: when the export was made, in seconds since 1970.
    """

    info: ExportInfo
    arrangement: Arrangement
    admission: Admission | None = None
    directions: Directions = Directions((), {}, False)
    num_bytes: int = 0
    created: int = 0


class OpenModel(NamedTuple):
    """The open parts of a loaded model.

    Attributes:
        plan: the plan by which it was opened.
        runtime: a `TextRuntime` or an `ImageRuntime`.
        backend: runs generation, or batches the calls of an encoder, see `batched`.
        free: closes the model and frees its memory. No request may use it then.
    """

    plan: ModelPlan
    runtime: Any
    backend: Client | EncoderScheduler | None = None
    free: Callable[[], Awaitable[None]] | None = None


class ServedModel:
    """A model of the server by its `name`: an export that is loaded and unloaded while the server
    runs.

    `runtime` and `backend` are those of `OpenModel`, both None while it is not loaded.

    Args:
        name: the name of the model in requests.
        plan: how it will run.
        open: opens it, by a new plan.
        changed: called after each load, also after a failed one, and each unload, with this model
            and the seconds that it took.

    Attributes:
        plan: the plan of the export, as last read.
        state: `UNLOADED`, `LOADING`, `READY` or `UNLOADING`.
        problem: the error of the last load, empty if it succeeded.
        num_requests: the number of requests that use the model, which is not unloaded meanwhile.
        used_at: the time of `time.monotonic` at which the last request ended.
    """

    runtime: Any = None
    backend: Client | EncoderScheduler | None = None

    def __init__(
        self,
        name: str,
        plan: ModelPlan,
        open: Callable[[], Awaitable[OpenModel]],
        changed: "Callable[[ServedModel, float], object]",
    ):
        self.name = name
        self.plan = plan
        self.state, self.problem = UNLOADED, ""
        self.num_requests, self.used_at = 0, time.monotonic()
        self._open, self._changed = open, changed
        self._free: Callable[[], Awaitable[None]] | None = None
        self._change: asyncio.Task[Exception | None] | None = None  # the last load or unload
        self._unused = asyncio.Event()

    # ------------------------------------------------------------------------- loading, unloading

    async def acquire(self) -> None:
        """Load the model unless it is loaded, and keep it until `release`. Raises what `load`
        raises."""
        await self.load()
        self.num_requests += 1

    def release(self) -> None:
        self.num_requests -= 1
        self.used_at = time.monotonic()
        if not self.num_requests:
            self._unused.set()

    async def load(self) -> None:
        """Load the model unless it is loaded. Calls at the same time load it once.

        A model that is being unloaded is loaded again afterwards. Loading goes on if the call is
        cancelled.

        Raises:
            Exception: the error that opening the model raised. It is then unloaded.
        """
        while self.state != READY:
            if self.state == UNLOADED:
                self._start(LOADING, self._load())
            await self._wait()

    async def unload(self) -> None:
        """Wait until no request uses the model, and free its memory. Requests that come meanwhile
        wait, and load it again.

        A model that is being loaded is unloaded afterwards. Unloading goes on if the call is
        cancelled.

        Raises:
            Exception: the error that closing the model raised.
        """
        if self.state == LOADING and self._change is not None:
            await asyncio.wait([self._change])
        if self.state == READY:
            self._start(UNLOADING, self._unload())
        if self.state == UNLOADING:
            await self._wait()

    def unload_if_idle(self, seconds: float | None) -> None:
        """Start to unload the model if it had no request for `seconds`, None for any time."""
        is_idle = self.state == READY and not self.num_requests
        if is_idle and seconds is not None and time.monotonic() - self.used_at >= seconds:
            self._start(UNLOADING, self._unload())

    def put(self, opened: OpenModel) -> None:
        """Use the model that is `opened`."""
        self.plan, self.runtime, self.backend, self._free = opened
        self.state, self.used_at = READY, time.monotonic()

    def _start(self, state: str, change: Coroutine[Any, Any, Exception | None]) -> None:
        self.state = state
        self._change = asyncio.create_task(self._timed(change))

    async def _timed(self, change: Coroutine[Any, Any, Exception | None]) -> Exception | None:
        started = time.perf_counter()
        error = await change
        self._changed(self, time.perf_counter() - started)
        return error

    async def _wait(self) -> None:
        """Wait for the running load or unload, and raise its error."""
        assert self._change is not None
        if (error := await asyncio.shield(self._change)) is not None:
            raise error

    async def _load(self) -> Exception | None:
        """Open the model. Return the error, which may have nobody who waits for it."""
        try:
            self.put(await self._open())
        except Exception as error:
            self.state = UNLOADED
            self.problem = str(error) or type(error).__name__
            return error
        self.problem = ""
        return None

    async def _unload(self) -> Exception | None:
        while self.num_requests:
            self._unused.clear()
            await self._unused.wait()
        try:
            if self._free is not None:
                await self._free()
        except Exception as error:
            return error
        finally:
            self.runtime = self.backend = self._free = None
            await asyncio.to_thread(trim_heap)
            self.state = UNLOADED
        return None

    # ------------------------------------------------------------------------------- while loaded

    async def read(
        self, rows: int, function: Callable[..., Any], /, *args: Any, **options: Any
    ) -> Any:
        """Run `function` with `args` and `options` in a thread and return its result.

        For an encoder, the model calls of `function` count as one request of about `rows` rows;
        RequestError is raised if too many rows wait or the server is shutting down. For a model
        that generates, nothing is limited and `rows` has no effect. Errors of `function` are raised
        unchanged.
        """
        if self.info.generates:
            return await asyncio.to_thread(function, *args, **options)
        return await self.encoder.call(rows, function, *args, **options)

    @property
    def waiting(self) -> int:
        """Number of rows that wait for a batch."""
        return 0 if self.backend is None else self.backend.engine.waiting

    @property
    def running(self) -> int:
        """Number of rows in a batch."""
        return 0 if self.backend is None else self.backend.engine.running

    @property
    def client(self) -> Client:
        """The backend of a loaded model that generates."""
        return cast(Client, self.backend)

    @property
    def encoder(self) -> EncoderScheduler:
        """The backend of a loaded model that does not generate."""
        return cast(EncoderScheduler, self.backend)

    @property
    def admission(self) -> Admission:
        """The limits of a loaded model that generates, which also checks requests against them."""
        return self.client.admission

    def describe(self) -> str:
        """Return one line about workers, and slots or batches, for the log."""
        return (self.admission if self.info.generates else self.encoder).describe()

    # ------------------------------------------------------------------------ whether loaded or not

    @property
    def info(self) -> ExportInfo:
        return self.plan.info

    @property
    def architecture(self) -> str:
        return self.info.architecture

    @property
    def directions(self) -> Directions:
        return self.plan.directions

    @property
    def languages(self) -> Sequence[tuple[str, str]]:
        """Pairs of language codes, (source, target), that the model translates."""
        return self.directions.pairs

    @property
    def reads_texts(self) -> bool:
        """True if the model has a tokenizer, False if it reads images."""
        return self.info.config["model_type"] != VISION

    def has_task(self, *tasks: Task) -> bool:
        """Return True if the model has one of `tasks`."""
        return any(task in HEADS[self.architecture].tasks for task in tasks)

    @property
    def has_prompts(self) -> bool:
        """True if texts follow a prompt of the export."""
        return self.has_task(EMBED, EMBED_SPARSE)


class Ability(NamedTuple):
    """An ability that a request needs: it takes a model that `fits`. `purpose` completes "a model
    that can ..." in errors."""

    purpose: str
    fits: Callable[[ServedModel], bool]


@dataclass(frozen=True)
class ServedModels:
    """The models of a server by name. Those that are loaded may take `max_memory` bytes together,
    by their plans; None for no limit."""

    models: dict[str, ServedModel]
    max_memory: int | None = None

    def __iter__(self):
        return iter(self.models.values())

    def check_memory(self, name: str, plan: ModelPlan) -> None:
        """Raise RequestError 503 if the model `name` does not fit into `max_memory` beside those
        that are loaded."""
        others = [model for model in self if model.state != UNLOADED and model.name != name]
        used = sum(model.plan.num_bytes for model in others)
        if self.max_memory is not None and used + plan.num_bytes > self.max_memory:
            names = ", ".join(model.name for model in others)
            beside = f" beside {megabytes(used)} of {names}" if used else ""
            raise RequestError(
                503,
                f"the model {name} takes about {megabytes(plan.num_bytes)}{beside}, expected at "
                f"most {megabytes(self.max_memory)} together (--max-memory): try again when a "
                "model is unloaded",
                retry_after=5,
            )

    def choose(self, ability: Ability, name: str | None) -> ServedModel:
        """Return the model with this `name`, or without one the only model that has the `ability`.
        It need not be loaded.

        Raises:
            RequestError: 404 for an unknown name; 400 if the named model lacks the ability, or
                without a name if no model or several models have it.
        """
        if name is None:
            return self.only(filter(ability.fits, self), ability)
        model = self.find(name)
        if not ability.fits(model):
            raise RequestError(
                400, f"the model {name} is a {model.architecture}, which cannot {ability.purpose}"
            )
        return model

    def find(self, name: str) -> ServedModel:
        """Return the model with this name. Raises RequestError 404 if there is none."""
        if name not in self.models:
            known = f"expected one of {', '.join(self.models)}{did_you_mean(name, self.models)}"
            raise RequestError(404, f"model is {name!r:.100}, {known}")
        return self.models[name]

    def only(self, fitting: Iterable[ServedModel], ability: Ability) -> ServedModel:
        """Return the only model of `fitting`, those that have the `ability`.

        Raises:
            RequestError: 400 if there is no model or several, with their names.
        """
        models = list(fitting)
        if len(models) == 1:
            return models[0]
        names = ", ".join(model.name for model in models)
        if models:
            raise RequestError(
                400,
                f"{len(models)} models can {ability.purpose}, expected the name of one of them: "
                f"{names}",
            )
        raise RequestError(
            400, f"no model of this server can {ability.purpose}: {', '.join(self.models)}"
        )


def megabytes(size: int) -> str:
    return f"{size / 1e6:.{1 if size < 1e6 else 0}f} MB"


# ---------------------------------------------------------------------------------- encoders


class BatchedModel:
    """A replacement of `model`, whose full-sequence runs go through `scheduler`, together with
    those of other requests. Tasks pass `max_tokens` tokens at a time."""

    def __init__(self, model: OnnxModel, scheduler: EncoderScheduler):
        self.model = model
        self.outputs = scheduler.run
        self.max_tokens = max_batch_tokens(model.info, scheduler.arrangement)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def max_batch_tokens(info: ExportInfo, arrangement: Arrangement) -> int:
    """Return how many tokens tasks pass at once: as many as keep all workers busy, with rows of
    several lengths."""
    device = find_target(info).default_device
    return 2 * arrangement.workers * max_run_tokens(device, arrangement.threads)


def batched(
    runtime: Any, workers: int = 1, max_waiting: int = MAX_WAITING, **options: Any
) -> EncoderScheduler:
    """Make `runtime` run its model through a new `EncoderScheduler`, and return the scheduler.

    The scheduler is started; the caller closes it. `runtime` is a `TextRuntime` or an
    `ImageRuntime` opened with the threads of one worker. `workers` is the number of worker threads,
    and `max_waiting` the number of rows that may wait. `options` are `max_source`, `observe` and
    `max_calls` of `EncoderScheduler`.
    """
    model = runtime.runtime.model
    scheduler = EncoderScheduler(model, workers, max_waiting, **options)
    runtime.runtime.model = BatchedModel(model, scheduler)
    return scheduler
