"""The registry of commands, and the flags that several commands share."""

import argparse
import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ..arguments import (
    LEAVE_OUT_HELP,
    VARIANT_HELP,
    Parser,
    add_field,
    choice_type,
    path,
    positive,
    source,
    unicode,
)

CHECKPOINT = "checkpoint directory or Hub id"
DEVICES = ("cpu", "cuda", "tensorrt")


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
    """Make a function the verb of its name."""
    return lambda run: Verb(run.__name__.replace("_", "-"), run, declare, help, extras)


def add_variant(parser: Parser) -> None:
    parser.add_argument("--variant", type=source, metavar="NAME", help=VARIANT_HELP)


def add_leave_out(parser: Parser) -> None:
    parser.add_argument(
        "--leave-out",
        type=unicode,
        action="append",
        default=[],
        metavar="PATTERN",
        help=LEAVE_OUT_HELP,
    )


def add_runtime(parser: Parser) -> None:
    """Add the flags that say how an export is opened."""
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="processor threads; all this process may use if not given",
    )
    device_help = f"{', '.join(DEVICES)}; that of the target if not given"
    parser.add_argument("--device", type=choice_type("device", DEVICES), help=device_help)
    parser.add_argument(
        "--dtype", help="which of the export's, if it has several; the first if not given"
    )
    cache_help = "where tensorrt keeps what it compiled; nowhere if not given"
    parser.add_argument("--engine-cache", type=path, metavar="DIR", help=cache_help)


def add_workers(parser: Parser) -> None:
    workers_help = (
        "batches beside each other, of many texts, that share the threads; as suits the model if "
        "not given"
    )
    parser.add_argument("--workers", type=positive, metavar="N", help=workers_help)


def add_language_arguments(parser: Parser) -> None:
    source_help = (
        "language of the texts, of multilingual models, as eng_Latn; that of the tokenizer if not "
        "given"
    )
    parser.add_argument("--src-lang", type=unicode, metavar="LANG", help=source_help)
    target_help = "language of the translations; that of generation_config.json if not given"
    parser.add_argument("--tgt-lang", type=unicode, metavar="LANG", help=target_help)


def language_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the languages that were given."""
    languages = {"src_lang": args.src_lang, "tgt_lang": args.tgt_lang}
    return {name: language for name, language in languages.items() if language is not None}


def add_generation_options(parser: Parser, excluded: Collection[str] = ()) -> None:
    """Add a flag for each field of `Options`."""
    from ..inference.options import Options

    group = parser.add_argument_group(
        "generation", "generation_config.json of the checkpoint replaces these defaults."
    )
    for field in dataclasses.fields(Options):
        if field.name not in excluded:
            add_field(group, field)


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given."""
    from ..inference.options import Options

    options = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Options)}
    return {name: value for name, value in options.items() if value is not None}
