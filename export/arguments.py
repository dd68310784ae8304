"""Parsing of the command line: the types of values, and a parser whose errors are one line."""

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args

from .errors import UsageError, did_you_mean
from .terminal import flush_output

FLAG = re.compile(r"--\w[\w-]*")
# Python's spelling of literals that JSON writes in lower case
LITERALS = {"True": True, "False": False, "None": None}
MAX_INT64 = 2**63 - 1
MAX_SHOWN = 40  # characters of a wrong value in an error
VARIANT_HELP = (
    "variant of the weights, as in from_pretrained: fp16 reads model.fp16.safetensors; default: "
    "model.safetensors"
)
DTYPE_HELP = (
    "dtype of the weights to run, such as fp32 or int8, if an export has several; default: the "
    "first in its manifest"
)
SET_HELP = "VALUE is JSON or text; may be repeated"
LEAVE_OUT_HELP = (
    "names of tensors to leave out, with shell wildcards: 'cls.chain.*'; may be repeated"
)


class Parser(argparse.ArgumentParser):
    """An argparse parser that accepts flags and other arguments in any order and prints errors in
    one line.

    Raises:
        UsageError: where argparse would print its usage and exit.
    """

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the process as argparse does. Help and version are flushed first, because standard
        output may be a closed pipe.

        `status` is the exit code. A `message` is written to standard error first.
        """
        flush_output()
        super().exit(status, message)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments of the command line `words`.

        Raises:
            UsageError: for an unknown flag, with the nearest one or all that are known, and for
                what argparse does not accept.
        """
        end = words.index("--") if "--" in words else len(words)  # after it, nothing is a flag
        for word in words[:end]:
            self._check_flag(word.split("=", 1)[0])
        return self.parse_intermixed_args(words)

    def _check_flag(self, word: str) -> None:
        """Raise UsageError if `word` is an unknown flag. Without this check argparse reports a
        missing argument first."""
        if FLAG.fullmatch(word) and word not in self._option_string_actions:
            known = self._option_string_actions
            self.error(
                f"unknown flag {word!r}"
                + (did_you_mean(word, known) or f", expected one of {', '.join(known)}")
            )


def add_field(group: argparse._ArgumentGroup, field: dataclasses.Field) -> None:
    """Add the flag of `field`, a generation option whose metadata has its `kind` and `help`.

    Its value is None if the user does not set it.
    """
    flag = f"--{field.name.replace('_', '-')}"
    help = field.metadata["help"]
    if "default:" not in help:
        default = "" if field.default is None else f", else {json.dumps(field.default)}"
        help += f"; default: generation_config.json{default}"
    help = help.replace("%", "%%")
    if field.type is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=help)
    else:
        group.add_argument(
            flag, type=json_argument(field.metadata["kind"]), metavar=metavar(field.type), help=help
        )


def metavar(field_type: Any) -> str:
    kinds = set(get_args(field_type) or [field_type]) - {NoneType}
    return "N" if kinds == {int} else "X" if kinds == {float} else "JSON"


def add_set(parser: Parser, help: str) -> None:
    """Add `--set KEY=VALUE`, which may be repeated. `args.set` is a list of (key, value).

    `help` is the flag's line in the help text, without the form of VALUE, which is added.
    """
    parser.add_argument(
        "--set",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"{help}; {SET_HELP}",
    )


def add_output(parser: Parser, help: str) -> None:
    """Add the argument OUTPUT and the flag `--output OUTPUT`. `get_output` reads whichever is set.

    `help` is the line of OUTPUT in the help text.
    """
    parser.add_argument("positional_output", type=path, nargs="?", metavar="OUTPUT", help=help)
    parser.add_argument("--output", type=path, help="OUTPUT as a flag")


def get_output(args: argparse.Namespace) -> Path:
    """Return the output path of a command with `add_output`.

    Raises:
        UsageError: unless exactly one of OUTPUT and `--output` is set.
    """
    match args.positional_output, args.output:
        case (None, None):
            raise UsageError("the output is missing, expected OUTPUT or --output OUTPUT")
        case (output, None) | (None, output):
            return output
    raise UsageError(
        f"got two outputs, {args.positional_output} and --output {args.output}, expected one "
        "of them"
    )


def choice_type(what: str, known: Iterable[str]) -> Callable[[str], str]:
    """Return a function that accepts one of the names `known`, for argparse's `type`.

    It raises ArgumentTypeError for others, and suggests the nearest. `what` says what the names
    are, such as "target".
    """

    def name(text: str) -> str:
        if text in known:
            return text
        seen = f"unknown {what} {text[:MAX_SHOWN]!r}, expected one of {', '.join(known)}"
        raise argparse.ArgumentTypeError(f"{seen}{did_you_mean(text, known)}")

    return name


def json_argument(kind: Any) -> Callable[[str], Any]:
    """Return a function that reads JSON, or text that is no JSON, and checks it with `kind.holds`,
    for argparse's `type`.

    It raises ArgumentTypeError for other values, with `kind.expected`.
    """

    def checked(text: str) -> Any:
        parsed = value(unicode(text))
        if not kind.holds(parsed):
            raise argparse.ArgumentTypeError(f"expected {kind.expected}, got {text[:MAX_SHOWN]!r}")
        return parsed

    return checked


def key_value(text: str) -> tuple[str, Any]:
    """Return (name, value) of the text `name=value`. The value is read as JSON if it is valid, else
    as text.

    Raises ArgumentTypeError without "=", and as `unicode` and `value` do.
    """
    name, separator, text_value = unicode(text).partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected key=value, got {text!r}")
    return name, value(text_value)


def value(text: str) -> Any:
    """Return the JSON value of `text`, or `text` itself if it is not JSON. True, False and None may
    be written as in Python.

    Raises ArgumentTypeError for JSON that is too deep or has numbers that are too long.
    """
    try:
        return LITERALS[text] if text in LITERALS else json.loads(text)
    except json.JSONDecodeError:
        return text
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise argparse.ArgumentTypeError(
            f"expected a value in JSON or text, got {text[:MAX_SHOWN]!r}...: {error}"
        ) from None


def unicode(text: str) -> str:
    """Return `text`. Raises ArgumentTypeError if it has bytes that are not UTF-8, which only a path
    may have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(
            f"expected UTF-8 text, got {os.fsencode(text)!r}"
        ) from None
    return text


def source(text: str) -> str:
    """Return `text`, a directory or Hub id. Raises ArgumentTypeError if it is empty.

    An empty text, as of an unset variable, would be the working directory.
    """
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return text


def path(text: str) -> Path:
    return Path(source(text))


def positive(text: str) -> int:
    return integer(text, 1)


def natural(text: str) -> int:
    return integer(text, 0)


def integer(text: str, minimum: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least {minimum}, got {text[:MAX_SHOWN]!r}"
        ) from None
    if not minimum <= number <= MAX_INT64:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least {minimum} and below 2**63, got {text[:MAX_SHOWN]}"
        )
    return number
