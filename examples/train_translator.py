"""Training of a small translator on parallel text, one sentence a line.

    python examples/train_translator.py train.en train.de --output my-model

The recipe is `translation`. The script also translates the first sentences with the new model. A
run that was stopped resumes when the same command is called again.
"""

import argparse
from pathlib import Path

from transformers import pipeline

import vanilla_transformer  # noqa: F401  registers the models, and the translation pipeline
from vanilla_transformer.training.recipe import read_recipe
from vanilla_transformer.training.run import train


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="text file, .gz or plain")
    parser.add_argument("target", type=Path, help="its translations, line by line")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="checkpoint to write; OUTPUT-run holds the state of the run",
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--vocab-size", type=int, default=8000, help="subwords of the new tokenizer"
    )
    parser.add_argument(
        "--hidden-size", type=int, default=128, help="width of the model, a multiple of 4"
    )
    args = parser.parse_args(argv)

    changes = {
        "data.train": [str(args.source), str(args.target)],
        "tokenizer.vocab_size": args.vocab_size,
        "model.hidden_size": args.hidden_size,
        "training.num_train_epochs": args.epochs,
        # "epoch" with "data.validation": [source, target] measures BLEU while it trains
        "training.eval_strategy": "no",
    }
    train(read_recipe("translation", changes), args.output)

    translate = pipeline("translation", model=str(args.output))
    with open(args.source, encoding="utf-8") as lines:
        for line, _ in zip(lines, range(3), strict=False):
            print(line.strip(), "->", translate(line.strip())[0]["translation_text"])


if __name__ == "__main__":
    main()
