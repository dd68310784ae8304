"""Commands that train models."""

import argparse
import json
import sys
from pathlib import Path

from ..arguments import DIRECTORY, PATH, SOURCE, VARIANT_HELP, Parser, add_argument, add_set
from ..shared.files import CHECKPOINT_FILES, read_object
from ..shared.options import FLAG
from ..terminal import say
from .verbs import add_shared, verb


def train_arguments(parser: Parser) -> None:
    recipe_help = "recipe name or .toml file; an unknown name lists all recipes"
    parser.add_argument("recipe", metavar="RECIPE", help=recipe_help)
    add_argument(parser, "--data", DIRECTORY, "directory of the recipe's text files")
    output_help = "checkpoint directory to write; OUTPUT-run holds the training state"
    add_argument(parser, "--output", PATH, output_help, required=True, metavar="OUTPUT")
    add_set(parser, "recipe value to override: training.learning_rate=1e-3, model.dropout=0.2 ...")
    dry_help = "print sizes, time and memory of a few updates and write nothing"
    add_argument(parser, "--dry-run", FLAG, dry_help)
    add_shared(parser, "--force")
    restart_help = "start again; an existing OUTPUT-run is moved to a free name"
    add_argument(parser, "--restart", FLAG, restart_help)


@verb("train a model from a recipe", train_arguments, extras="train,cpu")
def train(args: argparse.Namespace) -> None:
    state = Path(f"{args.output}-run")
    if not args.restart and (updates := saved_updates(state)):
        # before torch is imported, which takes seconds
        print(f"Resuming the run in {state}, after {updates:,} updates", file=sys.stderr)

    from accelerate import PartialState

    from vanilla_transformer.training.recipe import read_recipe

    directory = {} if args.data is None else {"data.directory": str(args.data)}
    recipe = read_recipe(args.recipe, directory | dict(args.set))
    if args.dry_run:
        from vanilla_transformer.training.dry_run import dry_run

        result = dry_run(recipe)
    else:
        from vanilla_transformer.outputs import output_path
        from vanilla_transformer.training.run import train

        output_path(args.output, [args.recipe])
        try:
            result = json.dumps(train(recipe, args.output, args.force, args.restart))
        except KeyboardInterrupt as interrupt:
            if not (updates := saved_updates(state)):
                raise
            command = f"the same command{' without --restart' if args.restart else ''}"
            resumes = f"{command} resumes the run in {state}, after {updates:,} updates"
            raise type(interrupt)(resumes) from None
    if PartialState().is_main_process:
        say(result)


def saved_updates(state: Path) -> int:
    """Return the updates of the newest complete checkpoint of a run in `state`, 0 if there is
    none."""
    checkpoints = state.glob("checkpoint-[0-9]*")
    complete = (path.name for path in checkpoints if read_object(path / CHECKPOINT_FILES))
    return max((int(name.rpartition("-")[2]) for name in complete), default=0)


def average_arguments(parser: Parser) -> None:
    checkpoints_help = "checkpoints of one model"
    add_argument(parser, "checkpoints", SOURCE, checkpoints_help, nargs="+", metavar="CHECKPOINT")
    variant_help = f"{VARIANT_HELP}; the same for each CHECKPOINT"
    add_argument(parser, "--variant", SOURCE, variant_help)
    output_help = "checkpoint directory to write"
    add_argument(parser, "--output", PATH, output_help, required=True, metavar="OUTPUT")
    add_shared(parser, "--force")


@verb("average the weights of several checkpoints", average_arguments, extras="torch")
def average(args: argparse.Namespace) -> None:
    from vanilla_transformer.training.averaging import average

    average(args.checkpoints, args.output, args.force, args.variant)
