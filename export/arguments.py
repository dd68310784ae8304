"""Parsing of the command line: the types of values, and a parser whose errors are one line."""

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .errors import UsageError, did_you_mean
from .shared.options import Kind
from .terminal import flush_output

FLAG = re.compile(r"--\w[\w-]*")
# Python's spelling of literals that JSON writes in lower case
LITERALS = {"True": True, "False": False, "None": None}
MAX_SHOWN = 40  # characters of a wrong value in an error
VARIANT_HELP = (
    "variant of the weights, as in from_pretrained: fp16 reads model.fp16.safetensors; default: "
    "model.safetensors"
)
DTYPE_HELP = (
    "dtype of the weights to run, such as fp32 or int8, if an export has several; default: the "
    "first in its manifest"
)
SET_HELP = (
    "VALUE is JSON or text; may be repeated; KEY is a value of the recipe for train, a field of "
    "config.json for convert and export, an option for generate, an argument of the task for "
    "predict"
)
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


def add_options(
    group: argparse._ActionsContainer, fields: Iterable[dataclasses.Field], source: str = ""
) -> None:
    """Add the flag of each of `fields`, options of a dataclass. The value of an absent flag is
    None; `set_options` reads the others.

    `source` is where defaults come from, before those of the fields.
    """
    for field in fields:
        kind, name = field.metadata["kind"], flag(field)
        help = help_text(field)
        if kind.metavar or source:
            help += default_note(field, source)
        settings: dict[str, Any] = {"dest": field.name, "default": None}
        if source and not kind.metavar:  # what the source turns on can be turned off
            settings["action"] = argparse.BooleanOptionalAction
        if name:
            add_argument(group, name, kind, help, **settings)


def add_argument(
    group: argparse._ActionsContainer, name: str, kind: Kind, help: str, **settings: Any
) -> None:
    """Add an argument, or a flag that begins with --, for a value of the `kind`. `settings` are
    those of argparse, and take precedence."""
    shape: dict[str, Any] = {"action": "store_true"}
    if kind.metavar:
        metavar = kind.metavar if name.startswith("-") else name.upper()
        action = "append" if kind.collect else "store"
        shape = {"type": read_as(kind), "metavar": metavar, "action": action}
        shape |= {} if kind.alone is None else {"nargs": "?", "const": kind.alone}
    if settings.get("default") not in (None, []):
        help += f"; default: {settings['default']}"
    group.add_argument(name, help=help.replace("%", "%%"), **shape | settings)


def set_options(args: argparse.Namespace, fields: Iterable[dataclasses.Field]) -> dict[str, Any]:
    """Return {name: value} of the options `fields` that the user set in the parsed flags `args`."""
    options = {}
    for field in fields:
        if (value := getattr(args, field.name, None)) is not None:
            collect = field.metadata["kind"].collect
            options[field.name] = collect(value) if collect else value
    return options


def flag(field: dataclasses.Field) -> str | None:
    """Return the flag of an option, such as `--num-beams`, or None if it has none."""
    return field.metadata.get("flag", f"--{field.name.replace('_', '-')}")


def help_text(field: dataclasses.Field) -> str:
    help = field.metadata["help"]
    return help if isinstance(help, str) else help()


def default_text(field: dataclasses.Field) -> str:
    """Return the default of an option, in JSON if it is no text; empty without a default."""
    if field.default in (None, ()):
        return ""
    return field.default if isinstance(field.default, str) else json.dumps(field.default)


def default_note(field: dataclasses.Field, source: str) -> str:
    """Return the end of the help about the default, if the help itself does not say it."""
    words = ", else ".join(filter(None, (source, default_text(field))))
    return f"; default: {words}" if words and "default:" not in help_text(field) else ""


def add_set(parser: Parser, help: str) -> None:
    """Add `--set KEY=VALUE`, which may be repeated. `args.set` is a list of (key, value).

    `help` is the flag's line in the help text, without the form of VALUE, which is added.
    """
    add_argument(parser, "--set", KEY_VALUE, f"{help}; {SET_HELP}", default=[])


def add_output(parser: Parser, help: str) -> None:
    """Add the argument OUTPUT and the flag `--output OUTPUT`. `get_output` reads whichever is set.

    `help` is the line of OUTPUT in the help text.
    """
    add_argument(parser, "positional_output", PATH, help, nargs="?", metavar="OUTPUT")
    add_argument(parser, "--output", PATH, "OUTPUT as a flag", metavar="OUTPUT")


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


def read_as(kind: Kind) -> Callable[[str], Any]:
    """Return a function that reads a value of the `kind` in a text, for argparse's `type`; for a
    kind that collects values, one of them.

    It raises ArgumentTypeError for other values, with `kind.expected`.
    """

    def read(text: str) -> Any:
        wrong = f"expected {kind.expected}, got {text[:MAX_SHOWN]!r}"
        try:
            parsed = (kind.read or value)(text)
        except ValueError:  # of int and float
            raise argparse.ArgumentTypeError(wrong) from None
        if not (kind.collect or kind.holds(parsed)):
            raise argparse.ArgumentTypeError(wrong)
        return parsed

    return read


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

    Raises ArgumentTypeError for JSON that is too deep or has numbers that are too long, and as
    `unicode` does.
    """
    unicode(text)
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


def choices(what: str, known: Collection[str]) -> Kind:
    """Return the kind of the names `known`. `what` says what they are, such as "level"."""
    expected = f"one of {', '.join(known)}"
    metavar = what.rpartition(" ")[2].upper()
    return Kind(expected, lambda value: value in known, choice_type(what, known), metavar)


TEXT = Kind("a text", lambda value: isinstance(value, str), unicode, "NAME")
TEXTS = TEXT._replace(collect=list)
PATH = Kind("a path", lambda value: isinstance(value, str | os.PathLike), path, "FILE")
DIRECTORY = PATH._replace(metavar="DIR")
SOURCE = PATH._replace(read=source, metavar="NAME")  # a directory, or an id of the Hub
KEY_VALUE = Kind("key=value", lambda value: True, key_value, "KEY=VALUE", dict)
