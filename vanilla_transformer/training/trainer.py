"""The `Seq2SeqTrainer` of a recipe."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from transformers import PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments

from ..errors import UsageError
from .augment import Augmentation, AugmentedDataset, build_augmentation
from .batches import TokenBatches, TokenStream, collate_batches
from .callbacks import Watch, callbacks
from .checks import attempt
from .distillation import Teachers, with_text
from .loss import loss_function
from .prepare import Prepared, batch_tokens, lengths
from .recipe import Recipe
from .tasks import TASKS
from .tasks.task import Scored
from .values import TRAINING


def training_arguments(recipe: Recipe, state: Path, **changes: Any) -> Seq2SeqTrainingArguments:
    """Return the arguments of the recipe's `Trainer`, which writes checkpoints to `state`.
    `changes` override them.

    Raises:
        UsageError: for settings that the arguments, this machine, or the number of processes do not
            allow.
    """
    settings = {name: value for name, value in recipe.training.items() if name not in TRAINING}
    if total := recipe.training.get("tokens_per_update"):
        batch_tokens = recipe.training.get("tokens_per_batch", total) * int(
            os.environ.get("WORLD_SIZE", 1)
        )
        if total % batch_tokens:
            expected = f"a multiple of {batch_tokens}, the tokens of a batch on all processes"
            raise UsageError(f"training.tokens_per_update is {total}, expected {expected}")
        settings |= {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": total // batch_tokens,
        }
    defaults = {
        "save_total_limit": max(2, recipe.training.get("average_last", 1)),
        "per_device_eval_batch_size": 128,
        "optim": "adamw_torch_fused",
        "logging_steps": 100,
        "logging_nan_inf_filter": False,
        "dataloader_pin_memory": torch.cuda.is_available(),
        # otherwise several processes would not form a group
        "use_cpu": not torch.accelerator.is_available(),
        "ddp_find_unused_parameters": False,
        "data_seed": settings.get("seed", 42),
        "remove_unused_columns": False,  # losses need columns that are not arguments of the model
        "restore_callback_states_from_checkpoint": True,  # keeps the patience of early stopping
        "predict_with_generate": TASKS[recipe.task].reduce is None,
        "generation_num_beams": 1,  # for evaluations during training
        "report_to": "none",
    }
    return attempt(
        "training",
        Seq2SeqTrainingArguments,
        output_dir=str(state),
        **{**defaults, **settings, **changes},
    )


def keep_labelled(model: PreTrainedModel, args: tuple, inputs: dict) -> tuple[tuple, dict]:
    """Add the mask `logits_to_keep` of the labeled tokens to `inputs`, if the model is in training
    mode.

    The mask is False for labels of -100. Without labels nothing is added. `inputs` is changed in
    place. This is a forward pre-hook and returns the arguments and inputs of the call.
    """
    if model.training and "labels" in inputs:
        inputs["logits_to_keep"] = inputs["labels"].ne(-100)
    return args, inputs


def make_trainer(
    recipe: Recipe, arguments: Seq2SeqTrainingArguments, prepared: Prepared
) -> Seq2SeqTrainer:
    """Return the trainer of a run, whose method `train` starts it.

    `arguments` are the settings of the trainer. The `prepared` examples are "train", and
    "validation" if the run is evaluated. Forward hooks are added to the model.

    Raises:
        ValueError: for rows that do not fit the batches, teachers with other labels, and for
            processes with several GPUs each, FSDP or DeepSpeed.
    """
    task, (tokenizer, model, rows) = TASKS[recipe.task], prepared
    watch = Watch(model, tokenizer)
    r_drop = recipe.training.get("r_drop", 0)
    model.register_forward_hook(watch.forward_hook, with_kwargs=True)
    # Not on a GPU, which would wait to know how many there are, and not compiled, which wants
    # shapes beforehand.
    if task.sparse_labels and arguments.device.type == "cpu" and not arguments.torch_compile:
        model.register_forward_pre_hook(keep_labelled, with_kwargs=True)
    teachers = None
    collator = task.collator(tokenizer, model)
    if paths := recipe.training.get("teachers"):
        teachers = Teachers(paths, model, arguments.device)
        collator = with_text(collator)
        model.register_forward_pre_hook(teachers.forward_pre_hook, with_kwargs=True)
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=training_dataset(
            rows["train"], recipe, build_augmentation(recipe, tokenizer, rows["train"])
        ),
        eval_dataset=rows.get("validation"),
        data_collator=collate_batches(collator),
        processing_class=tokenizer,
        compute_loss_func=loss_function(
            watch.check, arguments.label_smoothing_factor, r_drop, teachers
        ),
        compute_metrics=build_metrics(recipe, prepared, "validation"),
        preprocess_logits_for_metrics=task.reduce,
        callbacks=[watch, *callbacks(recipe)],
    )
    check_processes(trainer)
    return trainer


def check_processes(trainer: Seq2SeqTrainer) -> None:
    """Raise ValueError if a process sees several GPUs, or for FSDP or DeepSpeed, which a run does
    not support."""
    count = trainer.args.n_gpu
    if count > 1:
        raise ValueError(
            f"one process sees {count} GPUs, expected one: start a process per GPU (torchrun) "
            "or set CUDA_VISIBLE_DEVICES"
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "each process of a run holds the whole model, expected neither FSDP nor DeepSpeed"
        )


def build_metrics(
    recipe: Recipe, prepared: Prepared, split: str
) -> Callable[[Any], dict[str, Any]] | None:
    """Return the function for `Trainer` that computes the task's metrics of the examples of
    `split`, each counted once. Return None for a split without examples.

    With several processes, `Seq2SeqTrainer` fills the last batches with rows from the beginning.
    """
    tokenizer, model, examples = prepared
    if split not in examples:
        return None
    metrics, rows = TASKS[recipe.task].metrics, examples[split]
    scored = Scored(rows, tokenizer, model.config, recipe.evaluation)
    return lambda prediction: metrics(first_items(tuple(prediction), len(rows)), scored)


def first_items(values: Any, count: int) -> Any:
    """Return the first `count` items of `values`, an array, or of each array in nested tuples."""
    return (
        tuple(first_items(value, count) for value in values)
        if isinstance(values, tuple)
        else values[:count]
    )


def training_dataset(rows: Any, recipe: Recipe, augmentation: Augmentation | None) -> Any:
    """Return the training rows for `Trainer`.

    They are augmented if there is an `augmentation`, and in batches by token count if the recipe
    sets one. A stream needs a token count, see `checks.check_batches`.
    """
    seed = recipe.training.get("seed", 42)
    limit = batch_tokens(recipe)
    if isinstance(rows, IterableDataset):
        return TokenStream(rows, limit, seed, augmentation)
    augmented = AugmentedDataset(rows, augmentation, seed) if augmentation else rows
    if limit is None:
        return augmented
    return TokenBatches(
        augmented, lengths(rows), limit, recipe.training.get("tokens_per_update", limit) // limit
    )
