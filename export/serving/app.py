"""The FastAPI application with the endpoints of all protocols. Errors become responses in the
format of the protocol that the request uses."""

import functools
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import (
    TOKENIZER_FAILED,
    UNKNOWN_PATH,
    RequestError,
    TokenizerError,
    TooLong,
    UsageError,
)
from ..text.tasks.task import JsonObject
from . import health
from .models import ServedModel, ServedModels
from .observability import Metrics
from .protocols.protocol import IN_USE, Protocol, short_repr
from .settings import Settings

MODEL_PREFIX = "/models/{model}"
MODEL_IN_PATH = re.compile(r"^/models/([^/]+)(?=/|$)")
MAX_ERROR_LENGTH = 1000  # characters of an error
TOO_NESTED = "the body is nested too deeply, expected fewer levels of brackets"
NO_PROTOCOL = Protocol(health.router)  # of paths that no protocol has
# modules that write responses; a ValueError from them is not the fault of the request
RENDERING = ("json.encoder", "starlette.responses", "fastapi.routing", "fastapi.encoders")


def create_app(
    models: ServedModels,
    protocols: tuple[Protocol, ...],
    settings: Settings | None = None,
) -> FastAPI:
    """Return the application with the endpoints of `protocols` for `models`.

    The application has no limits and no authorization; `middleware.Frame` adds them around it.
    `app.state` has `models`, `settings` (by default those of `Settings`), and new `lifecycle` and
    `metrics`, which the endpoints read. It also has `errors`, and `needs_token`, which is False.
    """
    app = FastAPI(
        title="vanilla-transformer", docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.models = models
    app.state.settings = settings or Settings()
    app.state.lifecycle = health.Lifecycle()
    app.state.metrics = Metrics()
    app.state.errors = Errors(protocols)
    app.state.needs_token = False
    for router in [*(protocol.router for protocol in protocols), health.router]:
        # routes are tried in order; the routes of an included router take longer
        app.router.routes.extend(router.routes)
    for protocol in protocols:
        describe_errors(protocol)
        app.include_router(protocol.router, prefix=MODEL_PREFIX)
        add_roots(app, protocol)
    app.add_middleware(ModelsInUse)
    for kind in (RequestError, RequestValidationError, RecursionError, ValueError, HTTPException):
        app.add_exception_handler(kind, respond)
    app.add_exception_handler(Exception, respond_to_mistake)
    app.openapi = functools.partial(document, app)  # type: ignore[method-assign]
    return app


class ModelsInUse:
    """An ASGI application that gives each request to `app` with a list in its scope, to which
    `use_model` adds models. It releases them after the response, streams included."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        models: list[ServedModel] = []
        scope[IN_USE] = models
        try:
            await self.app(scope, receive, send)
        finally:
            for model in models:
                model.release()


def add_roots(app: FastAPI, protocol: Protocol) -> None:
    """Add a route to `app` that answers POST /models/NAME like POST /models/NAME/, because some
    clients omit the last slash. `protocol` has the route with the slash.

    GET needs the slash, because the links of the page are relative to its address.
    """
    for route in protocol.router.routes:
        if isinstance(route, APIRoute) and route.path == "/" and "POST" in (route.methods or ()):
            app.add_api_route(
                MODEL_PREFIX, route.endpoint, methods=["POST"], include_in_schema=False
            )


def document(app: FastAPI) -> JsonObject:
    """Return the OpenAPI document of `app`. Paths with `{model}` get a parameter, which no endpoint
    declares."""
    if app.openapi_schema is None:
        parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        for path, operations in FastAPI.openapi(app)["paths"].items():
            if path.startswith(MODEL_PREFIX):
                operations["parameters"] = [parameter]
    return app.openapi_schema or {}


def describe_errors(protocol: Protocol) -> None:
    """Describe the protocol's errors in /openapi.json. FastAPI would describe its own format."""
    wrong = RequestError(
        protocol.validation, "n is 0, expected a number greater than or equal to 1", "n"
    )
    example = protocol.error_body(wrong)
    error = {"description": "An error.", "content": {"application/json": {"example": example}}}
    for route in protocol.router.routes:
        route.responses |= {"4XX": error, "5XX": error}  # type: ignore[attr-defined]


async def respond(request: Request, error: Exception) -> JSONResponse:
    """Return the error response for `error`.

    If its status would be 500, a fault of the server, `error` is raised again.
    """
    answer = await respond_to_mistake(request, error)
    if answer.status_code == 500:
        raise error  # `Frame` logs it and responds with 500
    return answer


async def respond_to_mistake(request: Request, error: Exception) -> JSONResponse:
    return request.app.state.errors.response(request.scope["path"], error)


class Errors:
    """Error responses in the formats of `protocols`, by the path of the request."""

    def __init__(self, protocols: Sequence[Protocol]):
        routes = ((route, protocol) for protocol in protocols for route in protocol.router.routes)
        self.routes: list[tuple[Any, Protocol]] = list(routes)
        self.public_paths = frozenset[str]().union(
            *(protocol.public_paths for protocol in protocols)
        )

    def response(self, path: str, error: BaseException) -> JSONResponse:
        """Return the response to a request to `path` that ended with `error`. Server faults become
        a 500 without details."""
        protocol = self.protocol(path)
        if isinstance(error, HTTPException) and error.status_code == 405:
            error = HTTPException(405, headers={"Allow": self.allowed_methods(path, error)})
        rejection = to_request_error(error, protocol.validation)
        body = protocol.error_body(rejection)
        return JSONResponse(body, rejection.status, error_headers(rejection, error))

    def allowed_methods(self, path: str, error: HTTPException) -> str:
        """Return the header Allow: the methods of all routes at `path`, and HEAD if GET is one of
        them.

        `error` has the methods of one route only.
        """
        methods = set((error.headers or {}).get("Allow", "").split(", "))
        methods.update(*(route.methods for route, _ in self.matches(path)))
        return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))

    def is_public(self, method: str, path: str) -> bool:
        """Return True for a GET request to a public path of a protocol, which needs no token.

        The paths of `health` need none either, but are not counted here.
        """
        return method == "GET" and within(path) in self.public_paths

    def template(self, scope: Scope) -> str:
        """Return the path template of the request's route, such as "/v1/models/{id}", without the
        model in the path.

        It also works if the request was rejected before routing. Paths without a route share the
        template "none".
        """
        routes = (route for route, _ in self.matches(scope["path"]))
        route = scope.get("route") or next(routes, None)
        return "none" if route is None else route.path.removeprefix(MODEL_PREFIX) or "/"

    def protocol(self, path: str) -> Protocol:
        """Return the protocol of the route at `path`.

        A path without a route has the protocol of a route whose path begins with the same segment,
        such as /v2/, or else `NO_PROTOCOL`.
        """
        segment = f"{within(path)}/".split("/")[1]
        near = (item for item in self.routes if segment and item[0].path.startswith(f"/{segment}/"))
        return next(chain(self.matches(path), near), (None, NO_PROTOCOL))[1]

    def matches(self, path: str) -> Iterator[tuple[Any, Protocol]]:
        """Yield the routes at `path`, each with its protocol."""
        path = within(path)
        return (item for item in self.routes if item[0].path_regex.match(path))


def within(path: str) -> str:
    """Return `path` without a leading /models/NAME, for any NAME, or "/" if nothing is left.

    Other paths are returned unchanged.
    """
    return MODEL_IN_PATH.sub("", path, count=1) or "/"


def error_headers(rejection: RequestError, error: BaseException) -> dict[str, str]:
    # a 405 has the header Allow
    headers = dict(getattr(error, "headers", None) or {})
    if rejection.retry_after is not None:
        headers["Retry-After"] = str(rejection.retry_after)
    if rejection.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def to_request_error(error: BaseException, validation: int) -> RequestError:
    """Return `error` as a RequestError with one line of message. `validation` is the status of
    validation errors.

    An error that is not the fault of the request becomes a 500 without details. A RequestError is
    returned itself, with its message changed.
    """
    rejection = convert_error(error, validation)
    rejection.message = one_line(rejection.message)
    return rejection


def convert_error(error: BaseException, validation: int) -> RequestError:
    """Return `error` as a RequestError with the full message. `validation` is the status of
    validation errors.

    An error that is not the fault of the request becomes a 500 without details. A RequestError is
    returned itself.
    """
    match error:
        case RequestError():
            return error
        case RequestValidationError():
            location = error.errors()[0]["loc"][1:2]
            param = str(location[0]) if location else None  # None: the whole body
            return RequestError(validation, validation_message(error), param)
        case TooLong():
            return RequestError(413, str(error))
        case TokenizerError():
            return RequestError(validation, str(error), code=TOKENIZER_FAILED)
        case UsageError():
            return RequestError(validation, str(error), error.param)
        case RecursionError():  # only a nested body makes an endpoint recurse so deep
            return RequestError(validation, TOO_NESTED)
        case ValueError() if not is_rendering_error(error):
            return RequestError(validation, str(error))
        case HTTPException():
            # FastAPI could not parse the body
            is_unread = error.status_code == 400 and error.__cause__ is not None
            code = UNKNOWN_PATH if error.status_code == 404 else None
            status = validation if is_unread else error.status_code
            return RequestError(status, http_message(error), code=code)
    return RequestError(
        500, "internal server error: the request is not at fault, see the log of the server"
    )


def is_rendering_error(error: ValueError) -> bool:
    """Return True if `error` was raised while a response was serialized: a value is NaN or
    infinite, or a text has half of a surrogate pair.

    The server is then at fault, not the request.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    last = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return not isinstance(error, UsageError) and last in RENDERING


def http_message(error: HTTPException) -> str:
    """Return a message for an HTTP error of FastAPI. For 404, 405 and bodies that cannot be read it
    says what is expected, which FastAPI's own does not. Other messages are unchanged."""
    if error.status_code == 405:
        return (
            f"this path does not support the method of the request, expected "
            f"{(error.headers or {}).get('Allow', 'another method')}"
        )
    if error.status_code == 404:
        return "this path does not exist, expected a path in /openapi.json"
    cause = error.__cause__
    if isinstance(cause, RecursionError):
        return TOO_NESTED
    if cause is not None:
        return (
            f"the body cannot be read: {cause}, expected valid JSON in UTF-8, or a form if the "
            "endpoint accepts forms"
        )
    return str(error.detail)


def validation_message(error: RequestValidationError) -> str:
    """Return a message with the first wrong value and the value expected. It also has the number of
    other wrong fields."""
    errors = error.errors()
    first = errors[0]
    location = first["loc"][1:]
    if first["type"] == "json_invalid":
        return (
            f"the body is not valid JSON at character {first['loc'][-1]}: {first['ctx']['error']}, "
            "expected a JSON object"
        )
    if not location:
        return body_message(first)
    name = ".".join(map(str, location))
    if first["type"] == "missing":
        return f"{name} is missing, expected it in the {first['loc'][0]}"
    value = first["input"]
    group = [item for item in errors if item["loc"][1:2] == location[:1]]
    if len(group) > 1:  # one error for each member of a union
        name = str(location[0])
        if isinstance(error.body, dict):
            value = error.body.get(location[0], value)
    expected = " or ".join(dict.fromkeys(map(expectation, group)))
    others = len({item["loc"][1] for item in errors if len(item["loc"]) > 1}) - 1
    return f"{name} is {short_repr(value)}, expected {expected}" + (
        f" ({others} more fields are invalid)" if others else ""
    )


def body_message(error: JsonObject) -> str:
    if error["type"] == "missing":
        return "the body is empty or null, expected a JSON object"
    if isinstance(error["input"], bytes):  # FastAPI does not parse other media types
        return "the body has another Content-Type, expected application/json"
    return f"the body is {short_repr(error['input'])}, expected a JSON object"


def expectation(error: JsonObject) -> str:
    if error["type"] == "extra_forbidden":
        return "no field of this name"
    message = error["msg"].removeprefix("Value error, ")
    return re.sub(
        r"^(greater|less) than",
        r"a number \1 than",
        re.sub(r"^(Input|Value) should be ", "", message),
    )


def one_line(text: str) -> str:
    """Return `text` as one line. After `MAX_ERROR_LENGTH` characters it is cut, with "..." in place
    of the rest.

    Halves of surrogate pairs, which UTF-8 cannot hold, are escaped afterwards.
    """
    line = " ".join(text.split())
    return (
        (line if len(line) <= MAX_ERROR_LENGTH else f"{line[:MAX_ERROR_LENGTH]}...")
        .encode("utf-8", "backslashreplace")
        .decode()
    )
