"""Commands that run exports on texts, on standard input, and on files."""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from ..arguments import (
    DIRECTORY,
    PATH,
    TEXT,
    Parser,
    add_argument,
    add_set,
    choices,
    set_options,
)
from ..errors import UsageError
from ..heads import MAX_CHARACTERS
from ..shared.generation_options import FIELDS
from ..shared.options import COUNT, FLAG
from ..terminal import say
from .verbs import (
    EXPORT,
    RUNTIME,
    add_generation_options,
    add_shared,
    generation_options,
    set_arguments,
    verb,
)

if TYPE_CHECKING:
    from ..files.predictions import Predictions
    from ..files.run import Runner

STREAM_LINES = 512  # lines of standard input per shard, without --shard-lines
# arguments of a runtime
RUNTIME_ARGUMENTS = ("threads", "device", "dtype", "engine_cache", "workers")


# ------------------------------------------------------------------------------------------- flags


def add_files(parser: Parser) -> None:
    """Add the flags of inputs and outputs."""
    group = parser.add_argument_group("files", "Files instead of TEXT or standard input.")
    add_argument(
        group,
        "--input",
        PATH,
        "input files: text lines, .jsonl or .parquet; the first two also .gz, .bz2 or .xz; "
        "without an output, the results of one file are printed",
        nargs="+",
        action="extend",
    )
    outputs = group.add_mutually_exclusive_group()
    output_help = "file for the results of one input; the same command resumes an interrupted run"
    add_argument(outputs, "--output", PATH, output_help)
    directory_help = "directory for the results of all inputs; resumes like --output"
    add_argument(outputs, "--output-dir", DIRECTORY, directory_help)
    add_argument(group, "--force", FLAG, "replace the file of --output")
    add_argument(
        group,
        "--on-bad-line",
        choices("value", ("stop", "skip")),
        "stop at a bad line, or skip it and list it in OUTPUT.bad.jsonl; default: skip with an "
        "output, otherwise stop",
        metavar="stop|skip",
    )
    batch_help = "lines per batch of a task that does not generate, grouped by length"
    add_argument(group, "--batch-size", COUNT, batch_help, default=32)
    add_argument(
        group,
        "--shard-lines",
        COUNT,
        "lines per shard, written together; an interrupted run loses at most one shard; "
        f"default: 4096 with an output, otherwise {STREAM_LINES}",
    )
    characters_help = "maximum number of characters of a text; a longer one is a bad line"
    add_argument(group, "--max-characters", COUNT, characters_help, default=MAX_CHARACTERS)
    add_argument(
        group,
        "--field",
        TEXT,
        "field of the text in .jsonl and .parquet, also nested as doc.text; default: the "
        "fields of the task, such as text",
    )
    add_argument(
        group,
        "--output-field",
        TEXT,
        "field for the results in .jsonl and .parquet; default: translation for encoder-decoder "
        "models that generate, embedding for embeddings, otherwise prediction",
    )
    add_argument(
        group,
        "--ray",
        TEXT,
        "Ray cluster to run on: HOST:PORT, auto (the running cluster of this machine) or local (a "
        "new cluster on this machine); needs --output-dir",
        metavar="ADDRESS",
    )


def add_generation(parser: Parser) -> None:
    """Add the flags of tasks that generate."""
    add_shared(parser, "--workers", "--src-lang", "--tgt-lang")
    add_argument(
        parser,
        "--target-prefix",
        PATH,
        "text file with the start of each translation, one line per line of the --input file; for "
        "encoder-decoder models",
    )
    add_argument(
        parser,
        "--keep",
        TEXT,
        "regular expression of what translations keep; without one, placeholders such as {name} "
        "and %s, and addresses; needs an export with an alignment graph",
        nargs="?",
        const=True,
        metavar="PATTERN",
    )
    add_argument(
        parser,
        "--replace-unknowns",
        FLAG,
        "replace each word with the unknown token by the source word that it is aligned with; "
        "needs an export with an alignment graph",
    )
    shape = parser.add_mutually_exclusive_group()
    add_argument(
        shape,
        "--n-best",
        COUNT,
        "number of results per line, best first: at most --num-beams, or any number with "
        '--do-sample; in text as lines "number ||| text ||| score" with the number of the input '
        "line from 0; default: one text without a score",
    )
    scores_help = "write a tab and the log-probability score after each result"
    add_argument(shape, "--scores", FLAG, scores_help)
    add_argument(
        shape,
        "--alignments",
        choices("form of alignments", ("moses", "json")),
        "write a tab and the aligned words after each translation: moses (0-0 1-2, the numbers "
        "of a source word and a target word) or json (the words of both and the weights of "
        "each pair); default: moses",
        nargs="?",
        const="moses",
        metavar="AS",
    )
    add_generation_options(parser)


def generate_arguments(parser: Parser) -> None:
    add_argument(parser, "export", PATH, EXPORT)
    text_help = "texts; default: the lines of standard input"
    add_argument(parser, "text", TEXT, text_help, nargs="*")
    add_shared(parser, *RUNTIME)
    add_argument(
        parser,
        "--stream",
        FLAG,
        "print each text while it is generated; cannot be combined with --input or beam search "
        "(--num-beams above 1)",
    )
    add_files(parser)
    add_generation(parser)
    add_set(parser, "generation option by its Python name: top_p=0.9, eos_token_id=null ...")


def predict_arguments(parser: Parser) -> None:
    add_argument(parser, "export", PATH, EXPORT)
    text_help = (
        "texts, JSON objects for inputs with several parts, or paths of images; default: the "
        "lines of standard input"
    )
    add_argument(parser, "text", TEXT, text_help, nargs="*")
    task_help = (
        "task to run; default: the first that the model's head supports; an unknown name lists all"
    )
    add_argument(parser, "--task", TEXT, task_help)
    add_set(
        parser,
        "keyword argument of the task: top_k=3, split=false, aggregation_strategy=simple ...",
    )
    add_shared(parser, *RUNTIME)
    add_files(parser)
    add_generation(parser)


# ------------------------------------------------------------------------------------------- verbs


@verb("translate or continue text with an export", generate_arguments, extras="cpu")
def generate(args: argparse.Namespace) -> None:
    check_sources(args)
    from ..inference.options import check

    check(set_options(args, FIELDS.values()) | dict(args.set))
    if args.stream:
        stream(args)
    else:
        run_task(args, "generate")


@verb("run the task of an export's head on texts, images or files", predict_arguments, extras="cpu")
def predict(args: argparse.Namespace) -> None:
    check_sources(args)
    run_task(args, args.task)


def check_sources(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that cannot be combined. Texts, standard input and files exclude
    each other."""
    flags = {name for name, value in vars(args).items() if value}
    has_output = bool(flags & {"output", "output_dir"})
    if "input" in flags and flags & {"text", "stream"}:
        raise UsageError("--input cannot be combined with TEXT or --stream, expected one of them")
    if has_output and "input" not in flags:
        raise UsageError(
            "--output and --output-dir need --input and cannot be combined with --stream"
        )
    for name in ("replace_unknowns", "keep"):
        if {"stream", name} <= flags:
            raise UsageError(f"{flag(name)} cannot be combined with --stream, expected one")
    if "output_dir" not in flags and len(args.input or ()) > 1:
        raise UsageError(
            f"--input has {len(args.input)} files, expected one file or --output-dir DIR"
        )
    needs = {"force": "output", "ray": "output_dir"}
    needs |= dict.fromkeys(("target_prefix", "field", "output_field"), "input")
    for name, other in needs.items():
        if name in flags and other not in flags:
            raise UsageError(f"{flag(name)} needs {flag(other)}")
    for name in ("n_best", "scores", "alignments"):
        if name in flags and flags & {"text", "stream"}:
            raise UsageError(
                f"{flag(name)} needs lines from --input or standard input, expected no TEXT "
                "and no --stream"
            )


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def stream(args: argparse.Namespace) -> None:
    """Print each text while it is generated, for the texts of `args` or the lines of standard
    input."""
    from ..files.text_lines import decode_lines
    from ..text_runtime import TextRuntime

    options = generation_options(args) | dict(args.set)
    runtime = TextRuntime(args.export, **set_arguments(args, *RUNTIME_ARGUMENTS))
    for text in args.text or decode_lines(standard_input(), "standard input"):
        for piece in runtime.stream(text, **options) if text.strip() or args.text else ():
            say(piece, end="")
        say("")


def run_task(args: argparse.Namespace, task: str | None) -> None:
    """Run a task of the export on the inputs in `args`, and print the results or a report.

    `task` is its name, or None for the first of the model.
    """
    from ..files.run import SHARD_LINES, Runner

    predictions = open_predictions(args, task)
    if args.text and predictions.generates:
        call = predictions.task_call
        say("\n".join(call.function(predictions.runtime, args.text, **predictions.options)))
        return
    has_output = bool(args.output or args.output_dir)
    runner = Runner(
        predictions,
        args.field,
        args.output_field,
        args.target_prefix,
        args.shard_lines or (SHARD_LINES if has_output else STREAM_LINES),
        (args.on_bad_line or ("skip" if has_output else "stop")) == "skip",
    )
    if args.output_dir is not None:
        say_report(runner.to_directory(args.input, args.output_dir, args.ray))
    elif args.output is not None:
        say_report(runner.to_file(args.input[0], args.output, args.force))
    else:
        for results in iterate_results(args, runner):
            say(results, end="")


def say_report(report: dict) -> None:
    """Print a report of `Runner.to_file` or `to_directory`, and on standard error how many lines of
    each file are bad."""
    from ..files.resumable_output import BAD_LINES

    for name, counts in report["files"].items():
        if counts["bad"]:
            print(
                f"{counts['bad']:,} of {counts['lines']:,} lines are bad and have no result: "
                f"{name}{BAD_LINES} has the reasons",
                file=sys.stderr,
            )
    say(json.dumps(report))


def iterate_results(args: argparse.Namespace, runner: "Runner") -> Iterator[str]:
    """Yield what `runner` computes for the file, the arguments or standard input in `args`, as text
    to print. Raise ValueError for a blank argument if the task has no result for it."""
    from ..files.text_lines import raw_lines

    if args.input is not None:
        return runner.file(args.input[0])
    if args.text:
        for number, text in enumerate(args.text, 1):
            if not (text.strip() or runner.predictions.kind.takes_blank):
                expected = "a text that is not blank"
                raise ValueError(f"argument {number} is {text!r}, expected {expected}")
        return runner.lines((text.encode() for text in args.text), "argument {}")
    lines = raw_lines(standard_input(), "standard input")
    return runner.lines(lines, "line {} of standard input")


def open_predictions(args: argparse.Namespace, task: str | None) -> "Predictions":
    """Return the task `task` of the export in `args`, with its options; None is the first task of
    the model. An error about the number of results names `--n-best`."""
    from ..files.predictions import Predictions
    from ..text_runtime import open_runtime

    options = generation_options(args) | set_arguments(args, "keep")
    options |= {"replace_unknowns": True} if args.replace_unknowns else {}
    options |= dict(args.set)
    runtime = open_runtime(args.export, **set_arguments(args, *RUNTIME_ARGUMENTS))
    try:
        return Predictions(
            runtime,
            task,
            options,
            args.batch_size,
            args.n_best,
            args.scores,
            args.alignments,
            args.max_characters,
        )
    except UsageError as error:
        if error.param == "num_return_sequences" and args.n_best is not None:
            raise UsageError(f"--n-best {args.n_best}: {error}", error.param) from None
        raise


def standard_input() -> BinaryIO:
    if sys.stdin is None or sys.stdin.closed:
        raise ValueError(
            "standard input is closed, expected a text on each line, or texts as arguments"
        )
    return sys.stdin.buffer
