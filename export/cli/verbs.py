"""The registry of commands, and the flags that several commands share."""

import argparse
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ..arguments import (
    DIRECTORY,
    DTYPE_HELP,
    SOURCE,
    TEXT,
    VARIANT_HELP,
    Parser,
    add_argument,
    add_options,
    choices,
    set_options,
)
from ..shared.generation_options import FIELDS
from ..shared.options import COUNT, FLAG, Kind, without_none

CHECKPOINT = "checkpoint directory or Hub id"
EXPORT = "export directory"
DEVICES = ("cpu", "cuda", "tensorrt")
DTYPE, LANGUAGE = TEXT._replace(metavar="DTYPE"), TEXT._replace(metavar="LANG")
LANGUAGE_NAMES = "as its tokenizer names it: de (M2M100), de_DE (mBART), deu_Latn (NLLB)"


class Verb(NamedTuple):
    """A command. It has a function of the parsed arguments, a function that adds arguments to a
    parser, and the `extras` of the package that it needs."""

    name: str
    run: Callable[[argparse.Namespace], None]
    declare: Callable[[Parser], None]
    help: str
    extras: str


def verb(
    help: str, declare: Callable[[Parser], None], extras: str
) -> Callable[[Callable[[argparse.Namespace], None]], Verb]:
    """Return a decorator that makes a function the verb of its name.

    `help` is a line for the list of verbs, `declare` adds its arguments to a parser, and `extras`
    are those of the package that it needs.
    """
    return lambda run: Verb(run.__name__, run, declare, help, extras)


# flags that several verbs have: their values and their help
SHARED: dict[str, tuple[Kind, str]] = {
    "--variant": (SOURCE, VARIANT_HELP),
    "--force": (FLAG, "replace OUTPUT if vanilla-transformer wrote it"),
    "--json": (FLAG, "print JSON"),
    "--threads": (
        COUNT,
        "CPU threads, of all workers together; default: all that this process may use",
    ),
    "--device": (
        choices("device", DEVICES),
        f"device to run an export on: {', '.join(DEVICES)}; default: the target's",
    ),
    "--dtype": (DTYPE, DTYPE_HELP),
    "--engine-cache": (
        DIRECTORY,
        "directory where TensorRT keeps compiled engines; default: none",
    ),
    "--workers": (
        COUNT,
        "number of batches that run at the same time and share the threads; default: by the size "
        "of the model",
    ),
    "--src-lang": (
        LANGUAGE,
        f"source language of a multilingual model, {LANGUAGE_NAMES}; default: the source language "
        "of its tokenizer",
    ),
    "--tgt-lang": (
        LANGUAGE,
        f"target language of a multilingual model, {LANGUAGE_NAMES}; default: the language that "
        "generation_config.json selects",
    ),
}
RUNTIME = ("--threads", "--device", "--dtype", "--engine-cache")  # how an export is opened


def add_shared(parser: Parser, *names: str) -> None:
    """Add the flags `names` of `SHARED`."""
    for name in names:
        add_argument(parser, name, *SHARED[name])


def add_generation_options(parser: Parser, excluded: Collection[str] = ()) -> None:
    """Add a flag for each generation option whose name is not in `excluded`."""
    group = parser.add_argument_group(
        "generation", "Flags take precedence over the model's generation_config.json."
    )
    fields = [field for name, field in FIELDS.items() if name not in excluded]
    add_options(group, fields, "generation_config.json")


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return {name: value} of the generation options and languages that the user set."""
    return set_options(args, FIELDS.values()) | set_arguments(args, "src_lang", "tgt_lang")


def set_arguments(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return {name: value} of those of the arguments `names` that the user set."""
    return without_none({name: getattr(args, name) for name in names})
