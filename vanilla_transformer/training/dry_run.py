"""A dry run: what a recipe would do and how long it would take, measured on its first updates."""

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import IterableDataset
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, set_seed

from ..info import shape_fields
from .prepare import Prepared, prepare
from .recipe import Recipe
from .trainer import make_trainer, training_arguments

TRIED = 3  # updates to time; the first is not counted
QUIET = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}


def dry_run(recipe: Recipe) -> str:
    """Return a report on a recipe: sizes of data, model and updates, and time and memory of the
    run.

    Time is extrapolated from the first updates, without evaluation. Memory is the peak on the GPU,
    or of the process if there is none. Nothing stays on disk.
    """
    with tempfile.TemporaryDirectory() as state:
        arguments = training_arguments(recipe, Path(state))
        set_seed(arguments.seed)
        prepared = prepare(recipe)
        trainer = quiet_trainer(recipe, Path(state), prepared, logging_steps=1, max_steps=TRIED)
        trainer.train()
    logs = [record for record in trainer.state.log_history if "tokens_per_second" in record][1:]
    tokens = sum(record["tokens"] for record in logs) / len(logs)
    seconds = sum(record["tokens"] / record["tokens_per_second"] for record in logs) / len(logs)
    accumulation_steps = arguments.gradient_accumulation_steps
    updates = arguments.max_steps
    if updates <= 0:
        updates = math.ceil(
            math.ceil(len(trainer.get_train_dataloader()) / accumulation_steps)
            * arguments.num_train_epochs
        )
    config = prepared.model.config
    shape = ", ".join(f"{name}={getattr(config, name)}" for name in shape_fields(config))
    counts = {
        name: "a stream of" if isinstance(split, IterableDataset) else f"{len(split):,}"
        for name, split in prepared.rows.items()
    }
    lines = [f"{name:<12} {count:>12} examples" for name, count in counts.items()]
    lines += [f"shape        {shape}"]
    lines += [f"parameters   {prepared.model.num_parameters():>12,}"]
    lines += [
        f"an update    {tokens:>12,.0f} tokens, source and target together, in "
        f"{accumulation_steps} batches on each process"
    ]
    lines += [f"updates      {updates:>12,}"]
    lines += [
        f"time         {seconds * updates / 3600:>12.2f} hours without evaluation, as {len(logs)} "
        "updates took"
    ]
    lines += [f"memory       {peak_memory() / 1e9:>12.2f} GB"]
    return "\n".join(lines)


def quiet_trainer(
    recipe: Recipe, state: Path, prepared: Prepared, **changes: Any
) -> Seq2SeqTrainer:
    """Return the recipe's trainer, which neither evaluates nor saves. `changes` replace its
    arguments.

    `state` is the directory for its files.
    """
    arguments = training_arguments(recipe, state, **QUIET, **changes)
    trainer = make_trainer(recipe, arguments, prepared)
    trainer.remove_callback(EarlyStoppingCallback)  # it raises without an evaluation
    return trainer


def peak_memory() -> int:
    """Return the peak memory in bytes, of the GPU if there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # on Windows
        return psutil.Process().memory_info().peak_wset
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
