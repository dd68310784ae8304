"""What the endpoints of all protocols share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request

from .models import ServedModels
from .settings import Settings


@dataclass(frozen=True)
class Protocol:
    """Endpoints that clients of one kind know, and how they are told of an error: `error_body(status, message)` is the JSON.
    `statuses` changes the status of errors that these clients know by another one, of `validation` for a body of the wrong
    form."""

    name: str
    router: APIRouter
    error_body: Callable[[int, str], dict[str, Any]]
    validation: int = 400


def models_of(request: Request) -> ServedModels:
    return request.app.state.models


def settings_of(request: Request) -> Settings:
    return request.app.state.settings


def name_in_path(request: Request) -> str | None:
    """Of the model, under `/models/{model}/`."""
    return request.path_params.get("model")
