"""The stages of a server, and its liveness, readiness and metrics. These endpoints need no token
and have no limits."""

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

router = APIRouter(tags=["operations"])
PATHS = (
    "/health",
    "/health/live",
    "/health/ready",
    "/v2/health/live",
    "/v2/health/ready",
    "/metrics",
)


@dataclass
class Lifecycle:
    """The stages of a server.

    `loading` ends when all models are loaded and those that generate have run once. `leaving`
    begins with the first signal: load balancers see it and stop sending requests. While `draining`,
    the server finishes the running requests and rejects new ones. `silent` is True while the
    process of the workers does not answer.
    """

    loading: bool = False
    leaving: bool = False
    draining: bool = False
    silent: bool = False

    @property
    def status(self) -> str:
        stages = {
            "shutting down": self.leaving,
            "loading": self.loading,
            "workers do not answer": self.silent,
        }
        return next((name for name, is_now in stages.items() if is_now), "ok")


@router.get("/health/live")
async def live() -> JSONResponse:
    """Return status 200 while the process runs."""
    return JSONResponse({"status": "ok"})


@router.get("/health")
@router.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """Return status 200 if the server accepts requests.

    Return 503 while it loads the models, while it shuts down, and while the process of the workers
    does not answer. The body is `{"status": text, "models": {name: state}}`, with "ok" for status
    200. States are "ready", "loading", "unloading" and "unloaded"; requests load a model."""
    status = request.app.state.lifecycle.status
    models = {model.name: model.state for model in request.app.state.models}
    return JSONResponse({"status": status, "models": models}, 200 if status == "ok" else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics of this server in the text format of Prometheus."""
    content, media_type = request.app.state.metrics.text()
    return Response(content, media_type=media_type)
