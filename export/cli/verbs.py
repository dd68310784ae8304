"""The registry of commands, and the flags that several commands share."""

import argparse
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ..arguments import (
    DTYPE_HELP,
    LEAVE_OUT_HELP,
    VARIANT_HELP,
    Parser,
    add_options,
    choice_type,
    path,
    positive,
    set_options,
    source,
    unicode,
)
from ..shared.generation_options import FIELDS

CHECKPOINT = "checkpoint directory or Hub id"
DEVICES = ("cpu", "cuda", "tensorrt")
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
    return lambda run: Verb(run.__name__.replace("_", "-"), run, declare, help, extras)


def add_variant(parser: Parser, help: str = VARIANT_HELP) -> None:
    parser.add_argument("--variant", type=source, metavar="NAME", help=help)


def add_leave_out(parser: Parser) -> None:
    parser.add_argument(
        "--leave-out",
        type=unicode,
        action="append",
        default=[],
        metavar="PATTERN",
        help=LEAVE_OUT_HELP,
    )


def add_device(parser: Parser) -> None:
    device_help = f"device to run an export on: {', '.join(DEVICES)}; default: the target's"
    parser.add_argument("--device", type=choice_type("device", DEVICES), help=device_help)


def add_runtime(parser: Parser) -> None:
    """Add the flags that say how an export is opened."""
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="CPU threads, of all workers together; default: all that this process may use",
    )
    add_device(parser)
    parser.add_argument("--dtype", help=DTYPE_HELP)
    cache_help = "directory where TensorRT keeps compiled engines; default: none"
    parser.add_argument("--engine-cache", type=path, metavar="DIR", help=cache_help)


def add_workers(parser: Parser) -> None:
    workers_help = (
        "number of batches that run at the same time and share the threads; default: by the "
        "size of the model"
    )
    parser.add_argument("--workers", type=positive, metavar="N", help=workers_help)


def add_language_arguments(parser: Parser) -> None:
    source_help = (
        f"source language of a multilingual model, {LANGUAGE_NAMES}; default: the source language "
        "of its tokenizer"
    )
    parser.add_argument("--src-lang", type=unicode, metavar="LANG", help=source_help)
    target_help = (
        f"target language of a multilingual model, {LANGUAGE_NAMES}; default: the language that "
        "generation_config.json selects"
    )
    parser.add_argument("--tgt-lang", type=unicode, metavar="LANG", help=target_help)


def language_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return src_lang and tgt_lang, those of them that the user set."""
    languages = {"src_lang": args.src_lang, "tgt_lang": args.tgt_lang}
    return {name: language for name, language in languages.items() if language is not None}


def add_generation_options(parser: Parser, excluded: Collection[str] = ()) -> None:
    """Add a flag for each generation option whose name is not in `excluded`."""
    group = parser.add_argument_group(
        "generation", "Flags take precedence over the model's generation_config.json."
    )
    fields = [field for name, field in FIELDS.items() if name not in excluded]
    add_options(group, fields, "generation_config.json")


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return {name: value} of the generation options that the user set."""
    return set_options(args, FIELDS.values())
