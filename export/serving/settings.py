"""The settings of `serve`. Each field of `Settings` has a default, a parser and a help text. The
flags, the environment variables and the table in the documentation are made from the fields."""

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from ..arguments import DTYPE_HELP, MAX_SHOWN, Parser, choice_type, integer, path, positive, unicode
from ..errors import UsageError

PREFIX = "VANILLA_TRANSFORMER_"  # prefix of environment variables
# not a flag, because all users of a machine see the arguments of a process
TOKEN = f"{PREFIX}TOKEN"
LEVELS = ("debug", "info", "warning", "error")
PAIR = re.compile(r"(?:([\w.-]+):)?([\w-]+?)-(\w+)")
MEBIBYTE = 2**20


def port(text: str) -> int:
    number = integer(text, 0)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text[:MAX_SHOWN]}")
    return number


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1e6:
        raise argparse.ArgumentTypeError(
            f"expected a number of seconds above 0 and up to 1000000, got {text[:MAX_SHOWN]!r}"
        )
    return number


def pair(text: str) -> tuple[str | None, str, str]:
    """Return (model, source, target) of the text `en-de` or `NAME:en-de`; the model is None without
    a name.

    The last hyphen separates the codes. Raises ArgumentTypeError for another text.
    """
    match = PAIR.fullmatch(unicode(text))
    if not match:
        raise argparse.ArgumentTypeError(
            f"expected a language pair such as en-de or NAME:en-de, got {text[:MAX_SHOWN]!r}"
        )
    return match[1], match[2], match[3]


def origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"https?://[\w.:\[\]-]+", text):
        raise argparse.ArgumentTypeError(
            f"expected an origin such as https://example.org, or *, got {text[:MAX_SHOWN]!r}"
        )
    return text


def boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text[:MAX_SHOWN]!r}")
    return text == "true"


def setting(kind: Callable[[str], Any], default: Any, help: str) -> Any:
    """Return a field of `Settings` with its default and help.

    `kind` parses the text of a value, or raises ArgumentTypeError. The flag of a field with the
    default `()` may be repeated.
    """
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help})


@dataclass(frozen=True)
class Settings:
    """The settings of a server. The scheduler chooses values that are `None`."""

    host: str = setting(unicode, "127.0.0.1", "address to listen on; 0.0.0.0 for all interfaces")
    port: int = setting(port, 8000, "port to listen on; 0 picks a free port and prints it")
    languages: tuple[tuple[str | None, str, str], ...] = setting(
        pair,
        (),
        "source and target language of a model, such as en-de; NAME:en-de if several models "
        "translate; may be repeated; default: the languages of the tokenizer or the model card",
    )
    dtype: str | None = setting(unicode, None, DTYPE_HELP)
    workers: int | None = setting(
        positive,
        None,
        "workers, each with its own batch and --threads CPU threads; default: by the size of the "
        "model",
    )
    threads: int | None = setting(
        positive, None, "CPU threads per worker; default: by the size of the model"
    )
    slots: int | None = setting(
        positive,
        None,
        "rows (sequences or beams) that all workers run at once; default: 64, or fewer if a "
        "worker's slots would need more than 1 GiB",
    )
    max_source: int | None = setting(
        positive,
        None,
        "maximum number of source tokens, longer sources are rejected; default: the model's limit; "
        "at most 512 for models that generate",
    )
    max_length: int | None = setting(
        positive,
        None,
        "maximum number of tokens of prompt and continuation; default: the model's limit, but "
        "at most 512",
    )
    queue: int = setting(
        positive,
        1024,
        "maximum number of waiting rows; further requests are rejected with 429, small ones "
        "beyond an eighth more",
    )
    max_batch: int = setting(positive, 128, "maximum number of texts in a request")
    auto_truncate: bool = setting(
        boolean,
        True,
        "true cuts inputs of /embed, /embed_all, /similarity, /predict (not /predict/TASK), "
        "/rerank, /v1/rerank and /v1/embeddings that are too long; false rejects them; a "
        "request's `truncate` takes precedence",
    )
    max_body: int = setting(
        positive,
        4 * MEBIBYTE,
        "maximum size of a request body in bytes; its JSON may have a value per 16 bytes",
    )
    requests: int = setting(
        positive, 512, "maximum number of requests at once, not counting health checks and metrics"
    )
    connections: int = setting(
        positive, 4096, "maximum number of open connections; further connections are closed"
    )
    timeout: float = setting(
        seconds, 120.0, "seconds until a request without a complete response fails"
    )
    header_timeout: float = setting(
        seconds, 10.0, "seconds that a connection may take to send the header of its next request"
    )
    body_timeout: float = setting(seconds, 30.0, "seconds that a client may take to send the body")
    grace: float = setting(
        seconds,
        1.0,
        "seconds after SIGTERM in which requests are still accepted, while /health/ready is 503",
    )
    drain: float = setting(
        seconds, 30.0, "seconds after the grace period for running requests to finish"
    )
    token_file: Path | None = setting(
        path,
        None,
        "file with the token that clients must send as `Authorization: Bearer TOKEN`; or set the "
        f"variable {TOKEN} to the token, but not both; default: no token is required",
    )
    cors_origin: tuple[str, ...] = setting(
        origin,
        (),
        "origin of web pages of other hosts that may send requests, or *; may be repeated",
    )
    log_level: str = setting(
        choice_type("level", LEVELS), "info", f"minimum level of log lines: {', '.join(LEVELS)}"
    )


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def is_repeatable(field: dataclasses.Field) -> bool:
    return field.default == ()


def flag(field: dataclasses.Field) -> str:
    return f"--{field.name.replace('_', '-')}"


def metavar(field: dataclasses.Field) -> str:
    kinds = set(get_args(field.type) or [field.type]) - {NoneType}
    names = {
        "languages": "SOURCE-TARGET",
        "cors_origin": "ORIGIN",
        "log_level": "LEVEL",
        "auto_truncate": "BOOL",
        "host": "HOST",
        "dtype": "DTYPE",
    }
    return names.get(field.name) or (
        "N" if kinds == {int} else "SECONDS" if kinds == {float} else "FILE"
    )


def add_settings(parser: Parser) -> None:
    """Add a flag for each field of `Settings`. The value of an absent flag is None."""
    group = parser.add_argument_group(
        "settings",
        f"Each can also be set by a variable, such as {PREFIX}PORT; flags take precedence.",
    )
    for field in FIELDS.values():
        default = "" if field.default in (None, ()) else f"; default: {json.dumps(field.default)}"
        help = f"{field.metadata['help']}{default}"
        action = "append" if is_repeatable(field) else "store"
        kind = field.metadata["kind"]
        group.add_argument(
            flag(field), type=kind, action=action, metavar=metavar(field), default=None, help=help
        )


def parse_settings(args: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """Return the settings. The flags `args` take precedence over variables of the `environment`,
    and these over defaults.

    Spaces separate the values of a variable whose flag may be repeated. An empty variable counts as
    not set.

    Raises:
        UsageError: if a variable has an invalid value.
    """
    values: dict[str, Any] = {}
    for name, field in FIELDS.items():
        variable = f"{PREFIX}{name.upper()}"
        value = getattr(args, name, None)
        if value is None and environment.get(variable, "").strip():
            value = read(f"variable {variable}", environment[variable].strip(), field)
        if value is not None:
            values[name] = tuple(value) if is_repeatable(field) else value
    return Settings(**values)


def read(name: str, text: str, field: dataclasses.Field) -> Any:
    """Return the value of `field` in `text`, a list if its flag may be repeated. Raises UsageError
    if it is invalid; `name` is for the message."""
    kind = field.metadata["kind"]
    try:
        return [kind(word) for word in text.split()] if is_repeatable(field) else kind(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name}: {error}") from None


def read_token(settings: Settings, environment: Mapping[str, str]) -> bytes | None:
    """Return the token that clients must send, or None if no token is required.

    It comes from the file in the settings, or from a variable of the `environment`. White space
    around it is removed.

    Raises:
        UsageError: if both the file and the variable are set.
        ValueError: if the token is empty, or has white space or characters that are not ASCII.
        OSError: if the file cannot be read.
    """
    file, variable = settings.token_file, environment.get(TOKEN)
    if file is not None and variable is not None:
        raise UsageError(f"both {file} and the variable {TOKEN} have a token, expected one of them")
    if file is None and variable is None:
        return None
    text = variable if file is None else file.read_bytes().decode("utf-8", "surrogateescape")
    token = (text or "").strip()
    if not re.fullmatch(r"[!-~]+", token):
        name = TOKEN if file is None else file
        raise ValueError(
            f"{name} has no token, expected one line of ASCII characters without spaces"
        )
    return token.encode()


def settings_table() -> str:
    """Return a Markdown table of the settings for the documentation."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for field in FIELDS.values():
        default = (
            "" if field.default in (None, ()) else f"`{json.dumps(field.default)}`".replace('"', "")
        )
        lines.append(f"| `{flag(field)} {metavar(field)}` | {default} | {field.metadata['help']} |")
    return "\n".join(lines)
