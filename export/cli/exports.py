"""Commands that write exports, compare them with their checkpoints, and measure both."""

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..arguments import (
    PATH,
    SOURCE,
    TEXT,
    Parser,
    add_argument,
    add_options,
    add_output,
    choices,
    get_output,
    set_options,
)
from ..inference.session import ATTENTION_KERNELS, CAPTURE, FUSIONS
from ..shared.options import COUNT, COUNT_OR_0
from ..shared.outputs import regular_file, whole_file
from ..terminal import say
from .verbs import (
    CHECKPOINT,
    DTYPE,
    EXPORT,
    add_generation_options,
    add_shared,
    generation_options,
    set_arguments,
    verb,
)

QUERY = {"query": "dogs", "texts": ["A dog runs.", "Two men play chess."]}  # an example
METRIC_SETTINGS = ("source", "references", "text", "labels", "bleu_tokenize")


def export_arguments(parser: Parser) -> None:
    from ..exporting.options import FIELDS

    add_argument(parser, "checkpoint", SOURCE, CHECKPOINT)
    add_output(parser, "export directory to write")
    add_options(parser, FIELDS.values())


@verb("write a checkpoint as ONNX graphs", export_arguments, extras="export,cpu")
def export(args: argparse.Namespace) -> None:
    output = get_output(args)

    from ..exporting.export import export
    from ..exporting.options import FIELDS

    manifest = export(args.checkpoint, output, **set_options(args, FIELDS.values()))
    files = {name: facts["bytes"] for name, facts in manifest["files"].items()}
    parity = {dtype: facts["parity"] for dtype, facts in manifest["variants"].items()}
    first = parity.pop(manifest["default_dtype"])
    facts = {"out": str(output), "files": files, "parity": first}
    facts |= {f"parity of {dtype}": report for dtype, report in parity.items()}
    facts |= {name: manifest[name] for name in ("parity_reason", "calibration") if name in manifest}
    facts.get("calibration", {}).pop("left_out", None)
    say(json.dumps(facts))
    for line in describe_export(output, manifest):
        print(line, file=sys.stderr)


def describe_export(output: Path, manifest: dict) -> Iterator[str]:
    """Yield lines for people: the size of the graphs, the largest error of each dtype, and the next
    command."""
    from ..heads import HEADS, RERANK
    from ..inference.export_info import read_export_info

    sizes = [facts["bytes"] for name, facts in manifest["files"].items() if "onnx/" in name]
    yield f"{output} has {sum(sizes) / 1e6:,.1f} MB of graphs and weights"
    for dtype, facts in manifest["variants"].items():
        if "max_error" in (facts["parity"] or {}) and "tolerance" in facts:
            error, tolerance = facts["parity"]["max_error"], facts["tolerance"]["max_error"]
            yield f"{dtype}: largest error against torch {error:.1e}, tolerance {tolerance:g}"
    tasks = HEADS[manifest["architecture"]].tasks
    predict = f"next: vanilla-transformer predict {shlex.quote(str(output))}"
    if RERANK in tasks and len(read_export_info(output).config["id2label"]) == 1:
        yield f"{predict} '{json.dumps(QUERY)}' --task rerank"
    elif tasks:
        yield f"{predict} {example_input(tasks[0].forms[0])}"


def example_input(form: tuple[str, ...]) -> str:
    """Return an input with the keys of `form`, as a user of `predict` types it."""
    if form == ("image",):
        return "PHOTO.png"
    if form == ("text",):
        return '"A dog runs."'
    return f"'{json.dumps(dict.fromkeys(form, '...'))}'"


def verify_arguments(parser: Parser) -> None:
    add_argument(parser, "export", PATH, EXPORT)
    add_argument(parser, "checkpoint", SOURCE, CHECKPOINT)
    add_argument(parser, "--cases", COUNT, "number of random batches to compare", default=60)
    add_argument(parser, "--seed", COUNT_OR_0, "seed of the random batches", default=0)
    add_shared(parser, "--variant")
    add_metric_arguments(parser)


@verb(
    "compare an export with its checkpoint: outputs and metrics",
    verify_arguments,
    extras="torch,cpu",
)
def verify(args: argparse.Namespace) -> None:
    from ..exporting.loading import load_checkpoint
    from ..inference.export_info import read_export_info
    from ..proof.verify import verify

    if settings := set_arguments(args, *METRIC_SETTINGS):
        args.extras = evaluate.extras  # named by the error if a package of a metric is missing
        settings |= set_arguments(args, "batch_size", "variant")
    model = load_checkpoint(args.checkpoint, args.variant)
    dtypes = read_export_info(args.export).dtypes
    reports = {
        dtype: verify(args.export, model, args.cases, args.seed, dtype=dtype) for dtype in dtypes
    }
    for dtype, report in reports.items():
        say(f"{dtype}: {report}" if len(dtypes) > 1 else report)
        if settings:
            from ..exporting.evaluation import compare

            say(json.dumps(compare(args.export, args.checkpoint, dtype, **settings)))
    failures = [failure for report in reports.values() for failure in report.failures]
    if failures:
        sys.exit("\n".join(failures))


def certify_arguments(parser: Parser) -> None:
    add_argument(parser, "export", PATH, EXPORT)
    add_shared(parser, "--device")
    add_argument(parser, "--dtype", DTYPE, "dtype of the weights; default: each of the export")
    report_help = "file for a report about the checks, the export and this machine, in JSON"
    add_argument(parser, "--output", PATH, report_help)
    causes = parser.add_argument_group(
        "causes of failures",
        "Run the checks with one thing changed, to see whether they pass then.",
    )
    add_argument(
        causes,
        "--without",
        choices("part", (CAPTURE, FUSIONS))._replace(collect=list),
        "capture: without CUDA graphs; fusions: without onnxruntime's rewriting of graphs, and "
        "without CUDA graphs; may be repeated",
        default=[],
        metavar="|".join((CAPTURE, FUSIONS)),
    )
    add_argument(
        causes,
        "--attention",
        choices("kernel", ATTENTION_KERNELS),
        "the only kind of attention kernel on CUDA; default: the target's",
        metavar="|".join(ATTENTION_KERNELS),
    )


@verb("check what an export computes on this machine", certify_arguments, extras="cpu")
def certify(args: argparse.Namespace) -> None:
    from ..proof.certify import certify

    with report_file(args.output) as file:
        certificate = certify(
            args.export,
            args.device,
            args.dtype,
            without=args.without,
            attention=args.attention,
            tell=say,
        )
        if file is not None:
            report = json.dumps(certificate.report(), indent=2)
            file.write(f"{report}\n".encode())
    if failures := certificate.failures:
        names = ", ".join(check.title for check in failures)
        sys.exit(f"{args.export} is not certified: {names}")


@contextlib.contextmanager
def report_file(output: Path | None) -> Iterator[BinaryIO | None]:
    """Yield the file to write a report to, which becomes `output` when the block ends. A device or
    a pipe is written directly. Yield None without `output`.

    Raises:
        OSError: before the block, if no file can be written there.
    """
    if output is None:
        yield None
        return
    expected = "expected a file in a folder that can be written to"
    if output.is_dir() or not output.parent.is_dir():
        raise OSError(f"{output} cannot be written, {expected}")
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open_report(output.resolve()))
        except OSError as error:
            raise OSError(f"{output} cannot be written ({error.strerror}), {expected}") from None
        yield file


def open_report(path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """Return the device `path`, opened for writing, or a file that becomes `path` when it is
    whole."""
    if path.exists() and not path.is_file():
        return path.open("wb")
    return whole_file(path, path.parent, regular_file(path))


def evaluate_arguments(parser: Parser) -> None:
    model_help = (
        "checkpoint directory or Hub id (run by torch), or export directory (run by onnxruntime)"
    )
    add_argument(parser, "model", SOURCE, model_help)
    add_shared(parser, "--device", "--dtype", "--variant", "--workers", "--src-lang", "--tgt-lang")
    add_metric_arguments(parser)
    add_generation_options(parser, excluded=["num_return_sequences"])  # a text has one translation


@verb(
    "measure BLEU, perplexity or accuracy on text",
    evaluate_arguments,
    extras="train,cpu",
)
def evaluate(args: argparse.Namespace) -> None:
    from ..exporting.evaluation import evaluate

    names = ("batch_size", "dtype", "workers", "device", "variant", *METRIC_SETTINGS)
    options = set_arguments(args, *names) | generation_options(args)
    say(json.dumps(evaluate(args.model, **options)))


def add_metric_arguments(parser: Parser) -> None:
    files = parser.add_argument_group("evaluation text")
    source_help = "for BLEU: source sentences, one per line; plain, .gz, .bz2 or .xz"
    add_argument(files, "--source", PATH, source_help)
    add_argument(files, "--references", PATH, "for BLEU: reference translations, one per line")
    tokenize_help = "sacreBLEU tokenizer: 13a, or none for tokenized text; default: 13a"
    add_argument(files, "--bleu-tokenize", TEXT, tokenize_help)
    text_help = "for (pseudo-)perplexity: any text; for accuracy: one text per line"
    add_argument(files, "--text", PATH, text_help)
    labels_help = "for accuracy: label name or id of each text, one per line"
    add_argument(files, "--labels", PATH, labels_help)
    batch_help = "rows per batch, unless an export generates"
    add_argument(files, "--batch-size", COUNT, batch_help, default=32)
