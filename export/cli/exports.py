"""Verbs that write exports, compare them with their checkpoints, and measure both."""

import argparse
import json
import sys

from ..arguments import (
    Parser,
    add_output,
    add_set,
    natural,
    one_of,
    one_or_more_of,
    output_of,
    path,
    positive,
    source,
)
from ..terminal import say
from .verbs import (
    CHECKPOINT,
    add_generation_options,
    add_language_arguments,
    add_leave_out,
    add_variant,
    add_workers,
    generation_options,
    language_settings,
    verb,
)


def export_arguments(parser: Parser) -> None:
    from ..one_graph import MODES
    from ..specs.sequences import IMAGE_SIZES
    from ..targets.registry import default_target, known_targets, targets

    parser.add_argument("checkpoint", type=source, metavar="CHECKPOINT", help=CHECKPOINT)
    add_output(parser, "export directory to write")
    target_help = ", ".join(f"{target.name} ({target.help})" for target in targets())
    target_type = one_of("target", [target.name for target in targets()])
    parser.add_argument(
        "--target",
        type=target_type,
        default=default_target(),
        help=f"{target_help}; default: %(default)s",
    )
    dtypes = dict.fromkeys(dtype for target in targets() for dtype in target.dtypes)
    several = " and ".join(target.name for target in targets() if target.is_standard)
    dtype_help = (
        f"of the weights: {known_targets()}; if not given fp32, on GPUs fp16, or bf16 where "
        "float16 overflows"
    )
    dtype_help += f"; {several}: also several in one directory, as fp32,int8"
    parser.add_argument("--dtype", type=one_or_more_of("dtype", dtypes), help=dtype_help)
    opsets = [
        f"{target.name} {min(target.opsets)} to {max(target.opsets)}"
        for target in targets()
        if len(target.opsets) > 1
    ]
    opset_help = f"of the graphs: {', '.join(opsets)}; the lowest if not given"
    parser.add_argument("--opset", type=positive, metavar="N", help=opset_help)
    size_help = (
        "of images: the model's own (trained) or any (free); by the model's config if not given"
    )
    parser.add_argument("--image-size", type=one_of("image size", IMAGE_SIZES), help=size_help)
    shortlist_help = "text: only its tokens, and the special ones, can be generated"
    parser.add_argument("--shortlist", type=path, metavar="FILE", help=shortlist_help)
    calibrate_help = (
        "text: int8 products of the cpu target get one scale for all rows, by what they read of "
        "it; faster"
    )
    parser.add_argument("--calibrate", type=path, metavar="FILE", help=calibrate_help)
    generate_help = (
        "one graph that takes ids and returns sequences, of a model that generates: greedy, sample "
        "or beam search"
    )
    parser.add_argument(
        "--generate", type=one_of("mode", MODES), metavar="MODE", help=generate_help
    )
    keep_help = (
        "keep the converted checkpoint there, where CHECKPOINT is of another family; temporary if "
        "not given"
    )
    parser.add_argument("--keep", type=path, metavar="DIR", help=keep_help)
    add_set(
        parser,
        "field of the config.json of a CHECKPOINT of another family: architectures=BertModel ...",
    )
    add_leave_out(parser)
    add_variant(parser)
    triton_help = (
        "also write a model of Triton there, its folder in a model repository; without generation, "
        "or with --generate"
    )
    parser.add_argument("--triton", type=path, metavar="DIR", help=triton_help)
    parser.add_argument("--force", action="store_true", help="replace OUTPUT if it is ours")


@verb("write a checkpoint as ONNX graphs", export_arguments, extras="export,cpu")
def export(args: argparse.Namespace) -> None:
    output = output_of(args)

    from vanilla_transformer.files import output_path

    from ..exporting.export import export

    for each in [output] if args.triton is None else [output, args.triton]:
        output_path(each, [text for text in (args.shortlist, args.calibrate) if text is not None])
    names = (
        "target",
        "dtype",
        "shortlist",
        "calibrate",
        "generate",
        "opset",
        "keep",
        "image_size",
        "triton",
    )
    settings = {name: getattr(args, name) for name in names}
    settings |= {"config": dict(args.set), "leave_out": args.leave_out, "variant": args.variant}
    manifest = export(args.checkpoint, output, args.force, **settings)
    files = {
        name: facts["bytes"] for name, facts in manifest["files"].items() if name.endswith(".onnx")
    }
    others = {
        f"parity of {dtype}": facts["parity"]
        for dtype, facts in manifest.get("other_dtypes", {}).items()
    }
    if "parity_reason" in manifest:
        others["parity_reason"] = manifest["parity_reason"]
    if "calibration" in manifest:
        others["calibration"] = {
            name: fact for name, fact in manifest["calibration"].items() if name != "left_out"
        }
    say(json.dumps({"out": str(output), "files": files, "parity": manifest["parity"], **others}))


def verify_arguments(parser: Parser) -> None:
    parser.add_argument("export", type=path, metavar="EXPORT", help="export directory")
    parser.add_argument("checkpoint", type=source, metavar="CHECKPOINT", help=CHECKPOINT)
    parser.add_argument(
        "--cases",
        type=positive,
        default=60,
        metavar="N",
        help="random batches to compare; default: %(default)s",
    )
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="of the batches; default: %(default)s"
    )
    add_variant(parser)
    add_metric_arguments(parser)


@verb(
    "compare an export with its checkpoint, also by metrics",
    verify_arguments,
    extras="torch,cpu",
)
def verify(args: argparse.Namespace) -> None:
    from ..exporting.loading import load_checkpoint
    from ..exporting.parity import verify
    from ..inference.export_info import read_artifact

    model = load_checkpoint(args.checkpoint, args.variant)
    dtypes = read_artifact(args.export).dtypes
    reports = {
        dtype: verify(args.export, model, args.cases, args.seed, dtype=dtype) for dtype in dtypes
    }
    for dtype, report in reports.items():
        say(f"{dtype}: {report}" if len(dtypes) > 1 else report)
        if settings := metric_settings(args):
            from ..exporting.evaluation import compare

            settings |= {"batch_size": args.batch_size, "variant": args.variant}
            say(json.dumps(compare(args.export, args.checkpoint, dtype, **settings)))
    if failures := [failure for report in reports.values() for failure in report.failures]:
        sys.exit("\n".join(failures))


def evaluate_arguments(parser: Parser) -> None:
    model_help = (
        "checkpoint directory or Hub id (run by torch), or export directory (run by onnxruntime)"
    )
    parser.add_argument("model", type=source, metavar="MODEL", help=model_help)
    parser.add_argument(
        "--dtype", help="which of an export's, if it has several; the first if not given"
    )
    add_variant(parser)
    add_workers(parser)
    add_language_arguments(parser)
    add_metric_arguments(parser)
    add_generation_options(parser, excluded=["num_return_sequences"])  # a text has one translation


@verb(
    "measure BLEU, perplexity or accuracy on text",
    evaluate_arguments,
    extras="train,cpu",
)
def evaluate(args: argparse.Namespace) -> None:
    from ..exporting.evaluation import evaluate

    options = {
        "batch_size": args.batch_size,
        "dtype": args.dtype,
        "workers": args.workers,
        **metric_settings(args),
    }
    options |= generation_options(args) | language_settings(args) | {"variant": args.variant}
    say(json.dumps(evaluate(args.model, **options)))


def add_metric_arguments(parser: Parser) -> None:
    files = parser.add_argument_group("text to measure on")
    files.add_argument(
        "--source",
        type=path,
        metavar="FILE",
        help="for BLEU: one sentence a line, plain, .gz, .bz2 or .xz",
    )
    files.add_argument(
        "--references", type=path, metavar="FILE", help="for BLEU: their translations, line by line"
    )
    tokenize_help = "of sacreBLEU: 13a (if not given), or none for text that is in tokens already"
    files.add_argument("--bleu-tokenize", metavar="NAME", help=tokenize_help)
    text_help = "for (pseudo-)perplexity: any text; for accuracy: one text a line"
    files.add_argument("--text", type=path, metavar="FILE", help=text_help)
    labels_help = "for accuracy: the name or id of each text's label, line by line"
    files.add_argument("--labels", type=path, metavar="FILE", help=labels_help)
    files.add_argument(
        "--batch-size",
        type=positive,
        default=32,
        metavar="N",
        help="sentences run together; default: %(default)s",
    )


def metric_settings(args: argparse.Namespace) -> dict:
    """The arguments of `evaluate` that `add_metric_arguments` added and that were given."""
    names = ("source", "references", "text", "labels", "bleu_tokenize")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
