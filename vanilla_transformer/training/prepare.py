"""The preparation of a run: tokenizer, model and the examples of each split, from a recipe."""

from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from accelerate import PartialState
from datasets import Dataset, IterableDataset
from pyarrow.compute import list_value_length
from transformers import (
    BaseImageProcessor,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from ..checkpoint import config_and_class, limit_generation, load_image_processor, load_tokenizer
from ..checkpoint_files import checkpoint_directory
from ..errors import UsageError
from ..options import ONE_OR_MORE_TOKENS, TOKEN, TOKENS, WORDS, as_list, without_none
from .batches import SIDES
from .checks import attempt
from .data import REPORTED, BadRows, check_exist, find_line, split_key
from .metrics import bleu_metric
from .origins import check_held_out, check_teachers, naming
from .recipe import TEXT_AUGMENTATION, Recipe
from .tasks import TASKS
from .tasks.task import Rows, Task
from .tokenizer import train_tokenizer
from .values import GENERATION, SPLITS, describe_type

logger = logging.get_logger(__name__)
FEW_EXAMPLES, USEFUL_EXAMPLES = 1_000, 10_000
TOKEN_KEYS = [
    name for name, kind in GENERATION.items() if kind in (TOKEN, TOKENS, ONE_OR_MORE_TOKENS, WORDS)
]


def check_complete(recipe: Recipe) -> None:
    """Check that a recipe has all that a run needs, and its files, before any text is read.

    Raises:
        UsageError: for a missing key, or one that contradicts the checkpoints.
        FileNotFoundError, IsADirectoryError: for text files that are missing.
        FileNotFoundError, ValueError: for checkpoints that are missing, or that the recipe cannot
            start from.
    """
    data = recipe.data
    tokenizer = recipe.tokenizer
    path = recipe.model.get("path")
    task = TASKS[recipe.task]
    if not data.keys() & {"train", "dataset"}:
        raise UsageError(f"the recipe has no training text: its [data] is {data}, expected `train`")
    lacking = [name for name in task.needs if name not in data]
    if lacking:
        expected = describe_type(task.data[lacking[0]].type)
        raise UsageError(
            f"the recipe has no data.{lacking[0]}, expected {expected}: {recipe.task} needs it"
        )
    is_given = path or "path" in tokenizer or task.processor
    if not (is_given or tokenizer.get("vocab_size") or tokenizer.get("kind") == "character"):
        raise UsageError(
            "the recipe has no tokenizer.vocab_size, expected it for a new tokenizer, or "
            "tokenizer.path"
        )
    check_evaluated(recipe)
    augmentations = [name for name in TEXT_AUGMENTATION if recipe.training.get(name)]
    if augmentations and "teachers" not in recipe.training:
        seen = f"training.{augmentations[0]} is {recipe.training[augmentations[0]]}"
        raise UsageError(f"{seen}, expected training.teachers too: labels do not fit changed text")
    if path:
        check_start(recipe, path)
    check_teachers(recipe)
    for split in [name for name in SPLITS if name in data]:
        check_exist(data, split)


def check_evaluated(recipe: Recipe) -> None:
    """Raise UsageError for settings that would otherwise fail at the first evaluation."""
    strategy = recipe.training.get("eval_strategy", "no")
    if strategy != "no" and not recipe.data.keys() & {
        "validation",
        "validation_fraction",
        "folds",
        "dataset",
    }:
        raise UsageError(
            f"the recipe has no data.validation, expected it with training.eval_strategy "
            f'{strategy!r}, or "no"'
        )
    if name := recipe.evaluation.get("bleu_tokenize"):
        bleu_metric(name, "evaluation.bleu_tokenize")


def check_start(recipe: Recipe, path: str) -> None:
    """Raise ValueError or UsageError if the checkpoint `path` does not fit the recipe's task and
    [model].

    ValueError is also raised if it was trained on text that is held out now.
    """
    task = TASKS[recipe.task]
    config, _ = naming("model.path", config_and_class, path)
    if not isinstance(config, task.config):
        expected = f"one of {task.config.model_type}"
        raise ValueError(
            f"model.path is {path!r}, a checkpoint of {config.model_type}, expected {expected}"
        )
    names = {
        name: task.config.attribute_map.get(name, name)
        for name in recipe.model
        if name not in ("path", "preset")
    }
    attempt(
        "model",
        task.config.from_dict,
        config.to_dict() | {to: recipe.model[name] for name, to in names.items()},
    )
    check_held_out("model.path", path, recipe.data)


class Prepared(NamedTuple):
    """The tokenizer, the model and the examples of each split of a run.

    Tasks with images have an image processor as their tokenizer. `rows` has only splits that the
    recipe has.
    """

    tokenizer: PreTrainedTokenizerFast | BaseImageProcessor
    model: PreTrainedModel
    rows: dict[str, Any]


def prepare(recipe: Recipe, checkpoint: Path | None = None) -> Prepared:
    """Return the tokenizer, the model and the examples of a run.

    The model is new or starts from the recipe's `model.path`; it never has the weights of
    `checkpoint`. The tokenizer is that of `checkpoint`, a checkpoint of the same run, or with None
    that of the recipe or a new one.

    Raises:
        UsageError: for a missing key, or one that contradicts the checkpoints.
        FileNotFoundError: for missing checkpoints and text files.
        ValueError: for checkpoints that the recipe cannot start from, without training text, and
            for text in another form than the task expects.
    """
    check_complete(recipe)
    task = TASKS[recipe.task]
    tokenizer = load_existing_tokenizer(recipe, checkpoint)
    key = {split: split_key(recipe.data, split) for split in SPLITS}
    read = {split: naming(key[split], partial(task.read, recipe.data), split) for split in SPLITS}
    text = without_none(read)
    if "train" not in text:
        raise ValueError(
            f"the recipe has no training text: its [data] is {recipe.data}, expected `train`"
        )
    if tokenizer is None and not task.processor:
        tokenizer = new_tokenizer(recipe, task, text)
    model = make_model(recipe, task, tokenizer, text)
    if tokenizer is None:
        tokenizer = task.processor(model.config)
    make = partial(examples, recipe, text, tokenizer, model.config)
    rows = {split: naming(key[split], make, split) for split in text}
    if "path" not in recipe.model:
        note_short_text(key["train"], rows["train"])
    return Prepared(tokenizer, model, rows)


def note_short_text(key: str, examples: Any) -> None:
    """Log what to expect of a new model that learns from few `examples`, those of the recipe's key
    `key`."""
    if not isinstance(examples, IterableDataset) and len(examples) < FEW_EXAMPLES:
        logger.warning(
            f"{key} has few examples ({len(examples)}): a new model learns frequent words from "
            f"them, and sentences from about {USEFUL_EXAMPLES:,} on; model.path starts from a "
            "trained one"
        )


def new_tokenizer(recipe: Recipe, task: Task, text: dict[str, Rows]) -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on `text["train"]` with the settings of the recipe's `tokenizer`
    table.

    It fits the task's variant: encoder, decoder or seq2seq. It returns token_type_ids if the
    model's `type_vocab_size` is above 1.
    """
    settings = {name: value for name, value in recipe.tokenizer.items() if name != "bpe_dropout"}
    types = {**task.config_fields(text, recipe.data), **recipe.model}.get("type_vocab_size", 0)
    variant = task.config.model_type.removeprefix("vanilla-")
    return train_tokenizer(
        task.texts(text["train"]), variant=variant, token_types=types > 1, **settings
    )


def load_existing_tokenizer(
    recipe: Recipe, checkpoint: Path | None
) -> PreTrainedTokenizerFast | BaseImageProcessor | None:
    """Return the tokenizer or image processor of `checkpoint`, else that of the recipe's
    `tokenizer.path` or `model.path`.

    Return None if there is none of them, to make a new one.
    """
    load = load_image_processor if TASKS[recipe.task].processor else load_tokenizer
    if checkpoint:
        return load(checkpoint)
    for table in ("tokenizer", "model"):
        if path := getattr(recipe, table).get("path"):
            return naming(f"{table}.path", load, path)
    return None


def make_model(
    recipe: Recipe, task: Task, tokenizer: PreTrainedTokenizerFast, text: dict[str, Rows]
) -> PreTrainedModel:
    """Return a new model by the recipe, or one that starts from its `model.path`.

    A model of text has the vocabulary size of `tokenizer`. `text` are the rows by split, which set
    config fields such as labels. Raises ValueError if the sizes of tokenizer, checkpoint and
    [model] differ.
    """
    settings = {**task.config_fields(text, recipe.data), **recipe.model}
    path = settings.pop("path", None)
    preset = settings.pop("preset", None)
    if path:
        model = load_pretrained(task.model, path, settings)
    else:
        settings = settings if task.processor else {"vocab_size": len(tokenizer), **settings}
        model = task.model(
            task.config.preset(preset, **settings) if preset else task.config(**settings)
        )
    if not task.processor and model.config.vocab_size != len(tokenizer):
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} entries, expected "
            f"vocab_size={model.config.vocab_size}"
        )
    set_generation(model, recipe)
    return model


def load_pretrained(
    model_class: type[PreTrainedModel], path: str, settings: dict
) -> PreTrainedModel:
    try:
        model = model_class.from_pretrained(checkpoint_directory(path), **settings)
    except RuntimeError as error:  # weights of other shapes
        raise ValueError(
            f"model.path is {path!r}, expected a checkpoint of the shape in [model]: {error}"
        ) from None
    model.config.auto_map = dict(model.config.default_auto_map)  # a file may name other code
    return model


def set_generation(model: PreTrainedModel, recipe: Recipe) -> None:
    """Set the generation config of the result. `generate` fills every field with a default.

    Raises UsageError for tokens outside the vocabulary.
    """
    if not model.can_generate():
        return
    config = model.config
    for name, value in recipe.generation.items():
        words = map(as_list, as_list(value)) if name in TOKEN_KEYS else []
        unknown = [token for word in words for token in word if not 0 <= token < config.vocab_size]
        if unknown:
            raise UsageError(
                f"generation.{name} has {unknown[0]}, expected tokens from 0 to "
                f"{config.vocab_size - 1}"
            )
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    tokens = {name: getattr(config, name) for name in names if hasattr(config, name)}
    generation = GenerationConfig(**tokens, **recipe.generation)
    limit_generation(generation, config)
    model.generation_config = generation


def examples(
    recipe: Recipe,
    text: dict[str, Rows],
    tokenizer: PreTrainedTokenizerFast,
    config: PreTrainedConfig,
    split: str,
) -> Any:
    """Return the examples of one split that the model sees, from its rows in `text`.

    With learned positions, examples of more than `max_position_embeddings` tokens are left out, and
    their number is printed. With relative or computed positions all lengths are kept. Examples for
    evaluation are augmented here, once; those for training each time they are read.

    Raises:
        ValueError: if none is left, for learned positions and a stream, and for a training row with
            more tokens than a batch, unless the recipe skips bad rows.
    """
    task, of_split = TASKS[recipe.task], text[split]
    if task.processor:
        return task.examples(of_split, recipe.data, split)
    settings = {"tokenizer": tokenizer, "data": recipe.data}
    # with BPE dropout, text is encoded each time it is seen
    needs_text = split == "train" and recipe.tokenizer.get("bpe_dropout")
    unused = [] if needs_text else of_split.column_names
    rows = of_split.map(task.encode, batched=True, remove_columns=unused, fn_kwargs=settings)
    rows = task.examples(rows, recipe.data, split)
    if task.augment and split != "train":
        # evaluation text is augmented once
        rows = rows.map(
            lambda row, place: task.augment(row, Random(place), tokenizer), with_indices=True
        )
    limit = batch_tokens(recipe) if split == "train" else None
    if isinstance(rows, IterableDataset):
        if config.has_learned_positions:  # long rows of a stream cannot be counted
            raise ValueError(
                "position_embedding_type is 'learned', expected one without a maximum length for "
                "data.streaming"
            )
        return rows.map(check_length, with_indices=True, fn_kwargs={"limit": limit})
    if not isinstance(rows, Dataset) or not (limit or config.has_learned_positions):
        return rows
    counts = dict(enumerate(max(sides) for sides in lengths(rows)))
    if config.has_learned_positions:
        counts = within_positions(counts, split, config.max_position_embeddings)
    if limit and max(counts.values()) > limit:
        texts = of_split if len(of_split) == len(rows) else None
        counts = within_batch(counts, limit, recipe.data, texts)
    return rows if len(counts) == len(rows) else rows.select(counts)


def batch_tokens(recipe: Recipe) -> int | None:
    """Return the maximum number of tokens of a training batch, or None if the recipe sets none."""
    return recipe.training.get("tokens_per_batch", recipe.training.get("tokens_per_update"))


def check_length(row: dict, index: int, limit: int) -> dict:
    """Return the encoded `row` of a stream. Raise ValueError for more than `limit` tokens."""
    count = max(len(row[name]) for name in SIDES if name in row)
    if count > limit:
        raise ValueError(too_long(f"row {index}", count, limit))
    return row


def too_long(row: str, count: int, limit: int) -> str:
    return f"{row} has {count} tokens, expected at most {limit}, the tokens of a batch"


def within_positions(counts: dict[int, int], split: str, limit: int) -> dict[int, int]:
    """Return those of `counts`, the numbers of tokens of rows, that fit `limit` learned positions.

    The number of other rows is printed. Raises ValueError if no row fits.
    """
    kept = {index: count for index, count in counts.items() if count <= limit}
    if len(kept) < len(counts):
        seen = (
            f"{len(counts) - len(kept)} of {len(counts)} {split} rows have more than {limit} "
            f"tokens, up to {max(counts.values())}"
        )
        if not kept:
            raise ValueError(f"{seen}, expected at most max_position_embeddings")
        if PartialState().is_main_process:
            print(f"{seen}: they are left out, because of max_position_embeddings")
    return kept


def within_batch(
    counts: dict[int, int], limit: int, data: dict, text: Dataset | None
) -> dict[int, int]:
    """Return those of `counts`, the numbers of tokens of training rows, that are at most `limit`.

    A longer row is bad, see `BadRows`. Errors name its file and line by its text, the row of the
    same number in `text`. `data` is the [data] of the recipe.
    """
    bad = BadRows(data)
    for index in [index for index, count in counts.items() if count > limit]:
        place = None if text is None or bad.count >= REPORTED else find_line(data, text[index])
        bad.add(too_long(place or f"row {index}", counts[index], limit))
    kept = {index: count for index, count in counts.items() if count <= limit}
    bad.report(len(kept))
    return kept


def lengths(rows: Dataset) -> list[tuple[int, ...]]:
    """Return a tuple for each row with its numbers of tokens: of the labels, if any, and of the
    input."""
    names = [name for name in SIDES if name in rows.column_names]
    table = rows.select_columns(names).with_format("arrow")[:]
    return list(zip(*(list_value_length(table[name]).to_pylist() for name in names), strict=True))
