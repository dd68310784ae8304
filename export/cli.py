"""The `vanilla-transformer` command. Its verbs have no logic of their own; each imports what it needs when it runs."""

import argparse
import json
import sys
from pathlib import Path


def train(args):
    from vanilla_transformer.training.translation import TranslationRun, train_translation

    run = TranslationRun(
        train=(args.source, args.target),
        validation=(args.validation_source, args.validation_target),
        output=args.output,
        preset=args.preset,
        overrides=dict(args.set),
        epochs=args.epochs,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        warmup_steps=args.warmup_steps,
        eval_epochs=args.eval_epochs,
        seed=args.seed,
    )
    print(json.dumps(train_translation(run, args.force)))


def key_value(text):
    """`name=value`, the value as JSON where it is that, else as a string."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected key=value, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def positive(text):
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {value}")
    return value


def build_parser():
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="vanilla-transformer", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    verb = verbs.add_parser("train", help="train a translation model on parallel text files", formatter_class=formatter)
    verb.set_defaults(run=train)
    verb.add_argument("--source", type=Path, required=True, help="one sentence a line, .gz or plain")
    verb.add_argument("--target", type=Path, required=True, help="its translations, line by line")
    verb.add_argument("--validation-source", type=Path, required=True, help="as --source, for BLEU while training")
    verb.add_argument("--validation-target", type=Path, required=True, help="as --target")
    verb.add_argument(
        "--output", type=Path, required=True, help="checkpoint directory to write; OUTPUT-run holds the state"
    )
    verb.add_argument("--preset", default="tiny", help="base, big or tiny")
    verb.add_argument("--set", type=key_value, action="append", default=[], metavar="KEY=VALUE", help="a config field")
    verb.add_argument("--epochs", type=positive, default=20, help="passes over the training text")
    verb.add_argument("--batch-size", type=positive, default=64, help="sentence pairs per update")
    verb.add_argument("--learning-rate", type=float, default=1e-3, help="at the end of warm-up; falls linearly to 0")
    verb.add_argument("--warmup-steps", type=int, default=1000, help="updates")
    verb.add_argument("--eval-epochs", type=positive, default=2, help="epochs between two evaluations")
    verb.add_argument("--seed", type=int, default=0, help="of initialisation, order and dropout")
    verb.add_argument("--force", action="store_true", help="replace OUTPUT if it exists")
    return parser


def main(argv=None):
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except (OSError, ValueError) as error:
        sys.exit(f"vanilla-transformer: {error}")


if __name__ == "__main__":
    main()
