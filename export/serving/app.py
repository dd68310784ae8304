"""The application with all endpoints, and the responses to errors in each protocol's format."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Scope

from ..errors import TOKENIZER_FAILED, RequestError, TokenizerError, TooLong, UsageError
from . import health
from .lifecycle import Lifecycle
from .metrics import Metrics
from .models import ServedModels
from .settings import Settings

if TYPE_CHECKING:
    from .protocols.protocol import Protocol

OF_A_MODEL = "/models/{model}"
IN_PATH = re.compile(r"^/models/[^/]+(?=/|$)")
SHOWN = 80  # characters of a wrong value in an error
LONGEST = 1000  # characters of an error
NESTED = "the body is nested too deeply, expected fewer brackets"
SHORT = reprlib.Repr()
SHORT.maxother = SHORT.maxstring = SHORT.maxlong = SHOWN
# the last ones begin halves of characters, and others
SUSPICIOUS = (b"NaN", b"Infinity", b"\\ud", b"\\uD", b"\xed")
RENDERING = ("json.encoder", "starlette.responses", "fastapi.routing", "fastapi.encoders")


def create_app(
    models: ServedModels,
    protocols: tuple[Protocol, ...],
    settings: Settings | None = None,
    lifecycle: Lifecycle | None = None,
    metrics: Metrics | None = None,
) -> FastAPI:
    """Return the application without its limits, which `Frame` adds. Errors become responses in the
    format of their protocol. `app.state` has what handlers need."""
    app = FastAPI(
        title="vanilla-transformer", docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.models = models
    app.state.settings = settings or Settings()
    app.state.lifecycle = lifecycle or Lifecycle()
    app.state.metrics = metrics or Metrics()
    app.state.errors = Errors(protocols)
    app.state.needs_token = False
    for router in [*(protocol.router for protocol in protocols), health.router]:
        # routes are tried in order, and those of an included router take longer
        app.router.routes.extend(router.routes)
    for protocol in protocols:
        describe_errors(protocol)
        app.include_router(protocol.router, prefix=OF_A_MODEL)
        add_roots(app, protocol)
    for kind in (RequestError, RequestValidationError, RecursionError, ValueError, HTTPException):
        app.add_exception_handler(kind, respond)
    app.add_exception_handler(Exception, respond_to_mistake)
    app.openapi = functools.partial(document, app)  # type: ignore[method-assign]
    return app


def add_roots(app: FastAPI, protocol: Protocol) -> None:
    """Answer POST /models/NAME as POST /models/NAME/, for clients that take the URL of a model
    without a slash at its end.

    GET needs the slash: what the page asks for is relative to its address."""
    for route in protocol.router.routes:
        if isinstance(route, APIRoute) and route.path == "/" and "POST" in (route.methods or ()):
            app.add_api_route(OF_A_MODEL, route.endpoint, methods=["POST"], include_in_schema=False)


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document with the model of a path as a parameter. No handler declares the
    parameter."""
    if app.openapi_schema is None:
        named = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        for path, operations in FastAPI.openapi(app)["paths"].items():
            if path.startswith(OF_A_MODEL):
                operations["parameters"] = [named]
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
    answer = await respond_to_mistake(request, error)
    if answer.status_code == 500:
        raise error  # to the handler of mistakes, after which it is logged
    return answer


async def respond_to_mistake(request: Request, error: Exception) -> JSONResponse:
    return request.app.state.errors.response(request.scope["path"], error)


class Errors:
    """Error responses in the formats of `protocols`, by the path of the request."""

    def __init__(self, protocols: Sequence[Protocol] = ()):
        routes = ((each, protocol) for protocol in protocols for each in protocol.router.routes)
        self.routes: list[tuple[Any, Protocol]] = list(routes)
        self.public_paths = frozenset[str]().union(
            *(protocol.public_paths for protocol in protocols)
        )

    def response(self, path: str, error: BaseException) -> JSONResponse:
        """Return the error response for `error`. Server faults become a 500 without details."""
        protocol = self.protocol(path)
        if isinstance(error, HTTPException) and error.status_code == 405:
            error = HTTPException(405, headers={"Allow": self.allowed_methods(path, error)})
        refusal = refusal_of(error, 400 if protocol is None else protocol.validation)
        body = {"error": refusal.message} if protocol is None else protocol.error_body(refusal)
        return JSONResponse(body, refusal.status, headers_of(refusal, error))

    def check(self, path: str, body: bytes) -> None:
        """Raise RequestError for values in `body` that JSON does not have."""
        if any(map(body.__contains__, SUSPICIOUS)):
            check_values(body, self.validation(path))

    def validation(self, path: str) -> int:
        """Return the status for a body of the wrong form."""
        protocol = self.protocol(path)
        return 400 if protocol is None else protocol.validation

    def allowed_methods(self, path: str, error: HTTPException) -> str:
        """Return the header Allow: the methods of all routes at `path`, and HEAD wherever GET is.
        `error` has those of one."""
        methods = set((error.headers or {}).get("Allow", "").split(", "))
        methods.update(
            *(route.methods for route, _ in self.routes if route.path_regex.match(within(path)))
        )
        return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))

    def is_public(self, method: str, path: str) -> bool:
        """Return whether this request needs no token."""
        return method == "GET" and within(path) in self.public_paths

    def template(self, scope: Scope) -> str:
        """Return the path template of the request's route, also if the request was rejected before
        routing. Paths without a route share the template "none"."""
        route = scope.get("route") or next(
            (each for each, _ in self.routes if each.path_regex.match(within(scope["path"]))), None
        )
        return "none" if route is None else route.path.removeprefix(OF_A_MODEL) or "/"

    def protocol(self, path: str) -> Protocol | None:
        """Return the protocol of the route at `path`. A path without a route has the protocol of
        the routes below the same first name."""
        path = within(path)
        below = f"/{path.split('/')[1]}/" if path.startswith("/") else ""
        exact = (protocol for route, protocol in self.routes if route.path_regex.match(path))
        near = (protocol for route, protocol in self.routes if route.path.startswith(below))
        return next(exact, None) or (next(near, None) if below != "//" else None)


def within(path: str) -> str:
    """Return `path` without the model in it."""
    return IN_PATH.sub("", path, count=1) or "/"


def headers_of(refusal: RequestError, error: BaseException) -> dict[str, str]:
    # Allow, of a method that a route does not have
    headers = dict(getattr(error, "headers", None) or {})
    if refusal.retry_after is not None:
        headers["Retry-After"] = str(refusal.retry_after)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def refusal_of(error: BaseException, validation: int) -> RequestError:
    """Return the error response for `error`. A body of the wrong form gets the status
    `validation`."""
    refused = unshortened(error, validation)
    refused.message = one_line(refused.message)
    return refused


def unshortened(error: BaseException, validation: int) -> RequestError:
    """Return the answer for `error` with its whole message."""
    match error:
        case RequestError():
            return error
        case RequestValidationError():
            place = error.errors()[0]["loc"][1:2]
            param = str(place[0]) if place else None  # the body as a whole
            return RequestError(validation, of_validation(error), param)
        case TooLong():
            return RequestError(413, str(error))
        case TokenizerError():
            return RequestError(validation, str(error), code=TOKENIZER_FAILED)
        case UsageError():
            return RequestError(validation, str(error), error.param)
        case RecursionError():  # no text and no number makes a handler go so deep
            return RequestError(validation, NESTED)
        case ValueError() if not is_of_answer(error):
            return RequestError(validation, str(error))
        case HTTPException():
            # a body of the wrong form
            is_unread = error.status_code == 400 and error.__cause__ is not None
            return RequestError(validation if is_unread else error.status_code, of_http(error))
    return RequestError(
        500, "the server made a mistake, which its log describes: nothing is wrong with the request"
    )


def is_of_answer(error: ValueError) -> bool:
    """Return True if writing an answer raised `error`, for NaN or half of a character. The request
    is not at fault then."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    last = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return not isinstance(error, UsageError) and last in RENDERING


def of_http(error: HTTPException) -> str:
    """Return the message of an error of FastAPI, whose own message has neither the value seen nor
    the value expected."""
    if error.status_code == 405:
        return (
            f"this method does not go with this path, expected "
            f"{(error.headers or {}).get('Allow', 'another')}"
        )
    if error.status_code == 404:
        return "nothing is at this path, expected one of those in /openapi.json"
    cause = error.__cause__
    if isinstance(cause, RecursionError):
        return NESTED
    if cause is not None:
        return (
            f"the body cannot be read: {cause}, expected valid JSON in UTF-8, or a form where the "
            "path takes one"
        )
    return str(error.detail)


def of_validation(error: RequestValidationError) -> str:
    """Return the error for the first wrong value, with the value expected."""
    errors = error.errors()
    first = errors[0]
    place = first["loc"][1:]
    if first["type"] == "json_invalid":
        return (
            f"the body is not JSON at character {first['loc'][-1]}: {first['ctx']['error']}, "
            "expected an object"
        )
    if not place:
        return of_body(first)
    name = ".".join(map(str, place))
    if first["type"] == "missing":
        return f"{name} is missing, expected it in the {first['loc'][0]}"
    value = first["input"]
    group = [each for each in errors if each["loc"][1:2] == place[:1]]
    if len(group) > 1:  # the members of a union, each of which the value is not
        name = str(place[0])
        if isinstance(error.body, dict):
            value = error.body.get(place[0], value)
    expected = " or ".join(dict.fromkeys(map(expectation, group)))
    others = len({each["loc"][1] for each in errors if len(each["loc"]) > 1}) - 1
    return f"{name} is {shown(value)}, expected {expected}" + (
        f" (and {others} more are wrong)" if others else ""
    )


def of_body(error: dict[str, Any]) -> str:
    if error["type"] == "missing":
        return "the body is empty or null, expected a JSON object"
    if isinstance(error["input"], bytes):  # it was not read, as no header says what it is
        return "the body has another Content-Type, expected application/json"
    return f"the body is {shown(error['input'])}, expected a JSON object"


def expectation(error: dict[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "no such field"
    message = error["msg"].removeprefix("Value error, ")
    return re.sub(
        r"^(greater|less) than",
        r"a number \1 than",
        re.sub(r"^(Input|Value) should be ", "", message),
    )


def shown(value: Any) -> str:
    try:
        return SHORT.repr(value)
    except ValueError:  # a number of too many digits
        return f"a {type(value).__name__}"


def one_line(text: str) -> str:
    """Return `text` as a response can hold it: short, and without halves of characters."""
    line = " ".join(text.split())
    return (
        (line if len(line) <= LONGEST else f"{line[:LONGEST]}...")
        .encode("utf-8", "backslashreplace")
        .decode()
    )


def check_values(body: bytes, validation: int) -> None:
    """Check that `body` has no NaN, Infinity or halves of characters. JSON has none of them, but
    Python reads them.

    Raises:
        RequestError: of the status `validation` if a body has one.
    """

    def refuse(name: str) -> None:
        raise RequestError(
            validation, f"the body has the value {name}, expected a number that JSON has"
        )

    with contextlib.suppress(ValueError, RecursionError):  # the application says what is wrong
        found = json.loads(body, parse_constant=refuse)
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise RequestError(
                validation, f"the body has {half!a}, half of a character, expected whole ones"
            ) from None
