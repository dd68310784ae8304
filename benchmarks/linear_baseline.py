"""Linear baselines for the classifiers of model_cards/.

`python benchmarks/linear_baseline.py --data DATA`, where DATA is as in scores.py, evaluates TF-IDF
with a linear support vector machine. Features are words and pairs of words, with and without
character n-grams of two to five characters. Each baseline is trained on the training rows of its
classifier and evaluated on the held-out rows, once for each fold if the recipe has folds. C is
chosen by cross-validation over the training rows. Each fold prints a line of JSON, and each text
one for all folds, with 95% intervals (intervals.py).
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from intervals import accuracy_interval
from scores import read_recipe
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline, make_union
from sklearn.svm import LinearSVC

from vanilla_transformer.training.record import RECORD
from vanilla_transformer.training.tasks import TASKS

CARDS = Path(__file__).parents[1] / "model_cards"
TASK = "sequence-classification"
FEATURES = ("words", "words and characters")
GRID = {"linearsvc__C": [2.0**power for power in range(-3, 6)]}
PARTS = 5  # folds of the cross-validation over the training rows


def classifier(features: str, cache: str) -> GridSearchCV:
    """Return a grid search over C for a linear classifier on TF-IDF features.

    `features` is one of `FEATURES`. Punctuation marks count as words. `cache` is a directory for
    features, which do not depend on C.
    """
    parts = [TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]", sublinear_tf=True)]
    if features == "words and characters":
        parts.append(TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True))
    return GridSearchCV(
        make_pipeline(make_union(*parts), LinearSVC(random_state=0), memory=cache), GRID, cv=PARTS
    )


def baseline(data: dict, features: str) -> dict:
    """Train a classifier on the training rows of `data` and score it on the held-out rows.

    `data` is the [data] of a recipe, and `features` one of `FEATURES`. Return c, train (the number
    of rows), rows, correct, accuracy and interval.
    """
    train, held_out = (TASKS[TASK].read(data, split) for split in ("train", "validation"))
    texts, labels = train["text"][:], train["label"][:]
    with tempfile.TemporaryDirectory() as cache:
        model = classifier(features, cache).fit(texts, labels)
    correct = int((model.predict(held_out["text"]) == np.array(held_out["label"])).sum())
    return {
        "c": model.best_params_["linearsvc__C"],
        "train": len(train),
        **accuracy(correct, len(held_out)),
    }


def accuracy(correct: int, rows: int) -> dict:
    return {
        "rows": rows,
        "correct": correct,
        "accuracy": correct / rows,
        "interval": accuracy_interval(correct, rows),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with the directories of the recipes' text"
    )
    parser.add_argument(
        "cards",
        nargs="*",
        type=Path,
        help="directories of model_cards/; by default all classifiers",
    )
    options = parser.parse_args()
    for card in options.cards or sorted(path.parent for path in CARDS.rglob(RECORD)):
        recipe = read_recipe(card, options.data)
        if recipe.task != TASK:
            continue
        for features in FEATURES:
            results = []
            for fold in range(recipe.data.get("folds", 1)):
                data = recipe.data | ({"fold": fold} if "folds" in recipe.data else {})
                results.append(baseline(data, features))
                print(
                    json.dumps(
                        {"model": str(card), "features": features, "fold": fold, **results[-1]}
                    ),
                    flush=True,
                )
            total = accuracy(
                *(sum(result[name] for result in results) for name in ("correct", "rows"))
            )
            print(
                json.dumps(
                    {"model": str(card), "features": features, "folds": len(results), **total}
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
