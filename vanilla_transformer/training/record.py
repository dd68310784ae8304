"""training.json, the record of a finished run beside its weights: recipe, metrics and history."""

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from transformers import Seq2SeqTrainer, TrainingArguments

from .recipe import Recipe

RECORD = "training.json"
PACKAGES = ("vanilla-transformer", "torch", "transformers", "accelerate", "datasets", "tokenizers")


def run_record(recipe: Recipe, trainer: Seq2SeqTrainer, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a finished run.

    It has the keys recipe, metrics, parameters, seconds, hardware, versions and history. `metrics`
    are the final ones.
    """
    history = trainer.state.log_history  # the history of all calls that continued this run
    return {
        "recipe": asdict(recipe),
        "metrics": metrics,
        "parameters": trainer.model.num_parameters(),
        "seconds": sum(
            entry["tokens"] / entry["tokens_per_second"] for entry in history if "tokens" in entry
        ),
        "hardware": hardware(trainer.args),
        "versions": {name: version(name) for name in PACKAGES},
        "history": history,
    }


def hardware(arguments: TrainingArguments) -> str:
    """Return a description of the processes and devices of a run."""
    processes = f"{arguments.world_size} processes" if arguments.world_size > 1 else "1 process"
    if torch.cuda.is_available():
        return f"{processes}, each on {torch.cuda.get_device_name()}"
    return f"{processes}, each on the CPU with {torch.get_num_threads()} threads"
