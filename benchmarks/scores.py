"""Scores of the models in model_cards/, computed again from their weights: `python
benchmarks/scores.py --data DATA`, where DATA/multi30k and so on are the directories that their
recipes name, relative to DATA.

Prints a line of JSON for each score with its 95% interval (intervals.py), and fails if a score is
not what `training.json` beside the weights says.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from intervals import accuracy_interval, corpus_interval, nll_interval
from sacrebleu.metrics import CHRF

from vanilla_transformer.training.metrics import bleu_metric
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import TEXT_AUGMENTATION, Recipe
from vanilla_transformer.training.record import RECORD
from vanilla_transformer.training.tasks.translation import texts_of_ids
from vanilla_transformer.training.trainer import build_metrics, make_trainer, training_arguments
from vanilla_transformer.training.values import SPLITS

CARDS = Path(__file__).parents[1] / "model_cards"
TOLERANCE = 1e-3  # for scores: another machine's sums may break a tie in a beam


def scores(card: Path, data: Path) -> dict[str, tuple[float, tuple[float, float]]]:
    """Return {name: (score, interval)} of the weights and tokenizer in `card`.

    They are computed as in the training run of the card, with the text in `data`.
    """
    recipe = read_recipe(card, data)
    with tempfile.TemporaryDirectory() as state:
        tokenizer, _, rows = prepared = prepare(recipe)
        trainer = make_trainer(recipe, training_arguments(recipe, Path(state)), prepared)
        results = {}
        for split in (split for split in SPLITS[1:] if split in rows):
            trainer.compute_metrics = build_metrics(recipe, prepared, split)
            outputs = trainer.predict(rows[split], metric_key_prefix=split, **recipe.generation)
            for name, interval in intervals(
                recipe, tokenizer, outputs.predictions, outputs.label_ids
            ).items():
                results[f"{split}_{name}"] = outputs.metrics[f"{split}_{name}"], interval
        return results


def read_recipe(card: Path, data: Path) -> Recipe:
    """Return the recipe of `card` for the text in `data`, starting from the card's weights."""
    recipe = Recipe(**json.loads((card / RECORD).read_text())["recipe"])
    recipe.data["directory"] = str(data / recipe.data["directory"])
    recipe.tokenizer, recipe.model = {}, {"path": str(card)}  # the card has the tokenizer too
    # teachers are not in model_cards/ and do not affect scores
    for name in ("teachers", *TEXT_AUGMENTATION):
        recipe.training.pop(name, None)
    recipe.data.pop("source_noise", None)
    return recipe


def intervals(recipe, tokenizer, predictions, labels) -> dict[str, tuple[float, float]]:
    """Return {name: (low, high)} of each score of the recipe's task.

    `predictions` and `labels` are those that `Trainer.predict` returned.
    """
    if recipe.task == "translation":
        outputs, references = (texts_of_ids(ids, tokenizer) for ids in (predictions, labels))
        metrics = {
            "bleu": bleu_metric(recipe.evaluation.get("bleu_tokenize", "13a")),
            "chrf": CHRF(),
        }
        return {
            name: corpus_interval(metric, outputs, references) for name, metric in metrics.items()
        }
    if recipe.task == "causal-lm":
        interval = nll_interval(predictions, labels)
        return {"nll": interval, "perplexity": tuple(map(float, np.exp(interval)))}
    return {"accuracy": accuracy_interval((predictions == labels).sum(), len(labels))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with the directories of the recipes' text"
    )
    parser.add_argument(
        "cards", nargs="*", type=Path, help="directories of model_cards/; by default all"
    )
    options = parser.parse_args()
    wrong = 0
    for card in options.cards or sorted(path.parent for path in CARDS.rglob(RECORD)):
        recorded = json.loads((card / RECORD).read_text())["metrics"]
        for name, (value, interval) in scores(card, options.data).items():
            is_same = abs(value - recorded[name]) <= TOLERANCE * abs(recorded[name])
            wrong += not is_same
            line = {
                "model": str(card),
                "score": name,
                "now": value,
                "interval": interval,
                "said": recorded[name],
                "same": is_same,
            }
            print(json.dumps(line), flush=True)
    sys.exit(f"{wrong} scores differ from those of the cards" if wrong else None)


if __name__ == "__main__":
    main()
