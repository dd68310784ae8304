"""All endpoints, in one application."""

from fastapi import FastAPI

from .models import ServedModels
from .protocols import Protocol


def create_app(models: ServedModels, protocols: tuple[Protocol, ...]) -> FastAPI:
    app = FastAPI(title="vanilla-transformer")
    app.state.models = models
    for protocol in protocols:
        app.include_router(protocol.router)
        app.include_router(protocol.router, prefix="/models/{model}")
    return app
