"""Accuracy, size and speed of a pretrained encoder that is fine-tuned and exported in int8.

`python benchmarks/fine_tuning.py ENCODER --data DATA --work WORK`, where DATA is as in scores.py,
trains ENCODER with the recipe `classification` on the text of the recipes `sst2` and `trec`.
ENCODER is a checkpoint of this library, such as a converted all-MiniLM-L6-v2. The recipe `trec` has
five folds, so there are five models. Checkpoints and exports stay in WORK, where a stopped call
resumes.

Prints a line of JSON for each model, and one for all folds: the accuracy of the int8 export on the
held-out rows with its 95% interval (intervals.py), milliseconds of one core for a text, and
megabytes of all files of the export.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

from intervals import accuracy_interval

from vanilla_transformer.training.recipe import read_recipe
from vanilla_transformer.training.run import train
from vanilla_transformer.training.tasks import TASKS
from vanilla_transformer_export import TextRuntime, export

TEXTS = ("sst2", "trec")


def models(texts: list[str], data: Path) -> dict[str, dict]:
    """Return the [data] of each model by its name."""
    tables = {}
    for text in texts:
        table = read_recipe(text).data | {"directory": str(data / text)}
        folds = range(table.get("folds", 0))
        tables |= {f"{text}-{fold}": table | {"fold": fold} for fold in folds} or {text: table}
    return tables


def train_and_export(encoder: str, data: dict, directory: Path) -> Path:
    """Train the encoder on `data`, export it to `directory`, and return that.

    What is there already is not made again.
    """
    checkpoint = directory.with_name(f"{directory.name}-model")
    changes = {"data": data, "model.path": encoder, "model.classifier_pooling": "mean"}
    if not checkpoint.exists():
        train(read_recipe("classification", changes), checkpoint)
    if not directory.exists():
        export(checkpoint, directory, target="cpu", dtype="int8")
    return directory


def measure(exported: Path, data: dict) -> dict:
    """Return the accuracy of an export on the held-out rows of `data`, its speed and size."""
    rows = TASKS["sequence-classification"].read(data, "validation")
    texts, labels = rows["text"][:], rows["label"][:]
    runtime = TextRuntime(exported, threads=1)
    seconds, correct = [], 0
    for text, label in zip(texts, labels, strict=True):
        start = time.process_time()
        [[best]] = runtime.classify([text])
        seconds.append(time.process_time() - start)
        correct += best["label"] == label
    size = sum(path.stat().st_size for path in exported.rglob("*") if path.is_file())
    return {
        **accuracy(correct, len(texts)),
        "milliseconds": round(1000 * median(seconds), 2),
        "megabytes": round(size / 1e6, 2),
    }


def accuracy(correct: int, rows: int) -> dict:
    interval = [round(100 * bound, 2) for bound in accuracy_interval(correct, rows)]
    return {
        "rows": rows,
        "correct": correct,
        "accuracy": round(100 * correct / rows, 2),
        "interval": interval,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("encoder", help="checkpoint of an encoder")
    parser.add_argument("--data", type=Path, required=True, help="directory with sst2/ and trec/")
    parser.add_argument("--work", type=Path, required=True, help="directory of the models")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    options = parser.parse_args()
    results = {}
    for name, data in models(options.texts, options.data).items():
        exported = train_and_export(options.encoder, data, options.work / name)
        results[name] = measure(exported, data)
        print(json.dumps({"model": name, **results[name]}), flush=True)
    folds = [result for name, result in results.items() if name.startswith("trec-")]
    if folds:
        counts = (sum(result[key] for result in folds) for key in ("correct", "rows"))
        print(json.dumps({"model": "trec, all folds", **accuracy(*counts)}))


if __name__ == "__main__":
    main()
