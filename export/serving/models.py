"""The models that are served, by name."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..engine.client import Client
from ..engine.encoder import EncoderScheduler
from ..engine.limits import Admission
from ..errors import RequestError, did_you_mean
from ..heads import EMBED, GENERATE, TRANSLATE, Task, has_task
from ..text.language_pairs import Directions, names_by_code


@dataclass(frozen=True)
class ServedModel:
    """A loaded export.

    Attributes:
        runtime: a `TextRuntime` or an `ImageRuntime`.
        scheduler: runs generation; None for encoders.
        languages: pairs of language codes, (source, target), that the model translates.
        encoder: batches the calls of encoders, see `encoder_runtime.batched`; None for a model
            that generates.
    """

    name: str
    runtime: Any
    scheduler: Client | None = None
    languages: list[tuple[str, str]] = field(default_factory=list)
    encoder: EncoderScheduler | None = None

    async def read(
        self, rows: int, function: Callable[..., Any], /, *args: Any, **options: Any
    ) -> Any:
        """Run `function` with `args` and `options` in a thread and return its result.

        For an encoder, the model calls of `function` count as one request of about `rows` rows;
        RequestError is raised if too many rows wait or the server is shutting down. For a model
        that generates, nothing is limited and `rows` has no effect. Errors of `function` are raised
        unchanged.
        """
        if self.encoder is None:
            return await asyncio.to_thread(function, *args, **options)
        return await self.encoder.call(rows, function, *args, **options)

    @property
    def backend(self) -> Client | EncoderScheduler:
        """Scheduler that runs the model's requests: `scheduler` or `encoder`."""
        engine = self.scheduler or self.encoder
        assert engine is not None  # each model has one of them
        return engine

    @property
    def admission(self) -> Admission:
        """Checks of requests by the scheduler, for models that generate."""
        assert self.scheduler is not None
        return self.scheduler.admission

    def describe(self) -> str:
        """Return one line about workers, and slots or batches, for the log."""
        if self.scheduler is not None:
            return self.admission.describe()
        assert self.encoder is not None  # a model without a scheduler has an encoder
        return self.encoder.describe()

    @property
    def architecture(self) -> str:
        return self.runtime.info.architecture

    def has_task(self, task: Task) -> bool:
        return has_task(self.architecture, task)

    @property
    def translates(self) -> bool:
        return self.has_task(TRANSLATE)

    @cached_property
    def directions(self) -> Directions:
        languages = self.runtime.languages
        names = names_by_code([*languages.tokens, *languages.words])
        return Directions(self.languages, names, bool(languages.words))

    @property
    def embeds(self) -> bool:
        return self.has_task(EMBED)

    @property
    def completes(self) -> bool:
        return self.has_task(GENERATE)


@dataclass(frozen=True)
class ServedModels:
    models: dict[str, ServedModel]

    def __iter__(self):
        return iter(self.models.values())

    def choose(
        self,
        fits: Callable[[ServedModel], bool],
        purpose: str,
        in_path: str | None = None,
        in_body: str | None = None,
    ) -> ServedModel:
        """Return the model with the name `in_path`, or else `in_body`. Without a name, return the
        only model that `fits`.

        `purpose` completes "a model that can ..." in errors.

        Raises:
            RequestError: 404 for an unknown name; 400 if the named model does not fit, or without a
                name if no model or several models fit.
        """
        name = in_path if in_path is not None else in_body
        if name is not None:
            model = self.find(name)
            if not fits(model):
                raise RequestError(
                    400, f"the model {name} is a {model.architecture}, which cannot {purpose}"
                )
            return model
        return self.only([model for model in self if fits(model)], purpose)

    def find(self, name: str) -> ServedModel:
        """Return the model with this name. Raises RequestError 404 if there is none."""
        if name not in self.models:
            known = f"expected one of {', '.join(self.models)}{did_you_mean(name, self.models)}"
            raise RequestError(404, f"model is {name!r:.100}, {known}")
        return self.models[name]

    def only(self, fitting: Iterable[ServedModel], purpose: str) -> ServedModel:
        """Return the only model of `fitting`. `purpose` completes "models can ..." in errors.

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
                f"{len(models)} models can {purpose}, expected the name of one of them: {names}",
            )
        raise RequestError(400, f"no model of this server can {purpose}: {', '.join(self.models)}")
