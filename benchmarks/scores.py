"""Scores of the models in model_cards/, computed again from their weights: `python benchmarks/scores.py --data DATA`, where
DATA/multi30k/tok and so on are the directories that their recipes name, relative to DATA.

Prints a line of JSON for each score, and fails if one is not what `training.json` beside the weights says.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import AUGMENTATION, Recipe
from vanilla_transformer.training.run import REPORT, evaluate
from vanilla_transformer.training.trainer import make_trainer, training_arguments

CARDS = Path(__file__).parents[1] / "model_cards"
SAID = ("bleu", "chrf", "nll", "perplexity", "accuracy")
TOLERANCE = 1e-3  # of a score: another machine's sums may break a tie in a beam


def scores(card: Path, data: Path) -> dict[str, float]:
    """As its own run computed them, from the weights and the tokenizer in `card`."""
    recipe = Recipe(**json.loads((card / REPORT).read_text())["recipe"])
    recipe.data["directory"] = str(data / recipe.data["directory"])
    recipe.tokenizer, recipe.model = {}, {"path": str(card)}  # its tokenizer too
    for name in ("teachers", *AUGMENTATION):  # they are not in model_cards/, and have no part in a score
        recipe.training.pop(name, None)
    with tempfile.TemporaryDirectory() as state:
        tokenizer, model, rows = prepare(recipe)
        trainer = make_trainer(recipe, training_arguments(recipe, Path(state)), tokenizer, model, rows)
        return evaluate(recipe, trainer, tokenizer, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="where the directories of the recipes' text are")
    parser.add_argument("cards", nargs="*", type=Path, help="directories of model_cards/; all if not given")
    options = parser.parse_args()
    wrong = 0
    for card in options.cards or sorted(path.parent for path in CARDS.rglob(REPORT)):
        said = json.loads((card / REPORT).read_text())["metrics"]
        for name, value in scores(card, options.data).items():
            if name.partition("_")[2] in SAID:
                is_same = abs(value - said[name]) <= TOLERANCE * abs(said[name])
                wrong += not is_same
                print(json.dumps({"model": str(card), "score": name, "now": value, "said": said[name], "same": is_same}))
    sys.exit(f"{wrong} scores are not what was said" if wrong else None)


if __name__ == "__main__":
    main()
