"""One training run, from a recipe to a checkpoint, on `Seq2SeqTrainer`."""

import json
import os
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

from ..files import new_directory, refuse_existing
from .averaging import averaged
from .batches import TokenBatches, collate_batches
from .callbacks import Watch, callbacks, smoothed_loss
from .card import CARD, model_card
from .checkpoints import UNFINISHED, unfinished_checkpoint, whole_checkpoints
from .curves import CURVES, draw_curves
from .recipe import OWN, Recipe
from .tasks import TASKS
from .tokenizer import train_tokenizer

SPLITS = ("train", "validation", "test")
PACKAGES = ("vanilla-transformer", "torch", "transformers", "accelerate", "datasets", "tokenizers")
REPORT = "training.json"  # beside the weights: the recipe, what it gave, and how the run went


def train(recipe: Recipe, output: Path, force: bool = False) -> dict[str, float]:
    """Writes a checkpoint to `output` and returns its metrics on the recipe's validation and test text.

    The state of a running training is kept in `<output>-run`: the same call again goes on from its newest whole checkpoint,
    to the same weights as if it had not been stopped.

    Raises:
        FileExistsError: if `output` exists and `force` is not given.
        FloatingPointError: if the loss is not finite, naming the rows it is of; the checkpoints until then stay.
        ValueError: for text and settings that do not fit each other, and, unless `force` is given, if `<output>-run` is the
            state of a run of another recipe.
    """
    refuse_existing(output, force)
    state = output.with_name(output.name + "-run")
    arguments = training_arguments(recipe, state)
    checkpoint = unfinished_checkpoint(state, recipe, force)
    set_seed(arguments.seed)
    tokenizer, model, rows = prepare(recipe, checkpoint)
    trainer = make_trainer(recipe, arguments, tokenizer, model, rows)
    PartialState().wait_for_everyone()  # all have looked for a checkpoint
    if not checkpoint and arguments.should_save:
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir(parents=True)
        (state / UNFINISHED).write_text(json.dumps(asdict(recipe)))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if count := recipe.training.get("average_last"):
        with arguments.main_process_first(local=False):  # who has noted that the last checkpoint is whole
            model.load_state_dict(averaged(whole_checkpoints(state)[-count:]).state_dict())
    metrics = {}
    for split in SPLITS[1:]:
        if split in rows:
            set_generation(model, recipe)
            trainer.compute_metrics = metrics_of(recipe, tokenizer, model, rows[split])
            metrics |= trainer.evaluate(rows[split], metric_key_prefix=split, **recipe.generation)
    history = trainer.state.log_history  # of all calls that went on with this run
    report = {
        "recipe": asdict(recipe),
        "metrics": metrics,
        "parameters": model.num_parameters(),
        "seconds": sum(record["tokens"] / record["tokens_per_second"] for record in history if "tokens" in record),
        "hardware": hardware(arguments),
        "versions": {name: version(name) for name in PACKAGES},
        "history": history,
    }
    if arguments.should_save:
        write_result(recipe, model, tokenizer, report, output, force)
        (state / UNFINISHED).unlink()
    return metrics


def prepare(recipe: Recipe, checkpoint: Path | None = None) -> tuple:
    """The tokenizer, that of `checkpoint` if there is one, a new model, and the examples of each split."""
    task = TASKS[recipe.task]
    text = {split: found for split in SPLITS if (found := task.read(recipe.data, split)) is not None}
    if "train" not in text:
        raise ValueError(f"the recipe has no training text: its [data] is {recipe.data}, expected `train`")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint) if checkpoint else make_tokenizer(recipe, task, text["train"])
    model = make_model(recipe, task, tokenizer, text)
    rows = {split: examples(task, split, found, tokenizer, model.config, recipe) for split, found in text.items()}
    return tokenizer, model, rows


def make_trainer(recipe, arguments, tokenizer, model, rows) -> Seq2SeqTrainer:
    task, watch = TASKS[recipe.task], Watch(model, tokenizer)
    model.register_forward_hook(watch.see, with_kwargs=True)
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=batches(rows["train"], recipe),
        eval_dataset=rows.get("validation"),
        data_collator=collate_batches(task.collator(tokenizer, model)),
        processing_class=tokenizer,
        compute_loss_func=smoothed_loss(watch, arguments.label_smoothing_factor),
        compute_metrics=metrics_of(recipe, tokenizer, model, rows["validation"]) if "validation" in rows else None,
        preprocess_logits_for_metrics=task.reduce,
        callbacks=[watch, *callbacks(recipe)],
    )
    check_processes(trainer)
    return trainer


def check_processes(trainer) -> None:
    """Raises ValueError for what would train, but on other batches than the recipe says, or not end with a result."""
    if (count := trainer.args.n_gpu) > 1:
        raise ValueError(f"one process sees {count} GPUs: start one for each (torchrun), or set CUDA_VISIBLE_DEVICES to one")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError("each process of a run holds the whole model, expected neither FSDP nor DeepSpeed")


def metrics_of(recipe, tokenizer, model, rows):
    """The task's metrics of `rows`, each once: where the last batches of several processes are not full, `Seq2SeqTrainer` fills
    them with rows from the beginning."""
    metrics = TASKS[recipe.task].metrics(tokenizer, model.config, recipe.evaluation, rows)
    return lambda prediction: metrics(first_of(tuple(prediction), len(rows)))


def first_of(values, count):
    """Of arrays, or tuples of them."""
    return tuple(first_of(value, count) for value in values) if isinstance(values, tuple) else values[:count]


def set_generation(model, recipe) -> None:
    """As the result is to have it: training switches the cache off, and `generate` fills every field with a default."""
    model.config.use_cache = True
    if model.can_generate():
        model.generation_config = generation_config(recipe, model.config)


def write_result(recipe, model, tokenizer, report, output, force) -> None:
    set_generation(model, recipe)
    with new_directory(output, force) as directory:
        save_checkpoint(model, tokenizer, directory, recipe.save_dtype)
        (directory / REPORT).write_text(json.dumps(report, indent=1) + "\n")
        has_curves = draw_curves(report["history"], directory / CURVES)
        model_card(report, model, output.name, has_curves).save(directory / CARD)


def save_checkpoint(model, tokenizer, directory: Path, dtype: str) -> None:
    """With `"float16"` the tensors are stored as that and `model` becomes that; they load as float32, as its config says."""
    if dtype == "float16":
        model.half()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if dtype == "float16":
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


def make_tokenizer(recipe, task, text):
    settings = dict(recipe.tokenizer)
    path = settings.pop("path", recipe.model.get("path"))
    return (
        AutoTokenizer.from_pretrained(path)
        if path
        else train_tokenizer(task.texts(text), for_encoder=task.FOR_ENCODER, **settings)
    )


def make_model(recipe, task, tokenizer, text) -> PreTrainedModel:
    """A new model as the recipe says, or one that starts from the checkpoint `path`, with the vocabulary of `tokenizer`."""
    settings = {**task.config_fields(text), **recipe.model}
    path, preset = settings.pop("path", None), settings.pop("preset", None)
    if path:
        model = task.MODEL.from_pretrained(path, **settings)
    else:
        settings = {"vocab_size": len(tokenizer), **settings}
        model = task.MODEL(task.CONFIG.preset(preset, **settings) if preset else task.CONFIG(**settings))
    if model.config.vocab_size != len(tokenizer):
        raise ValueError(f"the tokenizer has {len(tokenizer)} entries, expected vocab_size={model.config.vocab_size}")
    set_generation(model, recipe)
    return model


def generation_config(recipe, config) -> GenerationConfig:
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    tokens = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return GenerationConfig(**tokens, **recipe.generation)


def examples(task, split, text, tokenizer, config, recipe):
    """What the model sees of one split's text, without what is longer than a table of learned positions, which is counted.

    Raises:
        ValueError: if none is left.
    """
    settings = {"tokenizer": tokenizer, "data": recipe.data}
    rows = text.map(task.encode, batched=True, remove_columns=text.column_names, fn_kwargs=settings)
    rows = task.examples(rows, recipe.data, split)
    if config.position_embedding_type != "learned" or not isinstance(rows, Dataset):
        return rows
    limit, longest = config.max_position_embeddings, [max(sides) for sides in lengths(rows)]
    kept = [index for index, length in enumerate(longest) if length <= limit]
    if len(kept) < len(rows):
        found = f"{len(rows) - len(kept)} of {len(rows)} {split} rows have more than {limit} tokens, up to {max(longest)}"
        if not kept:
            raise ValueError(f"{found}, expected at most max_position_embeddings")
        if PartialState().is_main_process:
            print(f"{found}: they are left out, as max_position_embeddings says")
    return rows.select(kept)


def lengths(rows) -> list[tuple[int, ...]]:
    """Tokens of each side of each row."""
    sides = [rows[name] for name in ("labels", "input_ids") if name in rows.column_names]
    return [tuple(map(len, row)) for row in zip(*sides, strict=True)]


def batches(rows, recipe):
    """What `Trainer` takes as its training rows: batches by token count, if the recipe has such."""
    limit = recipe.training.get("tokens_per_batch", recipe.training.get("tokens_per_update"))
    if limit is None:
        return rows
    if not isinstance(rows, Dataset):
        raise ValueError("all examples are of block_size tokens: expected per_device_train_batch_size, not tokens_per_batch")
    return TokenBatches(rows, lengths(rows), limit, recipe.training.get("tokens_per_update", limit) // limit)


def training_arguments(recipe: Recipe, state: Path) -> Seq2SeqTrainingArguments:
    settings = {name: value for name, value in recipe.training.items() if name not in OWN}
    if total := recipe.training.get("tokens_per_update"):
        each = recipe.training.get("tokens_per_batch", total) * int(os.environ.get("WORLD_SIZE", 1))
        if total % each:
            raise ValueError(
                f"tokens_per_update is {total}, expected a multiple of {each}, the tokens of a batch on all processes"
            )
        settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": total // each}
    defaults = {
        "save_total_limit": max(2, recipe.training.get("average_last", 1)),
        "per_device_eval_batch_size": 128,
        "optim": "adamw_torch_fused",
        "logging_steps": 100,
        "logging_nan_inf_filter": False,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "use_cpu": not torch.accelerator.is_available(),  # or several processes would not know of each other
        "ddp_find_unused_parameters": False,
        "data_seed": settings.get("seed", 42),
        "remove_unused_columns": False,  # what losses take is no argument of a model
        "predict_with_generate": TASKS[recipe.task].reduce is None,
        "generation_num_beams": 1,  # while training
        "report_to": "none",
    }
    return Seq2SeqTrainingArguments(output_dir=str(state), **{**defaults, **settings})


def hardware(arguments) -> str:
    processes = f"{arguments.world_size} processes" if arguments.world_size > 1 else "1 process"
    if torch.cuda.is_available():
        return f"{processes}, each on {torch.cuda.get_device_name()}"
    return f"{processes}, each on the CPU with {torch.get_num_threads()} threads"
