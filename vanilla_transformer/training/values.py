"""Types and ranges of the values in a recipe; the types come from the libraries that take the
values."""

import json
import reprlib
import typing
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple

import torch
from huggingface_hub.dataclasses import type_validator
from transformers import Seq2SeqTrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..errors import UsageError
from ..generation_options import KINDS, SPECIAL_TOKENS
from ..options import Kind
from .data import is_encoding
from .names import check_name
from .tokenizer import train_tokenizer


class Range(NamedTuple):
    """A condition on a value besides its type.

    Attributes:
        words: the condition in words, to follow those of the type.
        holds: a function that returns True if a value fulfils the condition.
    """

    words: str
    holds: Callable[[Any], bool]


ANY = Range("", lambda value: True)
NOT_NEGATIVE = Range(" of at least 0", lambda value: value >= 0)
COUNT = Range(" of at least 1", lambda value: value >= 1)
POSITIVE = Range(" above 0", lambda value: value > 0)
PROBABILITY = Range(" from 0 to 1", lambda value: 0 <= value <= 1)
BELOW_1 = Range(" from 0 to below 1", lambda value: 0 <= value < 1)
SHARE = Range(" between 0 and 1", lambda value: 0 < value < 1)
SHARE_OR_COUNT = Range(
    ", whole from 1 on", lambda value: value > 0 and (value < 1 or value == int(value))
)
WARMUP = Range(", whole from 1 on", lambda value: 0 <= value < 1 or value == int(value) >= 1)
MAX_STEPS = Range(" of at least 1, or -1", lambda value: value == -1 or value >= 1)
ENCODING = Range(" that names an encoding, like 'UTF-8' or 'latin-1'", is_encoding)
NOT_EMPTY = Range(" that is not empty", lambda value: len(value) > 0 and all(value))


def at_least(smallest: int) -> Range:
    return Range(f" of at least {smallest}", lambda value: value >= smallest)


class KeyType(NamedTuple):
    """The type and range of a key's value.

    Attributes:
        type: its type, as an annotation.
        range: its range; by default a number is at least 0.
    """

    type: Any
    range: Range | None = None


SPLITS = ("train", "validation", "test")
TEXT = KeyType(str, NOT_EMPTY)
COUNTED = KeyType(int, COUNT)
# keys of [training] besides the fields of `Trainer`'s arguments
TRAINING = {
    "tokens_per_update": COUNTED,
    "tokens_per_batch": COUNTED,
    "average_last": COUNTED,
    "early_stopping_patience": COUNTED,
    "r_drop": KeyType(float),
    "teachers": KeyType(list[str], NOT_EMPTY),
    "word_replacement": KeyType(float, PROBABILITY),
    "span_crop": KeyType(float, PROBABILITY),
}
# Keys of [data] that several tasks have; one that a single task has is in its module.
DATA = {
    "directory": KeyType(str),
    "dataset": TEXT,
    "config": TEXT,
    "columns": KeyType(list[str], NOT_EMPTY),
    **dict.fromkeys(SPLITS, KeyType(str | list[str], NOT_EMPTY)),
    "encoding": KeyType(str, ENCODING),
    "streaming": KeyType(bool),
    "skip_bad_rows": KeyType(bool),
    "block_size": COUNTED,
    "max_length": COUNTED,
}
# at least 5: four are special tokens
NEW_TOKENIZER = {"kind": None, "vocab_size": at_least(5), "lowercase": None}
# What an export of the result applies too. Special tokens are those of the model, and an evaluation
# reads one sequence.
GENERATION = {
    name: kind
    for name, kind in KINDS.items()
    if name not in (*SPECIAL_TOKENS, "seed", "num_return_sequences")
}
# Fields of `Trainer`'s that a run sets itself, that have no effect on one, or that a recipe cannot
# hold.
UNSUPPORTED = {
    "output_dir", "predict_with_generate", "remove_unused_columns", "generation_config",
    "parallelism_config", "resume_from_checkpoint", "do_train", "do_eval", "do_predict",
    "local_rank", "deepspeed", "fsdp", "fsdp_config",
}  # fmt: skip
REPORT_TO = Literal["none", "all", *INTEGRATION_TO_CALLBACK]
# types of `Trainer`'s fields that are narrower than its own
TRAINER_TYPES = {
    "report_to": REPORT_TO | list[REPORT_TO] | None,
    **{
        field.name: Literal[*field.metadata["choices"], field.default]
        for field in fields(Seq2SeqTrainingArguments)
        if "choices" in field.metadata
    },
}
# ranges of `Trainer`'s fields
TRAINER_RANGES = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), COUNT),
    # `Trainer` has a loss for each of them
    "per_device_eval_batch_size": Range(" from 1 to 2**24", lambda value: 1 <= value <= 2**24),
    **dict.fromkeys(
        ("save_total_limit", "eval_accumulation_steps", "torch_empty_cache_steps"), COUNT
    ),
    **dict.fromkeys(("dataloader_prefetch_factor", "ddp_timeout", "ddp_bucket_cap_mb"), COUNT),
    **dict.fromkeys(("generation_num_beams", "generation_max_length"), COUNT),
    **dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), SHARE_OR_COUNT),
    "label_smoothing_factor": PROBABILITY,
    **dict.fromkeys(("adam_beta1", "adam_beta2"), BELOW_1),
    # numpy's
    **dict.fromkeys(
        ("seed", "data_seed"), Range(" from 0 to 4294967295", lambda value: 0 <= value < 2**32)
    ),
    "max_steps": MAX_STEPS,
    "num_train_epochs": POSITIVE,
    "warmup_steps": WARMUP,
}
LARGEST = 2**63 - 1


def data_keys(*shared: str, **task_keys: KeyType) -> dict[str, KeyType]:
    """Return {key: type} of a task's [data]: the names `shared`, keys of `DATA`, and `task_keys`
    that only this task has."""
    return {name: DATA[name] for name in shared} | task_keys


def tokenizer_keys() -> dict[str, KeyType]:
    """Return {key: type and range} of the recipe's [tokenizer]."""
    types = typing.get_type_hints(train_tokenizer)
    new = {name: KeyType(types[name], range) for name, range in NEW_TOKENIZER.items()}
    return new | {"path": TEXT, "bpe_dropout": KeyType(float, BELOW_1)}


def model_keys(config: type) -> dict[str, KeyType]:
    """Return {key: type} of the recipe's [model]: the fields of `config`, `path`, and `preset` if
    the config has presets.

    The config checks the ranges of its fields itself.
    """
    types = typing.get_type_hints(config, localns={"torch": torch})
    names = {name: config.attribute_map.get(name, name) for name in config.field_names()}
    others = {
        "path": KeyType(str, ANY),
        **({"preset": KeyType(str, ANY)} if hasattr(config, "preset") else {}),
    }
    return {name: KeyType(types.get(field, Any), ANY) for name, field in names.items()} | others


def trainer_keys() -> dict[str, KeyType]:
    """Return {key: type and range} of the fields of `Trainer`'s arguments that a recipe may set."""
    types = typing.get_type_hints(Seq2SeqTrainingArguments) | TRAINER_TYPES
    names = {field.name for field in fields(Seq2SeqTrainingArguments)} - UNSUPPORTED
    return {
        name: KeyType(table_type(types[name]), TRAINER_RANGES.get(name))
        for name in names
        if not is_secret(name)
    }


def table_type(hint: Any) -> Any:
    """Return `dict` if the type `hint` accepts a dict or its text; return other types unchanged.

    In a recipe such a field is a table.
    """
    return dict if {dict, str} <= {*map(origin, alternatives(hint))} else hint


def is_secret(name: str) -> bool:
    """Return True if a field of [training] is a secret: its name ends with "token", the rule of
    transformers."""
    return name.endswith("token")


def check_table(table: str, values: Any, types: dict[str, dict[str, KeyType | Kind]]) -> None:
    """Raise UsageError if `values` is no table, or has an unknown key or a wrong value.

    `types` are the `key_types` of the task. The message suggests the nearest key of `table`.
    """
    if not isinstance(values, dict):
        raise UsageError(f"{table} is {reprlib.repr(values)}, expected a table")
    for name, value in values.items():
        if table == "training" and is_secret(name):  # the value of a secret is not shown
            remedy = "expected the environment variable HF_TOKEN, or a login with `hf auth login`"
            raise UsageError(
                f"training.{name} is a secret, which files of the run would show: {remedy}"
            )
        check_name(
            f"key of [{table}]",
            name,
            types[table],
            [f"{other}.{name}" for other in types if name in types[other]],
        )
        check_value(f"{table}.{name}", value, types[table][name])


def check_value(key: str, value: Any, expected: KeyType | Kind) -> None:
    """Raise UsageError if the `value` of `key`, such as "training.seed", lacks the `expected` type
    or range."""
    if isinstance(expected, Kind):
        if not expected.holds(value):
            raise UsageError(f"{key} is {reprlib.repr(value)}, expected {expected.expected}")
        return
    is_amount = {*alternatives(expected.type)} - {NoneType} <= {int, float}
    in_range = expected.range or (NOT_NEGATIVE if is_amount else ANY)
    if value is None and fits(None, expected.type):
        return
    is_right = fits(value, expected.type)
    words = describe_type(expected.type) + in_range.words
    if is_right and is_amount and abs(value) > LARGEST:
        is_right = False
        words = f"at most {LARGEST}"
    if not is_right or not in_range.holds(value):
        raise UsageError(f"{key} is {reprlib.repr(value)}, expected {words}")
    check_text(key, value)


def check_text(key: str, value: Any) -> None:
    """Raise UsageError for text in `value` that is not valid UTF-8, such as half of a surrogate
    pair.

    Otherwise it would fail only when the run is written. `key` is the key of the recipe, for the
    message.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{key} is {reprlib.repr(value)}, expected text that can be written as UTF-8"
        ) from None


def fits(value: Any, hint: Any) -> bool:
    """Return True if `value` is of the type `hint`.

    A whole number is a number too, but true, false and NaN are not. Text must be a value of an
    `Enum`, if the type has one.
    """
    names = [item.value for kind in alternatives(hint) if is_enum(kind) for item in kind]
    if names and isinstance(value, str):
        return value in names
    try:
        type_validator("", value, hint)
    except TypeError:
        return type(value) is int and fits(0.0, hint)
    return value == value  # nan is not a number


def describe_type(hint: Any) -> str:
    """Return words for the values of the type `hint`, such as "a whole number or a string"."""
    kinds = [kind for kind in alternatives(hint) if kind is not NoneType]
    enums = [kind for kind in kinds if is_enum(kind)]
    if enums:
        return f"one of {', '.join(item.value for kind in enums for item in kind)}"
    return " or ".join(map(describe_kind, kinds))


def describe_kind(kind: Any) -> str:
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a table",
    }
    if origin(kind) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    return words.get(origin(kind), str(kind))


def alternatives(hint: Any) -> tuple:
    return typing.get_args(hint) if origin(hint) in (typing.Union, UnionType) else (hint,)


def origin(hint: Any) -> Any:
    return typing.get_origin(hint) or hint


def is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)
