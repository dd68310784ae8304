"""The `vanilla-transformer` command. Each verb declares its arguments beside its function, which
has no logic of its own and imports what it needs when it runs."""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import UNINSTALLED
from ..arguments import (
    Parser,
    add_field,
    add_output,
    add_set,
    natural,
    one_of,
    one_or_more_of,
    output_of,
    path,
    positive,
    source,
    unicode,
)
from ..errors import UsageError
from ..terminal import (
    PROGRAM,
    OutputClosed,
    Terminated,
    fail,
    is_expected,
    open_standard_streams,
    say,
    terminated_as_interrupted,
    warnings_in_one_line,
)

CHECKPOINT = "checkpoint directory or Hub id"
DEVICES = ("cpu", "cuda", "tensorrt")
ATTENTION_KINDS = ("encoder", "decoder", "cross")


class Verb(NamedTuple):
    run: Callable[[argparse.Namespace], None]
    declare: Callable[[Parser], None]
    help: str
    extras: str  # of the package, which it needs


VERBS: dict[str, Verb] = {}


def verb(help: str, declare: Callable[[Parser], None], extras: str):
    """Makes a function of the parsed arguments the verb of its name, with the arguments that
    `declare` adds to a parser."""

    def register(run):
        VERBS[run.__name__.replace("_", "-")] = Verb(run, declare, help, extras)
        return run

    return register


# -------------------------------------------------------------------------------- train and average


def train_arguments(parser: Parser) -> None:
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a recipe's name (a wrong one lists them) or its .toml file",
    )
    parser.add_argument(
        "--data", type=path, metavar="DIR", help="directory of the recipe's text files"
    )
    parser.add_argument(
        "--output", type=path, required=True, help="checkpoint to write; OUTPUT-run holds the state"
    )
    add_set(parser, "change the recipe: training.learning_rate=1e-3, model.dropout=0.2 ...")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print sizes, time and memory of a few updates; write nothing",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace OUTPUT if it is a checkpoint of ours"
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="begin anew: move OUTPUT-run, if it is there, to a free name",
    )


@verb("train a model with a recipe", train_arguments, extras="train,cpu")
def train(args: argparse.Namespace) -> None:
    from accelerate import PartialState

    from vanilla_transformer.training.recipe import read_recipe

    changes = (
        dict(args.set)
        if args.data is None
        else {"data.directory": str(args.data), **dict(args.set)}
    )
    recipe = read_recipe(args.recipe, changes)
    if args.dry_run:
        from vanilla_transformer.training.dry_run import dry_run

        result = dry_run(recipe)
    else:
        from vanilla_transformer.files import output_path
        from vanilla_transformer.training.run import train

        output_path(args.output, [args.recipe])
        result = json.dumps(train(recipe, args.output, args.force, args.restart))
    if PartialState().is_main_process:
        say(result)


def average_arguments(parser: Parser) -> None:
    parser.add_argument(
        "checkpoints", nargs="+", type=source, metavar="CHECKPOINT", help="checkpoints of one model"
    )
    add_variant(parser)
    parser.add_argument("--output", type=path, required=True, help="checkpoint to write")
    parser.add_argument("--force", action="store_true", help="replace OUTPUT if it is ours")


@verb("write the mean of several checkpoints", average_arguments, extras="torch")
def average(args: argparse.Namespace) -> None:
    from vanilla_transformer.training.averaging import average

    average(args.checkpoints, args.output, args.force, args.variant)


# -------------------------------------------------------------------------------------- checkpoints


def convert_arguments(parser: Parser) -> None:
    families = converters()
    known = ", ".join(family.name for family in families)
    source_help = f"{CHECKPOINT} ({known}), or the file of a torch.nn.Transformer's state dict"
    parser.add_argument("source", type=source, metavar="SOURCE", help=source_help)
    add_output(parser, "checkpoint to write; none is needed with --dry-run")
    back = [family.model_type for family in families if family.converts_back]
    to_help = f"convert one of our checkpoints to this family: {', '.join(back)}"
    parser.add_argument("--to", type=one_of("family", back), metavar="FAMILY", help=to_help)
    parser.add_argument(
        "--dry-run", action="store_true", help="print which tensor becomes which; write nothing"
    )
    parser.add_argument(
        "--embeddings",
        type=path,
        metavar="FILE",
        help="has embed_tokens; a state dict of torch needs it",
    )
    set_help = (
        "field of SOURCE's config.json: model_type=bert, architectures=BertModel ...; of a state "
        "dict num_attention_heads"
    )
    add_set(parser, set_help)
    add_leave_out(parser)
    add_variant(parser)
    parser.add_argument("--force", action="store_true", help="replace OUTPUT if it is ours")


def add_variant(parser: Parser) -> None:
    variant_help = (
        "variant of the weights, as in from_pretrained: fp16 reads model.fp16.safetensors"
    )
    parser.add_argument("--variant", type=source, metavar="NAME", help=variant_help)


def add_leave_out(parser: Parser) -> None:
    leave_out_help = (
        "names of tensors to leave out, with * and ? as in a shell: 'cls.chain.*'; may be repeated"
    )
    parser.add_argument(
        "--leave-out",
        type=unicode,
        action="append",
        default=[],
        metavar="PATTERN",
        help=leave_out_help,
    )


def converters() -> tuple:
    """The registered families. Their file is run by its path: to import the package that it is in
    would import torch."""
    from importlib.util import find_spec
    from runpy import run_path

    package = find_spec("vanilla_transformer")
    # it is installed with this one
    assert package is not None and package.submodule_search_locations is not None
    return run_path(f"{package.submodule_search_locations[0]}/conversion/registry.py")["REGISTERED"]


@verb("convert another project's checkpoint to ours, or back", convert_arguments, extras="torch")
def convert(args: argparse.Namespace) -> None:
    from vanilla_transformer import conversion

    is_file = Path(args.source).is_file()
    if is_file:
        conversion.check_state_dict(Path(args.source))
    check_convert_flags(args, is_file)
    # one is of no use, two are wrong
    if args.dry_run and (args.positional_output is None or args.output is None):
        say(
            conversion.plan_conversion(
                args.source, args.to, dict(args.set), args.leave_out, args.variant
            )
        )
        return
    output = output_of(args)
    if is_file:
        fields = dict(args.set)
        conversion.check_fields(fields)
        facts = conversion.convert_torch(args.source, output, args.embeddings, args.force, **fields)
    else:
        facts = conversion.convert(
            args.source, output, args.to, args.force, dict(args.set), args.leave_out, args.variant
        )
    say(json.dumps(facts))


def check_convert_flags(args: argparse.Namespace, is_file: bool) -> None:
    """Raise UsageError for a flag that a checkpoint directory has no use for, or the file of a
    state dict."""
    names = ("to", "dry_run", "leave_out", "variant") if is_file else ("embeddings",)
    expected, found = ("a checkpoint directory or Hub id", "the file of a state dict")
    for name in names:
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            if is_file:
                raise UsageError(f"{flag} is for {expected}, and {args.source} is {found}")
            raise UsageError(f"{flag} is for {found}, and {args.source} is none")


def info_arguments(parser: Parser) -> None:
    parser.add_argument("checkpoint", type=source, metavar="CHECKPOINT", help=CHECKPOINT)
    add_variant(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


@verb("show shape, parameters, memory and FLOPs of a checkpoint", info_arguments, extras="torch")
def info(args: argparse.Namespace) -> None:
    from vanilla_transformer.info import info, report

    facts = info(args.checkpoint, args.variant)
    say(json.dumps(facts) if args.json else report(facts))


def attention_arguments(parser: Parser) -> None:
    parser.add_argument("checkpoint", type=source, metavar="CHECKPOINT", help=CHECKPOINT)
    parser.add_argument(
        "source", type=unicode, metavar="SOURCE", help="a text, or the file of an image"
    )
    target_help = "its translation; that of the model if not given"
    parser.add_argument("target", type=unicode, nargs="?", metavar="TARGET", help=target_help)
    kind_help = "of models that have all three: encoder, decoder or cross (if not given)"
    parser.add_argument("--kind", type=one_of("kind of attention", ATTENTION_KINDS), help=kind_help)
    parser.add_argument("--layer", type=natural, metavar="N", help="from 0 on; all if not given")
    parser.add_argument(
        "--head",
        type=natural,
        metavar="N",
        help="from 0 on; all if not given; with a layer, one map with its tokens",
    )
    add_variant(parser)
    parser.add_argument(
        "--output",
        type=path,
        required=True,
        metavar="FILE",
        help="figure to write: .png, .svg, .pdf ...",
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


@verb("draw the attention weights of each head", attention_arguments, extras="train")
def attention(args: argparse.Namespace) -> None:
    from vanilla_transformer.attention_maps import save_attention_maps

    texts = [args.source] if args.target is None else [args.source, args.target]
    selected = {"layer": args.layer, "head": args.head, "kind": args.kind}
    save_attention_maps(
        args.checkpoint, args.output, *texts, **selected, force=args.force, variant=args.variant
    )


# -------------------------------------------------------------------------------- export and verify


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
    from ..inference.export_info import read_export_info

    model = load_checkpoint(args.checkpoint, args.variant)
    dtypes = read_export_info(args.export).dtypes
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


# ---------------------------------------------------------------------------- generate and evaluate


def generate_arguments(parser: Parser) -> None:
    parser.add_argument("export", type=path, metavar="EXPORT", help="export directory")
    text_help = "texts; without any, the lines of standard input"
    parser.add_argument("text", type=unicode, nargs="*", metavar="TEXT", help=text_help)
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="processor threads; all this process may use if not given",
    )
    add_workers(parser)
    device_help = f"{', '.join(DEVICES)}; that of the target if not given"
    parser.add_argument("--device", type=one_of("device", DEVICES), help=device_help)
    parser.add_argument(
        "--dtype", help="which of the export's, if it has several; the first if not given"
    )
    cache_help = "where tensorrt keeps what it compiled; nowhere if not given"
    parser.add_argument("--engine-cache", type=path, metavar="DIR", help=cache_help)
    add_language_arguments(parser)
    stream_help = "one text after the other, each as it is generated; without beams"
    parser.add_argument("--stream", action="store_true", help=stream_help)

    files = add_lines(
        parser,
        "a file with a text a line, plain, .gz, .bz2 or .xz; a line without words gives an "
        "empty one",
    )
    prefix_help = "file: what the translation of each line begins with; for seq2seq"
    files.add_argument("--target-prefix", type=path, metavar="FILE", help=prefix_help)
    shape = files.add_mutually_exclusive_group()
    shape.add_argument(
        "--n-best",
        type=positive,
        metavar="N",
        help="so many results of each line: `line ||| text ||| score`",
    )
    shape.add_argument(
        "--scores",
        action="store_true",
        help="after each result a tab and its score, of log probabilities",
    )

    add_generation_options(parser)
    add_set(
        parser,
        "a generation option by its name, the value in JSON: top_p=0.9, eos_token_id=null ...",
    )


@verb("translate or continue text with an export", generate_arguments, extras="cpu")
def generate(args: argparse.Namespace) -> None:
    from ..inference.options import check

    check_sources(args)
    options = check(generation_options(args) | dict(args.set))

    from ..files.text_lines import Batches, generate_file, read_lines
    from ..text_runtime import TextRuntime

    opened = {name: getattr(args, name) for name in ("device", "engine_cache", "dtype", "workers")}
    runtime = TextRuntime(args.export, args.threads, **opened)
    languages = language_settings(args)
    if args.stream:
        for text in args.text or lines_of_standard_input():
            for piece in (
                runtime.stream(text, **languages, **options) if text.strip() or args.text else ()
            ):
                say(piece, end="")
            say("")
    elif args.text:
        say("\n".join(runtime.generate(args.text, **languages, **options)))
    else:
        batches = Batches(runtime, options, args.batch_size, args.n_best, args.scores, **languages)
        if args.output is not None:
            generate_file(batches, args.input, args.output, args.target_prefix, args.force)
            return
        lines = lines_of_standard_input() if args.input is None else read_lines(args.input)
        for window in batches.windows(lines):
            say("\n".join(window))


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
    """Those that were given."""
    given = {"src_lang": args.src_lang, "tgt_lang": args.tgt_lang}
    return {name: language for name, language in given.items() if language is not None}


def add_lines(parser: Parser, input_help: str) -> argparse._ArgumentGroup:
    """The flags of a verb that goes over lines."""
    files = parser.add_argument_group("lines", "Of standard input or of a file.")
    files.add_argument("--input", type=path, metavar="FILE", help=input_help)
    output_help = "file for the results, line by line; the same call resumes one that was stopped"
    files.add_argument("--output", type=path, metavar="FILE", help=output_help)
    batch_help = "lines run together, those of similar length; default: %(default)s"
    files.add_argument("--batch-size", type=positive, default=32, metavar="N", help=batch_help)
    files.add_argument("--force", action="store_true", help="replace the --output FILE")
    return files


def check_sources(args: argparse.Namespace) -> None:
    """What is read: texts, the lines of standard input, or those of a file."""
    given = {name for name, value in vars(args).items() if value}
    if args.input is not None and args.text:
        raise UsageError("--input goes without texts, expected one of them")
    if args.output is not None and (args.input is None or "stream" in given):
        raise UsageError("--output needs --input, and goes without --stream")
    for name in ("target_prefix", "force"):
        if name in given and args.output is None:
            raise UsageError(f"--{name.replace('_', '-')} needs --input and --output")
    for name in ("n_best", "scores"):
        if name in given and given & {"text", "stream"}:
            raise UsageError(
                f"--{name.replace('_', '-')} is for lines, expected no texts and no --stream"
            )


def lines_of_standard_input() -> Iterator[str]:
    from ..files.text_lines import lines_of

    if sys.stdin is None or sys.stdin.closed:
        raise ValueError(
            "standard input is closed, expected a text on each line, or texts as arguments"
        )
    return lines_of(sys.stdin.buffer, "standard input")


def predict_arguments(parser: Parser) -> None:
    parser.add_argument("export", type=path, metavar="EXPORT", help="export directory")
    text_help = (
        "texts, JSON objects of what has several parts, or paths of images; without any, the lines "
        "of standard input"
    )
    parser.add_argument("text", type=unicode, nargs="*", metavar="TEXT", help=text_help)
    parser.add_argument(
        "--task",
        metavar="NAME",
        help="what the head is for if not given; a wrong one lists those that fit",
    )
    add_set(
        parser,
        "an option of the task by its name, the value in JSON: top_k=3, "
        "aggregation_strategy=simple ...",
    )
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="processor threads; all this process may use if not given",
    )
    parser.add_argument(
        "--device",
        type=one_of("device", DEVICES),
        help=f"{', '.join(DEVICES)}; the target's if not given",
    )
    parser.add_argument(
        "--dtype", help="which of the export's, if it has several; the first if not given"
    )
    add_lines(
        parser,
        "a file with a text or JSON object a line, plain, .gz, .bz2 or .xz; a line without words "
        "gives null",
    )


@verb("do what an export's head is for, and print it as JSON", predict_arguments, extras="cpu")
def predict(args: argparse.Namespace) -> None:
    check_sources(args)

    from ..files.predictions import Predictions, open_runtime
    from ..files.text_lines import generate_file, read_lines

    runtime = open_runtime(args.export, args.threads, device=args.device, dtype=args.dtype)
    predictions = Predictions(
        runtime, args.task, dict(args.set), args.batch_size, "argument" if args.text else "line"
    )
    if args.output is not None:
        generate_file(predictions, args.input, args.output, force=args.force)
        return
    lines = (
        read_lines(args.input) if args.input is not None else args.text or lines_of_standard_input()
    )
    for window in predictions.windows(lines):
        say("\n".join(window))


# -------------------------------------------------------------------------------------- whole files


def files_arguments(parser: Parser) -> None:
    parser.add_argument("export", type=path, metavar="EXPORT", help="export directory")
    inputs_help = (
        "text with one on each line, .jsonl or .parquet; the first two also .gz, .bz2 or .xz"
    )
    parser.add_argument("inputs", nargs="+", type=path, metavar="IN", help=inputs_help)
    output_help = (
        "directory for a file of each IN with as many lines; the same call resumes one that was "
        "stopped"
    )
    parser.add_argument("--output", type=path, required=True, metavar="DIR", help=output_help)
    field_help = (
        "of .jsonl and .parquet: where the text is, also nested as doc.text; if not given text, or "
        "what else the task reads"
    )
    parser.add_argument("--field", type=unicode, metavar="NAME", help=field_help)
    output_field_help = (
        "of .jsonl and .parquet: where the results go; if not given translation, prediction or "
        "embedding"
    )
    parser.add_argument("--output-field", type=unicode, metavar="NAME", help=output_field_help)
    shard_help = (
        "lines read, run and kept together: what is lost at most when a run is stopped; default: "
        "%(default)s"
    )
    parser.add_argument("--shard-lines", type=positive, default=4096, metavar="N", help=shard_help)
    ray_help = (
        "run on the Ray cluster of this address: auto, local or HOST:PORT; in this process if not "
        "given"
    )
    parser.add_argument("--ray", type=unicode, metavar="ADDRESS", help=ray_help)
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="processor threads; all this process may use if not given",
    )
    parser.add_argument(
        "--device",
        type=one_of("device", DEVICES),
        help=f"{', '.join(DEVICES)}; the target's if not given",
    )
    parser.add_argument(
        "--dtype", help="which of the export's, if it has several; the first if not given"
    )


def translate_files_arguments(parser: Parser) -> None:
    files_arguments(parser)
    add_workers(parser)
    add_language_arguments(parser)
    split_help = "translate each line as one sentence; otherwise its sentences one by one"
    parser.add_argument("--no-split", dest="split", action="store_false", help=split_help)
    copy_help = (
        "translate sentences without a letter, such as 12:30 or ***; otherwise they are copied"
    )
    parser.add_argument(
        "--no-copy-letterless", dest="copy_letterless", action="store_false", help=copy_help
    )
    add_generation_options(parser, excluded=["num_return_sequences"])  # a line has one translation
    add_set(
        parser,
        "a generation option by its name, the value in JSON: top_p=0.9, eos_token_id=null ...",
    )


@verb(
    "translate files of any length, and go on where that stopped",
    translate_files_arguments,
    extras="cpu,files",
)
def translate_files(args: argparse.Namespace) -> None:
    from ..inference.options import check

    options = check(generation_options(args) | dict(args.set)) | language_settings(args)
    options |= {"split": args.split, "copy_letterless": args.copy_letterless}
    run_files(args, "translate", options, "translation", workers=args.workers)


def predict_files_arguments(parser: Parser) -> None:
    files_arguments(parser)
    parser.add_argument(
        "--task",
        metavar="NAME",
        help="what the head is for if not given; a wrong one lists those that fit",
    )
    add_set(
        parser,
        "an option of the task by its name, the value in JSON: top_k=3, "
        "aggregation_strategy=simple ...",
    )


@verb(
    "do what an export's head is for with files of any length",
    predict_files_arguments,
    extras="cpu,files",
)
def predict_files(args: argparse.Namespace) -> None:
    run_files(args, args.task, dict(args.set), "prediction")


def embed_files_arguments(parser: Parser) -> None:
    files_arguments(parser)
    add_set(
        parser,
        "an option of embed by its name, the value in JSON: prompt_name=query, truncate_dim=64 ...",
    )


@verb("write the vectors of files of any length", embed_files_arguments, extras="cpu,files")
def embed_files(args: argparse.Namespace) -> None:
    run_files(args, "embed", dict(args.set), "embedding")


def run_files(
    args: argparse.Namespace, task: str | None, options: dict[str, Any], result: str, **opened: Any
) -> None:
    from ..files.predictions import Predictions, open_runtime
    from ..files.run import Bulk

    runtime = open_runtime(
        args.export, args.threads, device=args.device, dtype=args.dtype, **opened
    )
    bulk = Bulk(
        Predictions(runtime, task, options), result, args.field, args.shard_lines, args.output_field
    )
    say(json.dumps(bulk.run(args.inputs, args.output, args.ray)))


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


def add_generation_options(parser: Parser, excluded: Collection[str] = ()) -> None:
    """A flag for each field of `Options`."""
    from ..inference.options import Options

    group = parser.add_argument_group(
        "generation", "generation_config.json of the checkpoint replaces these defaults."
    )
    for field in dataclasses.fields(Options):
        if field.name not in excluded:
            add_field(group, field)


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that were given."""
    from ..inference.options import Options

    given = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Options)}
    return {name: value for name, value in given.items() if value is not None}


# -------------------------------------------------------------------------------------------- serve


def serve_arguments(parser: Parser) -> None:
    from ..serving.settings import add_settings

    exports_help = (
        "export directories; NAME=PATH gives the model another name than that of its directory"
    )
    parser.add_argument("exports", nargs="+", type=source, metavar="EXPORT", help=exports_help)
    add_settings(parser)


@verb("answer HTTP requests with exports", serve_arguments, extras="serve")
def serve(args: argparse.Namespace) -> None:
    from ..scheduler.process import scheduler_process
    from ..serving.settings import settings_of, token_of
    from ..serving.sources import sources

    settings = settings_of(args, os.environ)
    token = token_of(settings, os.environ)
    found = sources(args.exports, settings.languages)

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk does not stop a server
            say(line)

    with scheduler_process(any(source.generates for source in found)) as process:
        from ..serving.server import serve  # of which the other process would have a copy

        serve(found, settings, token, tell, process)


# ------------------------------------------------------------------------------------------- doctor


def doctor_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


@verb("show what is installed here, and what will run where", doctor_arguments, extras="cpu")
def doctor(args: argparse.Namespace) -> None:
    from ..inference.devices import facts
    from .doctor import report

    found = facts()
    say(json.dumps(found) if args.json else report(found))


# -------------------------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command with `argv`, by default that of the process, and ends the process where
    something is wrong: with code 2 for wrong usage, 1 for any other error, 130 and 143 for
    interrupts, and one line on standard error. If the reader of standard output has gone, the
    process ends quietly with code 0."""
    open_standard_streams()
    try:
        with terminated_as_interrupted(), warnings_in_one_line():
            run(parse(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt as interrupt:
        fail("interrupted", 143 if isinstance(interrupt, Terminated) else 130)
    except OutputClosed:
        sys.exit(0)
    except Exception as error:
        if is_expected(error):
            fail(error, getattr(error, "exit_code", 1))
        raise


def run(args: argparse.Namespace) -> None:
    try:
        args.run(args)
    except ImportError as error:
        if error.name:  # of a module that is not there; what the library raises itself has a remedy
            raise ImportError(f"{error}: pip install '{PROGRAM}[{args.extras}]'") from error
        raise


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments that `argv` are; `run` is the function of their verb.

    Raises:
        UsageError: for what the command does not take.
    """
    if not argv or argv[0] not in VERBS:
        main_parser().parse(argv[:1])  # --help and --version exit, all else is an error
    name, *words = argv
    verb = VERBS[name]
    parser = Parser(prog=f"{PROGRAM} {name}", description=f"{verb.help[0].upper()}{verb.help[1:]}.")
    parser.set_defaults(run=verb.run, extras=verb.extras)
    verb.declare(parser)
    return parser.parse(words)


def main_parser() -> Parser:
    """What there is besides the verbs."""
    package = installed()
    lines = [f"    {name:<15} {verb.help}" for name, verb in VERBS.items()]
    parser = Parser(
        prog=PROGRAM,
        usage="%(prog)s [-h] [--version] VERB ...",
        description=package["Summary"],
        epilog="\n".join(
            ["verbs:", *lines, "", f"`{PROGRAM} VERB --help` lists the arguments of a verb."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {package['Version']}")
    parser.add_argument("verb", metavar="VERB", type=one_of("verb", VERBS), help=argparse.SUPPRESS)
    return parser


def installed() -> Mapping[str, str]:
    """Summary and version of the package; neither where it is on the path and not installed."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        found = metadata(PROGRAM)
    except PackageNotFoundError:
        return {"Summary": "", "Version": UNINSTALLED}
    return {"Summary": str(found.json.get("summary", "")), "Version": found["Version"]}


if __name__ == "__main__":
    main()
