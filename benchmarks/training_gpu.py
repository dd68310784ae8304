"""How much of a GPU training uses: `python benchmarks/training_gpu.py --data TRAIN.en TRAIN.de`.

The paper's base and big model under their recipes, in bfloat16, eager and compiled, with the paper's vocabulary of 37,000
entries, of which the tokenizer uses as many as it can learn from the text. Utilisation is that of a run's own log (`mfu`):
three times the matrix products of the forward pass for tokens that are not padding, attention's own left out, over what the
GPU can do.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from engines import one_line
from gpu import device_facts
from measure import command_line, hardware, spread, versions
from transformers import set_seed

from vanilla_transformer.training.dry_run import quiet_trainer
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import read_recipe
from vanilla_transformer.training.tasks import translation

RECIPES = ("wmt14-en-de-base", "wmt14-en-de-big")
VARIANTS = {"eager": {}, "compiled": {"training.torch_compile": True}}
PACKAGES = ("vanilla-transformer", "torch", "transformers", "accelerate", "datasets")
VOCABULARY = 37000
PIECES = 8000  # of the tokenizer: Multi30k has as many
LOGGED, WARM_UP, UPDATES = 10, 30, 120  # updates in one record of the log, not counted, and in all
FIGURES = ("tokens_per_second", "mfu")


def measured(name: str, changes: dict, data: list[Path], folder: Path) -> dict:
    """Of the recipe `name` with `changes`: `FIGURES`, each a median and its range over records of the log."""
    source, target = map(str, data)
    text = {"data": {"train": [source, target]}, "training.eval_strategy": "no"}
    recipe = read_recipe(name, {**text, "tokenizer.vocab_size": PIECES, **changes})
    set_seed(0)
    tokenizer, _, rows = prepare(recipe)
    settings = {"vocab_size": VOCABULARY, **recipe.model}
    model = translation.MODEL(translation.CONFIG.preset(settings.pop("preset"), **settings))
    settings = {"logging_steps": LOGGED, "max_steps": UPDATES, "disable_tqdm": True}
    trainer = quiet_trainer(recipe, folder, tokenizer, model, rows, **settings)
    trainer.train()
    records = [record for record in trainer.state.log_history if "tokens_per_second" in record and record["step"] > WARM_UP]
    figures = {figure: spread([record[figure] for record in records]) for figure in FIGURES if figure in records[0]}
    per_sentence = statistics.mean(map(len, rows["train"]["input_ids"]))
    return {"parameters": model.num_parameters(), "tokens_per_sentence": round(per_sentence, 1), **figures}


def run(data: list[Path]) -> dict:
    """Every row is there; one that was not measured says why."""
    found = {}
    for name in RECIPES:
        for variant, changes in VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    if not torch.cuda.is_available():
                        raise RuntimeError("no GPU")
                    found[f"{name}, {variant}"] = measured(name, changes, data, Path(folder))
                except Exception as error:
                    found[f"{name}, {variant}"] = {"missing": one_line(error)}
    return {
        "command": command_line("training_gpu.py"),
        "hardware": hardware() | (device_facts() or {"gpu": None}),
        "versions": versions(PACKAGES),
        "updates": {"in all": UPDATES, "not counted": WARM_UP, "in a record": LOGGED},
        "rows": found,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs=2, required=True, metavar=("SOURCE", "TARGET"), help="parallel text")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/training_gpu.json")
    options = parser.parse_args()
    result = run(options.data)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["rows"], indent=1))


if __name__ == "__main__":
    main()
