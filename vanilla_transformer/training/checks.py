"""Checks of a recipe as a whole, whose values have the right types, before anything is read or
built."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, get_scheduler

from ..errors import UsageError
from .data import check_files
from .metrics import check_tokenize
from .names import check_name
from .tasks.task import Task
from .values import SPLITS

Tables = dict[str, Any]  # the fields of a `Recipe`
# an update, without tokens_per_update
BATCH_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps")


def check_together(recipe: Tables, task: Task) -> None:
    """Raise UsageError for keys of a recipe that do not fit each other.

    `recipe` are the fields of a `Recipe`, and `task` is that of the recipe. Values that a library
    takes are checked by that library, whose message is shown.
    """
    check_data(recipe["data"], task)
    if columns := task.parallel_files:
        for split in [name for name in SPLITS if name in recipe["data"]]:
            check_files(recipe["data"], split, columns)
    check_tokenizer(recipe, task)
    check_training(recipe, task)
    check_model(recipe, task)
    check_generation(recipe["generation"])
    if name := recipe["evaluation"].get("bleu_tokenize"):
        check_tokenize(name, "evaluation.bleu_tokenize")


def attempt(table: str, make: Callable, *args: Any, **settings: Any) -> Any:
    """Return `make(*args, **settings)`. Any exception becomes a one-line UsageError that begins
    with `table`."""
    try:
        return make(*args, **settings)
    except Exception as error:
        raise UsageError(f"{table}: {' '.join(str(error).split())}") from None


def check_generation(settings: dict) -> None:
    """Raise UsageError for generation settings that are wrong or would have no effect.

    transformers applies the same checks when a result is read back or saved.
    """
    attempt("generation", lambda: GenerationConfig(**settings).validate(strict=True))


def check_data(data: dict, task: Task) -> None:
    files = [name for name in SPLITS if name in data]
    unread = [name for name in ("directory", *files) if name in data]
    if "dataset" in data and unread:
        raise UsageError(
            f"data.dataset is {data['dataset']!r}, expected no data.{unread[0]} with it"
        )
    for name in ("config", "columns", "streaming"):
        if data.get(name) and "dataset" not in data:
            raise UsageError(f"data.{name} is {data[name]!r}, expected data.dataset with it")
    if data.get("streaming") and data.get("source_noise"):
        raise UsageError(
            f"data.source_noise is {data['source_noise']}, expected 0 with data.streaming"
        )
    if ("fold" in data) != ("folds" in data):
        raise UsageError(
            f"data.folds is {data.get('folds')} and data.fold {data.get('fold')}, expected both "
            "or neither"
        )
    if "folds" in data and "labelled" in task.data and not data.get("labelled"):
        raise UsageError(
            f"data.folds is {data['folds']}, expected data.labelled=true too: folds are of "
            f"labeled text"
        )
    if "folds" in data and not data["fold"] < data["folds"]:
        raise UsageError(f"data.fold is {data['fold']}, expected one of 0 to {data['folds'] - 1}")
    parts = [name for name in ("validation", "validation_fraction", "folds") if name in data]
    if len(parts) > 1:
        seen = f"data.{parts[0]} is {data[parts[0]]!r}"
        raise UsageError(f"{seen}, expected no data.{parts[1]} with it: both set what is held out")
    names = data.get("label_names", [])
    if len({*names}) < len(names):
        raise UsageError(f"data.label_names is {names!r}, expected distinct names")
    if data.get("stride", 0) >= data.get("max_length", 2**63):
        raise UsageError(
            f"data.stride is {data['stride']}, expected less than "
            f"data.max_length={data['max_length']}"
        )


def check_tokenizer(recipe: Tables, task: Task) -> None:
    tokenizer = recipe["tokenizer"]
    is_new = not (tokenizer.get("path") or recipe["model"].get("path"))
    dropout = tokenizer.get("bpe_dropout")
    if dropout and not task.bpe_dropout:
        raise UsageError(
            f"tokenizer.bpe_dropout is {dropout}, expected 0: the subwords of {recipe['task']} are "
            "always the same"
        )
    kind = tokenizer.get("kind", "bpe")
    if is_new and dropout and kind != "bpe":
        raise UsageError(
            f"tokenizer.bpe_dropout is {dropout}, expected 0 with tokenizer.kind={kind!r}: only "
            f"bpe has it"
        )
    if is_new and tokenizer.get("lowercase") and kind not in ("bpe", "word"):
        raise UsageError(
            f"tokenizer.lowercase is true, expected false with tokenizer.kind={kind!r}: only bpe "
            "and word have it"
        )
    sizes = [
        table["vocab_size"] for table in (tokenizer, recipe["model"]) if table.get("vocab_size")
    ]
    if is_new and len({*sizes}) > 1:
        raise UsageError(
            f"tokenizer.vocab_size is {sizes[0]}, expected model.vocab_size={sizes[1]}"
        )


def check_batches(recipe: Tables, task: Task) -> None:
    """Raise UsageError for a batch size that does not fit the examples of `task`."""
    training = recipe["training"]
    tokens = training.get("tokens_per_update")
    others = [name for name in BATCH_KEYS if name in training]
    if tokens and others:
        expected = "expected none: tokens_per_update is the size of an update"
        raise UsageError(f"training.{others[0]} is {training[others[0]]}, {expected}")
    # a causal language model reads blocks of one long text, unless each line is a document
    is_in_blocks = "documents" in task.data and recipe["data"].get("documents") != "line"
    if tokens and (task.processor or is_in_blocks):
        examples = "blocks of data.block_size" if is_in_blocks else "images"
        expected = f"expected per_device_train_batch_size: {examples} are of one length"
        raise UsageError(f"training.tokens_per_update is {tokens}, {expected}")
    if "tokens_per_batch" in training and not tokens:
        raise UsageError(
            f"training.tokens_per_batch is {training['tokens_per_batch']}, expected "
            f"tokens_per_update too"
        )
    if recipe["data"].get("streaming") and not tokens:
        raise UsageError(
            "data.streaming is true, expected training.tokens_per_update too: batches of a stream "
            "are by token count"
        )


def check_training(recipe: Tables, task: Task) -> None:
    check_batches(recipe, task)
    training = recipe["training"]
    smoothing = training.get("label_smoothing_factor")
    if smoothing and not task.label_smoothing:
        raise UsageError(
            f"training.label_smoothing_factor is {smoothing}, expected 0: the loss of "
            f"{recipe['task']} has no smoothing"
        )
    r_drop = training.get("r_drop")
    if r_drop and not (task.label_smoothing and "tokens_per_update" in training):
        reason = "it takes batches by tokens_per_update, and one loss of `labels`"
        raise UsageError(f"training.r_drop is {r_drop}, expected 0: {reason}")
    if "teachers" in training:
        check_taught(recipe, task)
    check_checkpoints(training)
    check_best(training, {"loss", *task.metric_names})
    if "lr_scheduler_type" in training or "lr_scheduler_kwargs" in training:
        check_schedule(
            training.get("lr_scheduler_type", "linear"), training.get("lr_scheduler_kwargs")
        )


def check_taught(recipe: Tables, task: Task) -> None:
    if not task.row_labels:
        raise UsageError(
            f"{recipe['task']} has training.teachers, expected none: they are for tasks with one "
            "label for each row"
        )
    for name in ("label_smoothing_factor", "r_drop"):
        if value := recipe["training"].get(name):
            raise UsageError(
                f"training.{name} is {value}, expected 0: it needs labels, and a run with "
                "teachers has none"
            )


def check_checkpoints(training: dict) -> None:
    if count := training.get("average_last"):
        if training.get("load_best_model_at_end"):
            raise UsageError(
                f"training.average_last={count} cannot be combined with load_best_model_at_end=true"
            )
        if training.get("save_strategy") == "no":
            conflict = 'cannot be combined with save_strategy="no", which leaves nothing to average'
            raise UsageError(f"training.average_last={count} {conflict}")
        kept = training.get("save_total_limit") or count
        if kept < count:
            raise UsageError(
                f"training.save_total_limit is {kept}, expected at least average_last={count}"
            )


def check_best(training: dict, metrics: set[str]) -> None:
    """Raise UsageError for settings of the best checkpoint that would fail only after an
    evaluation.

    `training` is the table of the recipe, `metrics` the names that may choose the best.
    """
    name = training.get("metric_for_best_model")
    patience = training.get("early_stopping_patience")
    if name is not None:
        check_name("training.metric_for_best_model", name.removeprefix("eval_"), metrics)
    if patience and training.get("eval_strategy", "no") == "no":
        raise UsageError(
            f'training.early_stopping_patience is {patience}, expected eval_strategy "steps" or '
            f'"epoch" '
            f"with it"
        )
    if patience and name is None and not training.get("load_best_model_at_end"):
        raise UsageError(
            f"training.early_stopping_patience is {patience}, expected metric_for_best_model "
            f"with it"
        )


def check_schedule(name: str, settings: dict | None) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    attempt(
        "training.lr_scheduler_kwargs",
        get_scheduler,
        name,
        optimizer,
        0,
        1,
        scheduler_specific_kwargs=settings,
    )


def check_model(recipe: Tables, task: Task) -> None:
    """Raise UsageError for a wrong key or shape in [model].

    If the shape comes from a checkpoint, `prepare.check_complete` checks it. `task` is that of the
    recipe.
    """
    settings = dict(recipe["model"])
    if settings.get("return_dict", True) is not True:
        raise UsageError(f"model.return_dict is {settings['return_dict']}, expected true")
    names = Counter(task.config.attribute_map.get(name, name) for name in settings)
    for name, count in names.items():
        if count > 1:
            raise UsageError(
                f"model.{name} is set {count} times, by names that mean the same: expected one "
                f"of them"
            )
    if settings.pop("path", None) is None:
        preset = settings.pop("preset", None)
        if size := recipe["tokenizer"].get("vocab_size"):
            settings = {"vocab_size": size, **settings}
        make = task.config if preset is None else partial(task.config.preset, preset)
        attempt("model", make, **settings)
