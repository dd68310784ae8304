"""The settings of `serve`. A setting is one field of `Settings`: its default, its valid values and
its purpose. The flags of the command, the variables of the environment and the table of the
documentation are made from the fields."""

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

from ..arguments import SHOWN, Parser, one_of, path, positive, unicode, whole
from ..errors import UsageError

PREFIX = "VANILLA_TRANSFORMER_"  # prefix of environment variables
TOKEN = f"{PREFIX}TOKEN"  # no flag: all users of a machine see arguments
LEVELS = ("debug", "info", "warning", "error")
PAIR = re.compile(r"(?:([\w.-]+):)?([\w-]+?)-(\w+)")
MEBIBYTE = 2**20


def port(text: str) -> int:
    number = whole(text, 0)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text[:SHOWN]}")
    return number


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1e6:
        raise argparse.ArgumentTypeError(
            f"expected seconds above 0 and at most 1000000, got {text[:SHOWN]!r}"
        )
    return number


def pair(text: str) -> tuple[str | None, str, str]:
    """Return the model, or `None`, and the codes of `en-de` or `NAME:en-de`. The last hyphen
    separates the codes."""
    match = PAIR.fullmatch(unicode(text))
    if not match:
        raise argparse.ArgumentTypeError(
            f"expected a pair of languages as en-de or NAME:en-de, got {text[:SHOWN]!r}"
        )
    return match[1], match[2], match[3]


def origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"https?://[\w.:\[\]-]+", text):
        raise argparse.ArgumentTypeError(
            f"expected an origin as https://example.org, or *, got {text[:SHOWN]!r}"
        )
    return text


def setting(kind: Callable[[str], Any], default: Any, help: str) -> Any:
    """Return a field of `Settings`. `kind` reads a value and raises ArgumentTypeError. A field with
    the default `()` may be repeated."""
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help})


@dataclass(frozen=True)
class Settings:
    """The settings of a server. `None` leaves the choice to the scheduler."""

    host: str = setting(
        unicode, "127.0.0.1", "address to listen on; 0.0.0.0 is every one of this machine"
    )
    port: int = setting(port, 8000, "port to listen on; 0 is a free one, which is printed")
    languages: tuple[tuple[str | None, str, str], ...] = setting(
        pair,
        (),
        "a pair that a model translates, as en-de, or NAME:en-de for one of several models; may be "
        "given again",
    )
    dtype: str | None = setting(
        unicode, None, "which of an export's, if it has several; the first if not given"
    )
    workers: int | None = setting(
        positive,
        None,
        "threads that each run a batch of their own; by the model's size if not given",
    )
    threads: int | None = setting(
        positive, None, "processor threads of one worker; by the model's size if not given"
    )
    slots: int | None = setting(
        positive, None, "rows that run at once, of all workers; by the model's size if not given"
    )
    max_source: int | None = setting(
        positive, None, "tokens of a source at most; the model's limit if not given, at most 512"
    )
    max_length: int | None = setting(
        positive,
        None,
        "tokens of a prompt and its continuation at most; the model's limit if not given, at "
        "most 512",
    )
    queue: int = setting(positive, 1024, "rows that wait at most; what comes then is refused")
    max_batch: int = setting(positive, 128, "texts in one request at most")
    max_body: int = setting(positive, 4 * MEBIBYTE, "bytes of a request's body at most")
    requests: int = setting(
        positive, 512, "requests at once at most; health and metrics are answered all the same"
    )
    connections: int = setting(
        positive, 4096, "open connections at most; above, new ones are closed"
    )
    timeout: float = setting(seconds, 120.0, "seconds for the answer to a request")
    header_timeout: float = setting(
        seconds, 10.0, "seconds until a connection has sent the header of its (next) request"
    )
    body_timeout: float = setting(seconds, 30.0, "seconds until the body is there")
    grace: float = setting(
        seconds,
        1.0,
        "seconds for which requests are taken after SIGTERM, with /health/ready at 503",
    )
    drain: float = setting(seconds, 30.0, "seconds that the last requests have after that")
    token_file: Path | None = setting(
        path,
        None,
        f"file of the token that clients must send; or the variable {TOKEN}; none is needed if "
        f"not given",
    )
    cors_origin: tuple[str, ...] = setting(
        origin, (), "a web site whose pages may ask, or *; may be given again"
    )
    log_level: str = setting(
        one_of("level", LEVELS), "info", f"{', '.join(LEVELS)}: the least that is logged"
    )


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def is_repeatable(field: dataclasses.Field) -> bool:
    return field.default == ()


def flag(field: dataclasses.Field) -> str:
    return f"--{field.name.replace('_', '-')}"


def metavar(field: dataclasses.Field) -> str:
    kinds = set(get_args(field.type) or [field.type]) - {NoneType}
    names = {
        "languages": "PAIR",
        "cors_origin": "ORIGIN",
        "log_level": "LEVEL",
        "host": "HOST",
        "dtype": "DTYPE",
    }
    return names.get(field.name) or (
        "N" if kinds == {int} else "SECONDS" if kinds == {float} else "FILE"
    )


def add_settings(parser: Parser) -> None:
    """Add a flag for each field. Its value is `None` if not given."""
    group = parser.add_argument_group(
        "settings", f"Each can also be a variable, {PREFIX}PORT for --port; flags go first."
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
    """Return the settings: flags, else variables of the environment, else defaults. A variable with
    several values has spaces between them. An empty variable counts as not set.

    Raises:
        UsageError: for a variable that cannot be read.
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
    """Return the value of a field. Raises UsageError, in which the value is called `name`."""
    kind = field.metadata["kind"]
    try:
        return [kind(word) for word in text.split()] if is_repeatable(field) else kind(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name}: {error}") from None


def read_token(settings: Settings, environment: Mapping[str, str]) -> bytes | None:
    """Return the token that clients must send, or `None` if no token is required.

    Raises:
        UsageError: for a file and a variable.
        ValueError: for a token that is empty, or none that a header can hold.
        OSError: for a file that cannot be read.
    """
    file, variable = settings.token_file, environment.get(TOKEN)
    if file is not None and variable is not None:
        raise UsageError(f"a token in {file} and one in the variable {TOKEN}, expected one of them")
    if file is None and variable is None:
        return None
    text = variable if file is None else file.read_bytes().decode("utf-8", "surrogateescape")
    token = (text or "").strip()
    if not re.fullmatch(r"[!-~]+", token):
        place = TOKEN if file is None else file
        raise ValueError(
            f"{place} has no token, expected one line of ASCII characters without spaces"
        )
    return token.encode()


def settings_table() -> str:
    """Return the fields for the documentation, in Markdown."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for field in FIELDS.values():
        default = (
            "" if field.default in (None, ()) else f"`{json.dumps(field.default)}`".replace('"', "")
        )
        lines.append(f"| `{flag(field)} {metavar(field)}` | {default} | {field.metadata['help']} |")
    return "\n".join(lines)
