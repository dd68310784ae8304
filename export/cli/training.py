"""Commands that train models."""

import argparse
import json
import sys
from pathlib import Path

from ..arguments import VARIANT_HELP, Parser, add_set, path, source
from ..terminal import say
from .verbs import add_variant, verb


def train_arguments(parser: Parser) -> None:
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="recipe name or .toml file; an unknown name lists all recipes",
    )
    parser.add_argument(
        "--data", type=path, metavar="DIR", help="directory of the recipe's text files"
    )
    parser.add_argument(
        "--output",
        type=path,
        required=True,
        help="checkpoint directory to write; OUTPUT-run holds the training state",
    )
    add_set(parser, "recipe value to override: training.learning_rate=1e-3, model.dropout=0.2 ...")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print sizes, time and memory of a few updates and write nothing",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace OUTPUT if vanilla-transformer wrote it"
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start again; an existing OUTPUT-run is moved to a free name",
    )


@verb("train a model from a recipe", train_arguments, extras="train,cpu")
def train(args: argparse.Namespace) -> None:
    if not args.restart:
        say_resumed(Path(f"{args.output}-run"))

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
        from vanilla_transformer.outputs import output_path
        from vanilla_transformer.training.run import train

        output_path(args.output, [args.recipe])
        result = json.dumps(train(recipe, args.output, args.force, args.restart))
    if PartialState().is_main_process:
        say(result)


def say_resumed(state: Path) -> None:
    """Print on standard error from where a run with checkpoints in `state` resumes.

    This is before torch is imported, which takes seconds.
    """
    updates = [int(path.name.rpartition("-")[2]) for path in state.glob("checkpoint-[0-9]*")]
    if updates:
        print(f"Resuming the run in {state}, after {max(updates):,} updates", file=sys.stderr)


def average_arguments(parser: Parser) -> None:
    parser.add_argument(
        "checkpoints", nargs="+", type=source, metavar="CHECKPOINT", help="checkpoints of one model"
    )
    add_variant(parser, f"{VARIANT_HELP}; the same for each CHECKPOINT")
    parser.add_argument("--output", type=path, required=True, help="checkpoint directory to write")
    parser.add_argument(
        "--force", action="store_true", help="replace OUTPUT if vanilla-transformer wrote it"
    )


@verb("average the weights of several checkpoints", average_arguments, extras="torch")
def average(args: argparse.Namespace) -> None:
    from vanilla_transformer.training.averaging import average

    average(args.checkpoints, args.output, args.force, args.variant)
