"""`Protocol`, and helpers that the endpoints of all protocols share.

A new protocol is a module of this folder with `PROTOCOL`, and a name in `PROTOCOLS` of
`serving/service.py`."""

import contextlib
import json
import reprlib
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema
from starlette.types import Receive, Scope, Send

from ...errors import RequestError, UsageError
from ...inference.options import check_names
from ...text.checks import check_unicode
from ...text.tasks.task import JsonObject
from ..models import Ability, ServedModel, ServedModels
from ..settings import Settings

# token ids in one option; every step checks all of them, which delays other requests
MAX_IDS = 1 << 16
MAX_VALUE_LENGTH = 80  # characters of a wrong value in an error
IN_USE = "models"  # field of a request's scope: the models that it uses
SHORT = reprlib.Repr()
SHORT.maxother = SHORT.maxstring = SHORT.maxlong = MAX_VALUE_LENGTH
EXPECTED = "a text, a list of texts, a list of token ids or a list of lists of token ids"
Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")
# a list whose first wrong item is the only error: an error of each item would take seconds
Items = Annotated[list[Item], Field(fail_fast=True)]
STRICT = ConfigDict(extra="forbid", strict=True)  # of requests whose unknown fields are rejected
ModelName = Annotated[
    str | None, Field(description="name of a model; by default the only model that fits")
]


def json_schema(kind: Any) -> WithJsonSchema:
    """Return the JSON schema of the type `kind`, for a field whose values an endpoint checks
    itself, with better errors."""
    return WithJsonSchema(TypeAdapter(kind).json_schema())


@dataclass(frozen=True)
class Protocol:
    """The endpoints of one API and its error format. `error_body` returns the JSON of an error.
    `validation` is the status of validation errors. GET requests to `public_paths` need no
    token."""

    router: APIRouter
    error_body: Callable[[RequestError], JsonObject] = lambda error: {"error": error.message}
    validation: int = 400
    public_paths: frozenset[str] = frozenset()


BINARY = {"type": "string", "format": "binary"}  # JSON schema of bytes


def request_body(schemas: JsonObject) -> JsonObject:
    """Return the OpenAPI description of a required body, from the JSON schema of each media
    type."""
    content = {media_type: {"schema": schema} for media_type, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}


def served_models(request: Request) -> ServedModels:
    return request.app.state.models


async def choose_model(request: Request, ability: Ability, name: str | None) -> ServedModel:
    """Return the model in the path, or else with this `name`, or the only one with the `ability`,
    as `use_model` does. Raises RequestError as `ServedModels.choose` does."""
    model = served_models(request).choose(ability, name_in_path(request) or name)
    return await use_model(request, model)


async def use_model(request: Request, model: ServedModel) -> ServedModel:
    """Return `model` when it is loaded. It stays so until the response is complete.

    Raises:
        RequestError: 503 if the model cannot be loaded, or does not fit into memory.
    """
    try:
        await model.acquire()
    except RequestError:
        raise
    except Exception:
        raise RequestError(
            503,
            f"the model {model.name} cannot be loaded, see the log of the server: try again later",
            retry_after=5,
        ) from None
    request.scope[IN_USE].append(model)
    return model


def server_settings(request: Request) -> Settings:
    return request.app.state.settings


def name_in_path(request: Request) -> str | None:
    """Return the name of the model in `/models/{model}/`, or None."""
    return request.path_params.get("model")


def short_repr(value: Any) -> str:
    """Return `repr(value)`, cut to a few items and characters. A list is not read to its end."""
    return SHORT.repr(value)


def validate(fields: JsonObject, model: type[Model]) -> Model:
    """Return the request with `fields`, those of its body. Raises RequestValidationError of FastAPI
    if they do not fit `model`."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        errors = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
        raise RequestValidationError(errors, body=fields) from None


def parse_body(content: bytes, model: type[Model]) -> Model:
    """Return the request in `content`, a JSON object with the fields of `model`.

    Raises:
        UsageError: if the body is not a JSON object.
        RequestValidationError: if the fields do not fit `model`.
    """
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not valid JSON: {error}, expected a JSON object") from None
    if not isinstance(fields, dict):
        raise UsageError(f"the body is {short_repr(fields)}, expected a JSON object")
    return validate(fields, model)


def check_names_and_sizes(options: dict[str, Any]) -> None:
    """Raise UsageError if one of `options`, those of `Runtime.generate`, is unknown or has more
    than `MAX_IDS` token ids. Their values are not checked."""
    check_names(options)
    for name, value in options.items():
        parts = value if isinstance(value, list) else []
        count = sum(len(item) if isinstance(item, list) else 1 for item in parts)
        if count > MAX_IDS:
            raise UsageError(f"{name} has {count} token ids, expected at most {MAX_IDS}", name)


def check_language_names(options: dict[str, Any]) -> None:
    """Raise UsageError unless `src_lang` and `tgt_lang` of `options` are strings, if they are
    set."""
    for name in ("src_lang", "tgt_lang"):
        language = options.get(name)
        if language is not None and not isinstance(language, str):
            raise UsageError(
                f"{name} is {short_repr(language)}, expected the name of a language", name
            )


def parse_inputs(name: str, value: Any, vocab_size: int) -> list[str | list[int]]:
    """Return the list of texts and rows of token ids in `value`, the field `name` of a request. One
    text or row becomes a list.

    Raises UsageError for other values, and for ids outside the vocabulary. The list may be empty.
    """
    inputs = [value] if isinstance(value, str) or are_ids(value) else value
    if not isinstance(inputs, list):
        raise UsageError(f"{name} is {short_repr(value)}, expected {EXPECTED}", name)
    for index, item in enumerate(inputs):
        if isinstance(item, str):
            try:
                check_unicode(item, f"{name} {index} of {len(inputs)}")
            except ValueError as error:
                raise UsageError(str(error), name) from None
        elif are_ids(item):
            check_vocabulary(name, item, vocab_size)
        else:
            raise UsageError(f"{name} has {short_repr(item)}, expected a text or token ids", name)
    return inputs


def are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def check_vocabulary(name: str, ids: list[int], size: int) -> None:
    """Raise UsageError if one of the token ids `ids`, in the field `name`, is outside the
    vocabulary of `size` tokens."""
    outside = [token for token in ids if not 0 <= token < size]
    if outside:
        raise UsageError(
            f"{name} has the token id {outside[0]}, expected ids from 0 to {size - 1}, the "
            f"vocabulary",
            name,
        )


def json_response(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def render_list(values: Iterable[Any]) -> bytes:
    """Return `values` as a JSON list. Each value is encoded on its own, so that other threads can
    run."""
    return b"[" + b",".join(map(to_json, values)) + b"]"


def to_json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


# ----------------------------------------------------------------------------- server-sent events


class EventStream(StreamingResponse):
    """A response of server-sent events.

    `content` yields complete events, as `event` returns them. It is closed when the request is
    cancelled, for example because the client disconnected.
    """

    def __init__(self, content: AsyncGenerator[bytes, None]):
        super().__init__(
            content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self.content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self.content):
            await self.stream_response(send)


async def wait_for_first(
    items: AsyncGenerator[Item, None], default: Item | None = None
) -> AsyncGenerator[Item, None]:
    """Wait for the first of `items` and return an iterator over all of them. If there are none, it
    is the `default`, unless that is None.

    Until then the request can be rejected with a status.
    """
    first = await anext(items, default)

    async def all_items() -> AsyncGenerator[Item, None]:
        async with contextlib.aclosing(items):
            if first is not None:
                yield first
            async for item in items:
                yield item

    return all_items()


def event(content: JsonObject) -> bytes:
    return b"data: %b\n\n" % to_json(content)
