"""Commands that train models."""

import argparse
import json

from ..arguments import Parser, add_set, path, source
from ..terminal import say
from .verbs import add_variant, verb


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
