"""The repository of the Open Inference Protocol, version 2: clients of Triton list, load and unload
the models of the server."""

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from ...errors import RequestError, UsageError
from ..models import LOADING, READY, UNLOADED, UNLOADING
from .protocol import Protocol, parse_body, served_models
from .tensors import VERSION

router = APIRouter(tags=["Open Inference Protocol"])
PROTOCOL = Protocol(router)
STATES = {UNLOADED: "UNAVAILABLE", LOADING: "LOADING", READY: "READY", UNLOADING: "UNLOADING"}


class RepositoryRequest(BaseModel):
    """A request for the index of the models, or to load or unload one."""

    ready: bool = Field(False, description="of the index: only models that are loaded")
    parameters: dict[str, Any] | None = Field(
        None, description="unload_dependents has no effect: no model depends on another"
    )


def check_control(request: Request) -> None:
    """Raise RequestError 403 unless the server has a token: others could unload its models."""
    if not request.app.state.needs_token:
        raise RequestError(
            403, "models are loaded and unloaded by requests with a token, expected --token-file"
        )


CONTROL: dict[str, Any] = {
    "dependencies": [Depends(check_control)],
    "openapi_extra": {
        "requestBody": {
            "content": {"application/json": {"schema": RepositoryRequest.model_json_schema()}}
        }
    },
}


@router.post("/v2/repository/index", **CONTROL)
async def repository_index(request: Request) -> JSONResponse:
    """Return the models of this server, loaded or not.

    Each has `name`, `version`, `state` (READY, LOADING, UNLOADING or UNAVAILABLE) and `reason`, why
    it is not available. With `ready` in the request, only those that are READY. The server needs
    `--token-file`."""
    body = await read_repository_request(request)
    return JSONResponse(
        [
            {
                "name": model.name,
                "version": VERSION,
                "state": STATES[model.state],
                "reason": (model.problem or UNLOADED) if model.state == UNLOADED else "",
            }
            for model in served_models(request)
            if model.state == READY or not body.ready
        ]
    )


@router.post("/v2/repository/models/{name}/load", **CONTROL)
async def load(request: Request, name: str) -> Response:
    """Load a model of this server, and respond when it is loaded. A loaded model stays as it is.

    The server needs `--token-file`."""
    model = served_models(request).find(name)
    await read_repository_request(request)
    try:
        await model.load()
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(400, f"the model {name} cannot be loaded: {error}") from None
    return Response()


@router.post("/v2/repository/models/{name}/unload", **CONTROL)
async def unload(request: Request, name: str) -> Response:
    """Unload a model when no request uses it any more, and respond then.

    A later request loads it again. The server needs `--token-file`."""
    model = served_models(request).find(name)
    await read_repository_request(request)
    await model.unload()
    return Response()


async def read_repository_request(request: Request) -> RepositoryRequest:
    """Return the body of `request`, which may be empty.

    Raises UsageError for files or a config of a model: only the exports that the server was started
    with are loaded."""
    content = await request.body()  # Triton's client sends no Content-Type
    body = parse_body(content.strip() or b"{}", RepositoryRequest)
    for parameter in body.parameters or {}:
        if parameter != "unload_dependents":
            raise UsageError(
                f"parameters has {parameter!r:.60}, expected only unload_dependents: a model is "
                "loaded from its export"
            )
    return body
