"""Commands that read checkpoints: their families, their sizes and their attention."""

import argparse
import json
from pathlib import Path

from ..arguments import (
    Parser,
    add_output,
    add_set,
    choice_type,
    get_output,
    natural,
    path,
    source,
    unicode,
)
from ..errors import UsageError
from ..terminal import say
from .verbs import CHECKPOINT, add_leave_out, add_variant, verb

ATTENTION_KINDS = ("encoder", "decoder", "cross")


def convert_arguments(parser: Parser) -> None:
    families = converters()
    known = ", ".join(family.name for family in families)
    source_help = f"{CHECKPOINT} ({known}), or a state dict file of torch.nn.Transformer"
    parser.add_argument("source", type=source, metavar="SOURCE", help=source_help)
    add_output(parser, "checkpoint directory to write; optional with --dry-run")
    back = [family.model_type for family in families if family.converts_back]
    to_help = f"family to convert a Vanilla Transformer checkpoint to: {', '.join(back)}"
    parser.add_argument("--to", type=choice_type("family", back), metavar="FAMILY", help=to_help)
    parser.add_argument(
        "--dry-run", action="store_true", help="print how tensors are mapped and write nothing"
    )
    parser.add_argument(
        "--embeddings",
        type=path,
        metavar="FILE",
        help=(
            "file (safetensors or torch.save) with the tensor embed_tokens; required if SOURCE is "
            "a state dict of torch.nn.Transformer"
        ),
    )
    set_help = (
        "field of SOURCE's config.json: model_type=bert, architectures=BertModel ...; for a "
        "state dict: num_attention_heads"
    )
    add_set(parser, set_help)
    add_leave_out(parser)
    add_variant(parser)
    parser.add_argument(
        "--force", action="store_true", help="replace OUTPUT if vanilla-transformer wrote it"
    )


def converters() -> tuple:
    """Return the families that `convert` knows, as `Family` tuples.

    Their file is run by its path, because importing its package would import torch.
    """
    from importlib.util import find_spec
    from runpy import run_path

    package = find_spec("vanilla_transformer")
    # it is installed with this one
    assert package is not None and package.submodule_search_locations is not None
    return run_path(f"{package.submodule_search_locations[0]}/conversion/registry.py")["REGISTERED"]


@verb(
    "convert checkpoints from and to other model families",
    convert_arguments,
    extras="torch",
)
def convert(args: argparse.Namespace) -> None:
    from vanilla_transformer import conversion

    is_file = Path(args.source).is_file()
    if is_file:
        conversion.check_state_dict(Path(args.source))
    check_convert_flags(args, is_file)
    # a dry run ignores one output; two are an error
    if args.dry_run and (args.positional_output is None or args.output is None):
        say(
            conversion.plan_conversion(
                args.source, args.to, dict(args.set), args.leave_out, args.variant
            )
        )
        return
    output = get_output(args)
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
    """Raise UsageError for a flag that the source does not support.

    `is_file` is True if the source is a state dict file, False if it is a checkpoint directory or
    Hub id.
    """
    names = ("to", "dry_run", "leave_out", "variant") if is_file else ("embeddings",)
    for name in names:
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            if is_file:
                raise UsageError(
                    f"{flag} is not supported for {args.source}, a state dict file: expected a "
                    "checkpoint directory or Hub id"
                )
            raise UsageError(
                f"{flag} is not supported for {args.source}: expected a state dict file"
            )


def info_arguments(parser: Parser) -> None:
    parser.add_argument("checkpoint", type=source, nargs="?", metavar="CHECKPOINT", help=CHECKPOINT)
    parser.add_argument("--preset", metavar="NAME", help="a model of the paper: base, big ...")
    add_variant(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


@verb("show shape, parameters, memory and FLOPs of a checkpoint", info_arguments, extras="torch")
def info(args: argparse.Namespace) -> None:
    from vanilla_transformer.info import info, preset_info, report

    if (args.checkpoint is None) == (args.preset is None):
        got = "neither" if args.preset is None else "both"
        raise UsageError(f"expected CHECKPOINT or --preset NAME, got {got}")
    facts = preset_info(args.preset) if args.preset else info(args.checkpoint, args.variant)
    say(json.dumps(facts) if args.json else report(facts))


def attention_arguments(parser: Parser) -> None:
    parser.add_argument("checkpoint", type=source, metavar="CHECKPOINT", help=CHECKPOINT)
    parser.add_argument("source", type=unicode, metavar="SOURCE", help="text, or path of an image")
    target_help = (
        "translation of SOURCE, for encoder-decoder models; default: generated by the model"
    )
    parser.add_argument("target", type=unicode, nargs="?", metavar="TARGET", help=target_help)
    kind_help = (
        "kind of attention of an encoder-decoder model: encoder, decoder or cross; default: cross"
    )
    parser.add_argument(
        "--kind", type=choice_type("kind of attention", ATTENTION_KINDS), help=kind_help
    )
    parser.add_argument(
        "--layer", type=natural, metavar="N", help="layer, counted from 0; default: all"
    )
    parser.add_argument(
        "--head",
        type=natural,
        metavar="N",
        help="head, counted from 0; default: all; with --layer, one map with token labels",
    )
    add_variant(parser)
    parser.add_argument(
        "--output",
        type=path,
        required=True,
        metavar="FILE",
        help="figure file to write: .png, .svg, .pdf ...",
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
