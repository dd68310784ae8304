"""`serve` in the replicas of Ray Serve: `serve run vanilla_transformer_export.ray:app
exports=my-export`.

It needs the extra `ray`. Ray's proxy takes the requests and gives them to replicas, each of which
is what a process of `vanilla-transformer serve` is.
"""

import argparse
import asyncio
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import UsageError, did_you_mean
from .serving.service import Service
from .serving.settings import FIELDS, Settings, parse_settings, read, read_token
from .serving.sources import Source, sources

RAY_ARGUMENTS = ("exports", "replicas", "cpus")  # the arguments that are no settings of `serve`
PROXY_SETTINGS = ("host", "port", "connections", "header_timeout", "grace")  # Ray has its own
BUSY = 16  # requests at once for each processor of a replica, above which others are started


def app(args: dict[str, Any]) -> Any:
    """Return the application that `serve run` and `serve deploy` build.

    Args:
        args: `exports`: PATH or NAME=PATH, with commas between several. Every replica has all of
            them, and every node has the paths. `replicas`: how many, or the least and the most of
            them as 1-4; default: 1. `cpus`: processors of one replica; default: 1. Else settings of
            `serve` by their names, as `max_batch`, with spaces between several values.

    Raises:
        UsageError: for an argument that there is not, and a value that cannot be read.
        FileNotFoundError, ValueError: for a directory that is no export, and for what is wrong with
            the token.
    """
    from ray import serve

    settings = settings_from(args, os.environ)
    sources = parse_exports(args, settings)
    cpus = positive_number("cpus", str(args.get("cpus", 1)))
    needs_token = read_token(settings, os.environ) is not None
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="exports",
        ray_actor_options={"num_cpus": cpus},
        max_ongoing_requests=settings.requests,
        max_queued_requests=settings.queue,
        graceful_shutdown_timeout_s=settings.drain,
        **scale(str(args.get("replicas", 1)), cpus),
    )
    return deployment.bind(sources, settings, cpus, needs_token)


def settings_from(args: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Return the settings: the arguments, else the variables of `serve`, else the defaults. Raises
    UsageError as `app`."""
    known = (*RAY_ARGUMENTS, *(name for name in FIELDS if name not in PROXY_SETTINGS))
    for name in args:
        if name not in known:
            raise UsageError(
                f"no argument {name!r}, expected some of "
                f"{', '.join(known)}{did_you_mean(name, known)}"
            )
    values = {
        name: read(name, str(value), FIELDS[name])
        for name, value in args.items()
        if name not in RAY_ARGUMENTS
    }
    settings = parse_settings(argparse.Namespace(**values), environment)
    return dataclasses.replace(
        settings, token_file=settings.token_file and settings.token_file.absolute()
    )


def parse_exports(args: Mapping[str, Any], settings: Settings) -> list[Source]:
    """Return the sources with absolute paths, because a replica runs in another directory."""
    exports = str(args.get("exports", ""))
    if not exports:
        raise UsageError(
            "exports is missing, expected exports=PATH, or several with commas between them"
        )
    parsed = sources(exports.split(","), settings.languages)
    return [
        dataclasses.replace(source, directory=Path(os.path.abspath(source.directory)))
        for source in parsed
    ]


def scale(replicas: str, cpus: int) -> dict[str, Any]:
    """Return Ray's options for a number of replicas, such as 2, or 1-4."""
    smallest, separator, largest = replicas.partition("-")
    if not separator:
        return {"num_replicas": positive_number("replicas", smallest)}
    numbers = {
        "min_replicas": positive_number("replicas", smallest),
        "max_replicas": positive_number("replicas", largest),
    }
    if numbers["min_replicas"] > numbers["max_replicas"]:
        raise UsageError(f"replicas is {replicas}, expected the smaller number first")
    return {"autoscaling_config": {**numbers, "target_ongoing_requests": BUSY * cpus}}


def positive_number(name: str, text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        expected = "a number from 1, or two as 1-4" if name == "replicas" else "a number from 1"
        raise UsageError(f"{name} is {text!r:.60}, expected {expected}")
    return int(text)


class Replica:
    """A replica of Ray: a service, from the first model to the last answer."""

    def __init__(self, sources: Sequence[Source], settings: Settings, cpus: int, needs_token: bool):
        token = read_token(settings, os.environ)
        if needs_token and token is None:
            raise ValueError(
                "this replica has no token, expected it in the environment of all nodes, or "
                "in a file"
            )
        self.service = Service(sources, settings, token, print, cores=cpus)
        self._watching: asyncio.Task | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray asks for it once, before the replica gets requests."""
        await self.service.start()
        self._watching = asyncio.create_task(self.service.watch())
        return BehindProxy(self.service.app)

    def __del__(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self.service.close()


class BehindProxy:
    """An ASGI application: `app` below whatever path Ray has given it, without a request id beside
    Ray's, which is the same."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [
                        header for header in message["headers"] if header[0] != b"x-request-id"
                    ],
                }
            await send(message)

        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        await self.app({**scope, "path": path, "root_path": ""}, receive, send_on)
