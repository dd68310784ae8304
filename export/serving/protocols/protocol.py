"""The parts that the endpoints of all protocols share."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ...errors import RequestError, UsageError
from ...inference import options
from ..models import ServedModels
from ..settings import Settings

# of a list among the options: a step looks at all of them, and other requests wait for that
MAX_IDS = 1 << 16


@dataclass(frozen=True)
class Protocol:
    """Endpoints that clients of one kind know, and how they are told of an error:
    `error_body(error)` is the JSON. `statuses` changes the status of errors that these clients know
    by another one, of `validation` for a body of the wrong form. GET requests to `public_paths`
    need no token."""

    name: str
    router: APIRouter
    error_body: Callable[[RequestError], dict[str, Any]]
    validation: int = 400
    public_paths: frozenset[str] = frozenset()


def served_models(request: Request) -> ServedModels:
    return request.app.state.models


def server_settings(request: Request) -> Settings:
    return request.app.state.settings


def name_in_path(request: Request) -> str | None:
    """Return the name of the model in `/models/{model}/`, or None."""
    return request.path_params.get("model")


@contextlib.contextmanager
def validated(value: Any, *place: str) -> Iterator[None]:
    """Raise the errors of pydantic as FastAPI does, for `value` at `place`."""
    try:
        yield
    except ValidationError as error:
        errors = [{**item, "loc": (*place, *item["loc"])} for item in error.errors()]
        raise RequestValidationError(errors, body=value) from None


def checked_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return options of `Runtime.generate`.

    Raises:
        UsageError: as `options.check`, and for a list of more than `MAX_IDS` token ids.
    """
    for name, value in values.items():
        parts = value if isinstance(value, list) else []
        count = sum(len(item) if isinstance(item, list) else 1 for item in parts)
        if count > MAX_IDS:
            raise UsageError(f"{name} has {count} token ids, expected at most {MAX_IDS}", name)
    return options.check(values)
