"""The server as an application of Ray Serve: `serve run vanilla_transformer_export.ray:app
exports=my-export`. It needs the extra `ray`.

Ray's proxy distributes the requests to replicas. Each replica is the same service as a process of
`vanilla-transformer serve`.
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
from .serving.settings import FIELDS, Settings, Source, parse_settings, read, read_token, sources

RAY_ARGUMENTS = (
    "exports",
    "replicas",
    "cpus",
    "gpus",
)  # arguments that are not settings of `serve`
PROXY_SETTINGS = (
    "host",
    "port",
    "connections",
    "header_timeout",
    "grace",
)  # settings of `serve` that Ray Serve replaces
BUSY = 16  # requests at once per CPU above which Ray starts another replica


def app(args: dict[str, Any]) -> Any:
    """Return the application that `serve run` and `serve deploy` build.

    `args` are the arguments of these commands. `exports` is PATH or NAME=PATH, with commas between
    several. Every replica has all exports, and every node needs the paths. `replicas` is the number
    of replicas, or a range such as 1-4; default: 1. `cpus` is the number of CPUs of a replica;
    default: 1. `gpus` is the number of its GPUs; default: none. Other arguments are settings of
    `serve`, such as `max_batch`, with spaces between several values.

    Raises:
        UsageError: if an argument is unknown or its value is invalid.
        FileNotFoundError, ValueError: if a directory is not an export, or the token is invalid.
    """
    from ray import serve

    settings = settings_from(args, os.environ)
    sources = parse_exports(args, settings)
    cpus = positive_number("cpus", str(args.get("cpus", 1)))
    needs_token = read_token(settings, os.environ) is not None
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="exports",
        ray_actor_options=resources(args, cpus),
        max_ongoing_requests=settings.requests,
        max_queued_requests=settings.queue,
        graceful_shutdown_timeout_s=settings.drain,
        **scale(str(args.get("replicas", 1)), cpus),
    )
    return deployment.bind(sources, settings, cpus, needs_token)


def settings_from(args: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Return the settings of `serve` for the arguments `args` of Ray Serve.

    Arguments take precedence over the environment variables of `serve`, and these over the
    defaults. Raises UsageError for an unknown argument or an invalid value.
    """
    known = (*RAY_ARGUMENTS, *(name for name in FIELDS if name not in PROXY_SETTINGS))
    for name in args:
        if name not in known:
            raise UsageError(
                f"the argument {name!r} is unknown, expected one of "
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
    """Return the exports in `args["exports"]` with absolute paths, because a replica runs in
    another directory.

    Raises UsageError if there are none, and for an invalid name or language pair of `settings`.
    Raises FileNotFoundError, NotADirectoryError or ValueError for a path that is not an export.
    """
    exports = str(args.get("exports", ""))
    if not exports:
        raise UsageError(
            "exports is missing, expected exports=PATH, or several paths with commas between them"
        )
    parsed = sources(exports.split(","), settings.languages)
    return [
        dataclasses.replace(source, directory=Path(os.path.abspath(source.directory)))
        for source in parsed
    ]


def resources(args: Mapping[str, Any], cpus: int) -> dict[str, int]:
    """Return the options of a Ray actor with the CPUs and GPUs of a replica.

    Without "gpus" in `args`, Ray hides all GPUs from it. Raises UsageError for another value than a
    whole number of at least 1.
    """
    if "gpus" not in args:
        return {"num_cpus": cpus}
    return {"num_cpus": cpus, "num_gpus": positive_number("gpus", str(args["gpus"]))}


def scale(replicas: str, cpus: int) -> dict[str, Any]:
    """Return the options of Ray Serve for `replicas`, a number such as "2" or a range such as
    "1-4".

    `cpus` is the number of CPUs of a replica. Raises UsageError for another text.
    """
    smallest, separator, largest = replicas.partition("-")
    if not separator:
        return {"num_replicas": positive_number("replicas", smallest)}
    numbers = {
        "min_replicas": positive_number("replicas", smallest),
        "max_replicas": positive_number("replicas", largest),
    }
    if numbers["min_replicas"] > numbers["max_replicas"]:
        raise UsageError(
            f"replicas is {replicas}, expected {largest}-{smallest}, the smaller number first"
        )
    return {"autoscaling_config": {**numbers, "target_ongoing_requests": BUSY * cpus}}


def positive_number(name: str, text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        expected = (
            "a number such as 2, or a range such as 1-4" if name == "replicas" else "a number"
        )
        raise UsageError(f"{name} is {text!r:.60}, expected {expected} of at least 1")
    return int(text)


class Replica:
    """A replica of Ray Serve that runs a `Service`."""

    def __init__(self, sources: Sequence[Source], settings: Settings, cpus: int, needs_token: bool):
        token = read_token(settings, os.environ)
        if needs_token and token is None:
            raise ValueError(
                "this replica has no token, expected it in the environment of every node or in "
                "the token_file"
            )
        self.service = Service(sources, settings, token, print, cores=cpus)
        self._watching: asyncio.Task | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Load the models and return the application. Ray calls this once, before requests."""
        await self.service.start()
        self._watching = asyncio.create_task(self.service.watch())
        return BehindProxy(self.service.app)

    def __del__(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self.service.close()


class BehindProxy:
    """An ASGI application that adapts `app` to Ray's proxy: paths are relative to Ray's route
    prefix, and only Ray sends the header X-Request-ID."""

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
