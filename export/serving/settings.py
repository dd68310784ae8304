"""The settings of `serve`, its token, and the exports before they are loaded. Each setting is one
field of `Settings`, with a flag and an environment variable."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any

from ..arguments import (
    DTYPE_HELP,
    MAX_SHOWN,
    PATH,
    TEXT,
    Parser,
    add_options,
    choices,
    read_as,
    set_options,
)
from ..errors import UsageError
from ..heads import GENERATORS, TRANSLATE, has_task
from ..inference.export_info import MANIFEST, check_has_manifest, json_object
from ..shared.options import COUNT, FLAG, Kind, fields_by_name, integers, numbers, option

PREFIX = "VANILLA_TRANSFORMER_"  # prefix of environment variables
# not a flag, because all users of a machine see the arguments of a process
TOKEN = f"{PREFIX}TOKEN"
LEVELS = ("debug", "info", "warning", "error")
PAIR_FORM = re.compile(r"(?:([\w.-]+):)?([\w-]+?)-(\w+)")
ORIGIN_FORM = re.compile(r"https?://[\w.:\[\]-]+|\*")
NAME = re.compile(r"[\w.-]+", re.ASCII)  # of an export
MEBIBYTE = 2**20


def pair(text: str) -> tuple[str | None, str, str]:
    """Return (model, source, target) of the text `en-de` or `NAME:en-de`; the model is None without
    a name.

    The last hyphen separates the codes. Raises ValueError for another text.
    """
    if not (match := PAIR_FORM.fullmatch(text)):
        raise ValueError(text[:MAX_SHOWN])
    return match[1], match[2], match[3]


def origin(text: str) -> str:
    if not ORIGIN_FORM.fullmatch(text):
        raise ValueError(text[:MAX_SHOWN])
    return text


def memory(text: str) -> int:
    """Return the bytes of a text such as `800MB`, `2GB` or `1000000`. Raises ValueError for
    another."""
    if not (match := re.fullmatch(r"([1-9]\d{0,11})(MB|GB|)", text)):
        raise ValueError(text[:MAX_SHOWN])
    return int(match[1]) * {"": 1, "MB": 10**6, "GB": 10**9}[match[2]]


def is_tuple(value: object) -> bool:
    return isinstance(value, tuple)


PORT = integers("a port from 0 to 65535", 0, 65535)
SECONDS = numbers(
    "a number of seconds above 0 and up to 1000000", lambda value: 0 < value <= 1e6
)._replace(metavar="SECONDS")
SIZE = Kind(
    "a size such as 800MB, 2GB or a number of bytes",
    lambda value: isinstance(value, int),
    memory,
    "SIZE",
)
SWITCH = FLAG._replace(expected="true or false")
BOOLEAN = SWITCH._replace(metavar="BOOL")
PAIRS = Kind("a language pair such as en-de or NAME:en-de", is_tuple, pair, "SOURCE-TARGET", tuple)
ORIGINS = Kind("an origin such as https://example.org, or *", is_tuple, origin, "ORIGIN", tuple)


@dataclass(frozen=True)
class Settings:
    """The settings of a server. `None` stands for the default that the help of the field names."""

    host: str = option(
        TEXT._replace(metavar="HOST"),
        "127.0.0.1",
        "address to listen on; 0.0.0.0 for all interfaces",
    )
    port: int = option(PORT, 8000, "port to listen on; 0 picks a free port and prints it")
    languages: tuple[tuple[str | None, str, str], ...] = option(
        PAIRS,
        (),
        "source and target language of a model, such as en-de; NAME:en-de if several models "
        "translate; may be repeated; default: the languages of the tokenizer or the model card",
    )
    dtype: str | None = option(TEXT._replace(metavar="DTYPE"), None, DTYPE_HELP)
    workers: int | None = option(
        COUNT,
        None,
        "workers, each with its own batch, which share the threads; default: by the size of the "
        "model",
    )
    threads: int | None = option(
        COUNT,
        None,
        "CPU threads, of all workers together; default: all that this process may use",
    )
    slots: int | None = option(
        COUNT,
        None,
        "rows (sequences or beams) that all workers run at once; default: 64, or fewer if a "
        "worker's slots would need more than 1 GiB",
    )
    max_source: int | None = option(
        COUNT,
        None,
        "maximum number of source tokens, longer sources are rejected; default: the model's limit; "
        "at most 512 for models that generate",
    )
    max_length: int | None = option(
        COUNT,
        None,
        "maximum number of tokens of prompt and continuation: requests for more are rejected, "
        "while --max-length of generate is where a text ends; default: the model's limit, but at "
        "most 512",
    )
    lazy: bool = option(SWITCH, False, "load each model at its first request, not at the start")
    idle_unload: float | None = option(
        SECONDS,
        None,
        "seconds without a request after which a model is unloaded; the next request loads it "
        "again; default: never",
    )
    max_memory: int | None = option(
        SIZE,
        None,
        "memory that the models may take together, by their files and slots, such as 2GB; a model "
        "that does not fit is not loaded; default: no limit",
    )
    queue: int = option(
        COUNT,
        1024,
        "maximum number of waiting rows; further requests are rejected with 429, small ones "
        "beyond an eighth more",
    )
    max_batch: int = option(COUNT, 128, "maximum number of texts in a request")
    auto_truncate: bool = option(
        BOOLEAN,
        True,
        "true cuts inputs of /embed, /embed_all, /similarity, /predict (not /predict/TASK), "
        "/rerank, /v1/rerank and /v1/embeddings that are too long; false rejects them; a "
        "request's `truncate` takes precedence",
    )
    max_body: int = option(
        COUNT,
        4 * MEBIBYTE,
        "maximum size of a request body in bytes; its JSON may have a value per 16 bytes",
    )
    requests: int = option(
        COUNT, 512, "maximum number of requests at once, not counting health checks and metrics"
    )
    connections: int = option(
        COUNT, 4096, "maximum number of open connections; further connections are closed"
    )
    timeout: float = option(
        SECONDS, 120.0, "seconds until a request without a complete response fails"
    )
    header_timeout: float = option(
        SECONDS, 10.0, "seconds that a connection may take to send the header of its next request"
    )
    body_timeout: float = option(SECONDS, 30.0, "seconds that a client may take to send the body")
    grace: float = option(
        SECONDS,
        1.0,
        "seconds after SIGTERM in which requests are still accepted, while /health/ready is 503",
    )
    drain: float = option(
        SECONDS, 30.0, "seconds after the grace period for running requests to finish"
    )
    token_file: Path | None = option(
        PATH,
        None,
        "file with the token that clients must send as `Authorization: Bearer TOKEN`; or set the "
        f"variable {TOKEN} to the token, but not both; default: no token is required",
    )
    cors_origin: tuple[str, ...] = option(
        ORIGINS,
        (),
        "origin of web pages of other hosts that may send requests, or *; may be repeated",
    )
    log_level: str = option(
        choices("level", LEVELS), "info", f"minimum level of log lines: {', '.join(LEVELS)}"
    )


FIELDS = fields_by_name(Settings)


def add_settings(parser: Parser) -> None:
    """Add a flag for each field of `Settings`. The value of an absent flag is None."""
    group = parser.add_argument_group(
        "settings",
        f"Each can also be set by a variable, such as {PREFIX}PORT; flags take precedence.",
    )
    add_options(group, FIELDS.values())


def parse_settings(args: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """Return the settings. The flags `args` take precedence over variables of the `environment`,
    and these over defaults.

    Spaces separate the values of a variable whose flag may be repeated. An empty variable counts as
    not set.

    Raises:
        UsageError: if a variable has an invalid value.
    """
    values = set_options(args, FIELDS.values())
    for name in FIELDS.keys() - values.keys():
        variable = f"{PREFIX}{name.upper()}"
        if text := environment.get(variable, "").strip():
            values[name] = read(f"variable {variable}", text, FIELDS[name])
    return Settings(**values)


def read(name: str, text: str, field: Field) -> Any:
    """Return the value of `field` in `text`. Raises UsageError if it is invalid; `name` is for the
    message."""
    kind = field.metadata["kind"]
    value = read_as(kind)
    try:
        return kind.collect(map(value, text.split())) if kind.collect else value(text)
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


# ------------------------------------------------------------------------------------- exports


@dataclass(frozen=True)
class Source:
    """An export to serve. `languages` are the pairs of `--languages`."""

    name: str
    directory: Path
    architecture: str
    languages: list[tuple[str, str]]

    @property
    def generates(self) -> bool:
        return self.architecture in GENERATORS


def sources(
    exports: Sequence[str], languages: Sequence[tuple[str | None, str, str]]
) -> list[Source]:
    """Return the exports to serve. Each of `exports` is PATH or NAME=PATH of a directory with a
    manifest.

    `languages` are (model or None, source, target) of the flag --languages.

    Raises:
        UsageError: if a path is empty, or a name is not valid in a URL or occurs twice. Also if a
            pair of `languages` names a model that is missing or does not translate, or names none
            and not exactly one translates.
        FileNotFoundError, NotADirectoryError, ValueError: if a path is not an export.
    """
    by_name: dict[str, Source] = {}
    for text in exports:
        name, directory = parse_name(text)
        if name in by_name:
            raise UsageError(
                f"{by_name[name].directory} and {directory} both have the name {name!r}, expected "
                "NAME=PATH for one of them"
            )
        check_has_manifest(directory)
        path = directory / MANIFEST
        by_name[name] = Source(
            name, directory, str(json_object(path, path.read_bytes()).get("architecture")), []
        )
    for model, source, target in languages:
        find_translator(by_name, model, f"{source}-{target}").languages.append((source, target))
    return list(by_name.values())


def parse_name(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator or Path(text).is_dir():
        name, path = os.path.basename(os.path.abspath(text)), text
    if not path:
        raise UsageError(f"expected NAME=PATH, got {text!r}")
    if not NAME.fullmatch(name) or name in (".", ".."):
        raise UsageError(
            f"the name of an export is {name!r}, expected letters, digits, '.', '_' and '-': use "
            "NAME=PATH"
        )
    return name, Path(path)


def find_translator(sources: Mapping[str, Source], name: str | None, pair: str) -> Source:
    """Return the source that the language pair `pair` of --languages is for.

    It is that with this `name`, or for None the only one that translates. `pair` is for messages
    only. Raises UsageError if there is none or several, or that with the name does not translate.
    """
    if name is not None and name not in sources:
        raise UsageError(
            f"--languages {name}:{pair}: model is {name!r}, expected one of {', '.join(sources)}"
        )
    fitting = [
        source
        for source in sources.values()
        if has_task(source.architecture, TRANSLATE) and name in (None, source.name)
    ]
    if len(fitting) != 1:
        names = ", ".join(source.name for source in fitting) or "none"
        raise UsageError(
            f"--languages {pair}: the models that translate are {names}, expected one model; write "
            f"NAME:{pair} to select one of several"
        )
    return fitting[0]
