"""How far the logits of classifiers are off in int8: `python benchmarks/int8_error.py --data DATA`, where DATA/sst2 and so on
are the directories that the recipes of the cards name, relative to DATA.

The error is the largest difference from torch in float32 over the standard deviation of all of torch's logits, for the first
200 texts of validation, 25 at a time. What is calibrated is calibrated on the first 512 lines of the training text. OpenVINO
stands beside ours where it is installed, with weights of 8 bits, and with activations of 8 bits too.
"""

import argparse
import importlib.util
import os
import tempfile
from pathlib import Path

import numpy as np
from scores import recipe_of

from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.record import RECORD
from vanilla_transformer.training.tasks import TASKS

CARDS = Path(__file__).parents[1] / "model_cards"
CLASSIFIES = "sequence-classification"
TEXTS, BATCH = 200, 25
CALIBRATION = 512  # lines
OURS = {
    "ours, portable int8, one scale for a batch": {"target": "portable", "dtype": "int8"},
    "ours, cpu int8, one scale for each row": {"target": "cpu", "dtype": "int8"},
    "ours, cpu int8, calibrated": {"target": "cpu", "dtype": "int8", "calibrate": "calibration.txt"},
}


def logits_of_ours(card: Path, batches: list, folder: Path, settings: dict) -> np.ndarray:
    from vanilla_transformer_export import Runtime, export

    given = {name: str(folder / value) if name == "calibrate" else value for name, value in settings.items()}
    out = folder / "-".join(settings.values())
    export(card, out, cases=1, **given)
    runtime = Runtime(out)
    return np.concatenate([runtime.encode(*batch) for batch in batches])


def logits_of_openvino(model, batches: list, calibration: list | None) -> np.ndarray:
    """With weights of 8 bits, and with activations of 8 bits too where there is text to calibrate on."""
    import nncf
    import openvino
    import torch

    names = ("input_ids", "attention_mask")
    example = {name: torch.ones(2, 7, dtype=torch.int64) for name in names}
    with torch.no_grad():
        graph = openvino.convert_model(model, example_input=example)
    graph.reshape({name: [-1, -1] for name in names})
    if calibration is None:
        graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT8_SYM)
    else:
        rows = [dict(zip(names, batch)) for batch in calibration]
        graph = nncf.quantize(graph, nncf.Dataset(rows), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(rows))
    compiled = openvino.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return np.concatenate([compiled(dict(zip(names, batch)))["logits"] for batch in batches])


def measure(card: Path, recipe: Recipe) -> dict[str, np.ndarray]:
    """The logits of each engine, torch first."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    training, held_out = (TASKS[recipe.task].read(recipe.data, split)["text"] for split in ("train", "validation"))
    tokenizer = AutoTokenizer.from_pretrained(card)
    model = AutoModelForSequenceClassification.from_pretrained(card).eval()

    def batched(texts: list[str], size: int) -> list:
        parts = [texts[start : start + size] for start in range(0, len(texts), size)]
        read = [tokenizer(part, padding=True, return_tensors="np") for part in parts]
        return [(each["input_ids"].astype(np.int64), each["attention_mask"].astype(np.int64)) for each in read]

    batches = batched(list(held_out)[:TEXTS], BATCH)
    with torch.no_grad():
        found = {"torch": np.concatenate([model(*map(torch.tensor, batch)).logits.numpy() for batch in batches])}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "calibration.txt").write_text("\n".join(list(training)[:CALIBRATION]))
        for name, settings in OURS.items():
            found[name] = logits_of_ours(card, batches, Path(folder), settings)
    if importlib.util.find_spec("openvino") and importlib.util.find_spec("nncf"):
        calibration = batched(list(training)[:CALIBRATION], BATCH)
        found["OpenVINO, weights of 8 bits"] = logits_of_openvino(model, batches, None)
        found["OpenVINO, calibrated"] = logits_of_openvino(model, batches, calibration)
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="where the directories of the recipes' text are")
    options = parser.parse_args(arguments)
    os.environ |= {"HF_HUB_OFFLINE": "1", "CI": "true"}  # else openvino and nncf tell their makers what they are used for
    print("| model | engine | error | same top choice |\n| --- | --- | ---: | ---: |")
    for card in sorted(path.parent for path in CARDS.rglob(RECORD)):
        recipe = recipe_of(card, options.data)
        if recipe.task != CLASSIFIES:
            continue
        found = measure(card, recipe)
        exact = found.pop("torch")
        for engine, logits in found.items():
            error = np.abs(logits - exact).max() / exact.std()
            same = (logits.argmax(axis=1) == exact.argmax(axis=1)).mean()
            print(f"| {card.name} | {engine} | {error:.4f} | {same:.3f} |", flush=True)


if __name__ == "__main__":
    main()
