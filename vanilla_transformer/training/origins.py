"""Checks of the checkpoints that a recipe starts from or learns from, and of their training
text."""

import json
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..checkpoint import config_and_class
from ..checkpoint_files import checkpoint_directory
from ..errors import UsageError
from .data import lines, split_files
from .recipe import Recipe
from .record import RECORD
from .tasks import TASKS

logger = logging.get_logger(__name__)


def naming(key: str, load: Callable[[str], Any], name: str) -> Any:
    """Return `load(name)`, where `name` is the checkpoint, or the split, of the recipe's key `key`.

    Raises:
        UsageError: that of `load`, which names a key.
        OSError, ValueError: other errors of `load`, with the key in front of the message.
    """
    try:
        return load(name)
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        # errors of other libraries may need more than a message
        kinds = (FileNotFoundError, OSError, ValueError)
        kind = next(kind for kind in kinds if isinstance(error, kind))
        raise kind(f"{key}: {error}") from None


def check_teachers(recipe: Recipe) -> None:
    """Check that the teachers fit the task, and warn of teachers without a record of their training
    text.

    Raises:
        ValueError: if a teacher is not a model of the recipe's task, or may have seen text that is
            held out.
        FileNotFoundError: if the checkpoint of a teacher is missing.
    """
    name = TASKS[recipe.task].model.__name__
    for path in recipe.training.get("teachers", ()):
        _, model_class = naming("training.teachers", config_and_class, path)
        if model_class.__name__ != name:
            raise ValueError(f"the teacher {path} is a {model_class.__name__}, expected a {name}")
        if not check_held_out("training.teachers", path, recipe.data):
            logger.warning(
                f"the teacher {path} has no {RECORD}: it may have seen the text it is compared with"
            )


def check_held_out(key: str, path: str, data: dict) -> bool:
    """Return True if the checkpoint `path` has a record of its training text, else False.

    `data` is the [data] of the recipe and `key` the recipe's key of the checkpoint. With `folds`,
    the checkpoint must not have been trained on the part that is held out.

    Raises:
        ValueError: if there are folds and it may have been.
    """
    recorded = read_recorded_data(path)
    if recorded is None:
        return False
    theirs, files = recorded
    encodings = [table.get("encoding", "UTF-8") for table in (data, theirs)]
    if "folds" in data and any(
        are_same(mine, file, *encodings) for mine in split_files(data, "train") for file in files
    ):
        mine, seen = ([table.get(name) for name in ("fold", "folds")] for table in (data, theirs))
        if mine != seen:
            held_out = f"fold {seen[0]} of {seen[1]}" if seen[1] else "no fold"
            expected = f"data.fold={mine[0]} of data.folds={mine[1]}, of the same text"
            raise ValueError(
                f"{key}: {path} was trained with {held_out} held out, expected {expected}"
            )
    return True


def read_recorded_data(path: str) -> tuple[dict, list[Path]] | None:
    """Return the [data] of the recipe of checkpoint `path`, and its training files, or None without
    a record.

    Raises ValueError for a damaged record.
    """
    file = checkpoint_directory(path) / RECORD
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_bytes())["recipe"]["data"]
        return data, split_files(
            data, "train"
        ) if "train" in data else []  # a data set has no files
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is not the record of a run: {error!r}") from None


def are_same(one: Path, other: Path, encoding: str, other_encoding: str) -> bool:
    """Return True if the text files `one` and `other` have the same lines, compressed or not.

    Each has its own encoding. If one is missing, return True if their names are equal.
    """
    if one.is_file() and other.is_file():
        return all(
            line == its
            for line, its in zip_longest(lines(one, encoding), lines(other, other_encoding))
        )
    return one.name == other.name
