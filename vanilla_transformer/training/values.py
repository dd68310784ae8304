"""What the keys of a recipe may be: their types, as the libraries state them that take the values, and their ranges."""

import codecs
import difflib
import json
import reprlib
import typing
from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import type_validator
from transformers import Seq2SeqTrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..errors import UsageError
from .tokenizer import train_tokenizer

# Keys of [training] beside the fields of `Trainer`'s.
OWN = {
    "tokens_per_update": int,
    "tokens_per_batch": int,
    "average_last": int,
    "early_stopping_patience": int,
    "r_drop": float,
    "teachers": list[str],
    "replaced": float,
    "spans": float,
}
# Fields of `Trainer`'s that a run sets itself, that have no effect on one, or that a recipe cannot hold.
NOT_TAKEN = {
    "output_dir", "predict_with_generate", "remove_unused_columns", "generation_config", "parallelism_config",
    "resume_from_checkpoint", "do_train", "do_eval", "do_predict", "local_rank", "deepspeed", "fsdp", "fsdp_config",
}  # fmt: skip
REPORT_TO = Literal["none", "all", *INTEGRATION_TO_CALLBACK]
# Than `Trainer`'s own types.
NARROWER = {
    "report_to": REPORT_TO | list[REPORT_TO] | None,
    **{
        field.name: Literal[*field.metadata["choices"], field.default]
        for field in fields(Seq2SeqTrainingArguments)
        if "choices" in field.metadata
    },
}
SPLITS = ("train", "validation", "test")
NEW_TOKENIZER = ("kind", "vocab_size", "lowercase")
DATA = {
    **dict.fromkeys(("directory", "dataset", "config", "encoding"), str),
    **dict.fromkeys(SPLITS, str | list[str]),
    **dict.fromkeys(("block_size", "max_length", "stride", "folds", "fold"), int),
    **dict.fromkeys(("streaming", "labelled", "skip_bad_rows"), bool),
    **dict.fromkeys(("columns", "label_names"), list[str]),
    "validation_fraction": float,
    "documents": Literal["file", "line"],
}
# What an export of the result applies too (see its runtime); the special tokens are those of the model.
GENERATION = {
    **dict.fromkeys(("max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_beams", "top_k"), int),
    **dict.fromkeys(("no_repeat_ngram_size", "forced_bos_token_id"), int),
    **dict.fromkeys(("length_penalty", "repetition_penalty", "temperature", "top_p", "min_p"), float),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), list[int]),
    "do_sample": bool,
    "early_stopping": bool | Literal["never"],
    "forced_eos_token_id": int | list[int],
    "bad_words_ids": list[list[int]],
}
EVALUATION = {"bleu_tokenize": str, "max_answer_length": int}

# Ranges: in words, and as a test. A number of another key is at least 0; those of [model] are checked by its config.
ANY = "", lambda value: True
NOT_NEGATIVE = " of at least 0", lambda value: value >= 0
COUNT = " of at least 1", lambda value: value >= 1
POSITIVE = " above 0", lambda value: value > 0
PROBABILITY = " from 0 to 1", lambda value: 0 <= value <= 1
BELOW_1 = " from 0 to below 1", lambda value: 0 <= value < 1
SHARE_OR_COUNT = ", whole from 1 on", lambda value: value > 0 and (value < 1 or value == int(value))
NOT_EMPTY = " that is not empty", lambda value: len(value) > 0 and all(value)
RANGES = {
    **dict.fromkeys(("tokens_per_update", "tokens_per_batch", "average_last", "early_stopping_patience"), COUNT),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), COUNT),
    "per_device_eval_batch_size": (" from 1 to 2**24", lambda value: 1 <= value <= 2**24),  # `Trainer` has a loss for each
    **dict.fromkeys(("save_total_limit", "eval_accumulation_steps", "torch_empty_cache_steps"), COUNT),
    **dict.fromkeys(("dataloader_prefetch_factor", "ddp_timeout", "ddp_bucket_cap_mb"), COUNT),
    **dict.fromkeys(("generation_num_beams", "generation_max_length"), COUNT),
    **dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), SHARE_OR_COUNT),
    **dict.fromkeys(("label_smoothing_factor", "replaced", "spans"), PROBABILITY),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), BELOW_1),
    **dict.fromkeys(("seed", "data_seed"), (" from 0 to 4294967295", lambda value: 0 <= value < 2**32)),  # numpy's
    "max_steps": (" of at least 1, or -1", lambda value: value == -1 or value >= 1),
    "num_train_epochs": POSITIVE,
    "warmup_steps": (", whole from 1 on", lambda value: 0 <= value < 1 or value == int(value) >= 1),
    "teachers": NOT_EMPTY,
    # [data]
    **dict.fromkeys((*SPLITS, "columns", "label_names", "bad_words_ids"), NOT_EMPTY),
    **dict.fromkeys(("dataset", "config", "path"), NOT_EMPTY),
    **dict.fromkeys(("block_size", "max_length"), COUNT),
    "validation_fraction": (" between 0 and 1", lambda value: 0 < value < 1),
    "folds": (" of at least 2", lambda value: value >= 2),
    # [tokenizer]
    "vocab_size": (" of at least 5", lambda value: value >= 5),  # four of which are special tokens
    "dropout": BELOW_1,
    # [generation], [evaluation]
    **dict.fromkeys(("max_new_tokens", "num_beams", "max_answer_length"), COUNT),
    **dict.fromkeys(("repetition_penalty", "temperature"), POSITIVE),
    **dict.fromkeys(("top_p", "min_p"), PROBABILITY),
    **dict.fromkeys(("length_penalty", "forced_eos_token_id"), ANY),
}
LARGEST = 2**63 - 1


def key_types(task) -> dict[str, dict[str, Any]]:
    """The keys that each table may have with `task`, and their types."""
    training, config = typing.get_type_hints(Seq2SeqTrainingArguments), task.CONFIG
    of_tokenizer = typing.get_type_hints(train_tokenizer)
    of_config = typing.get_type_hints(config, localns={"torch": torch})
    names = {field.name for field in fields(Seq2SeqTrainingArguments)} - NOT_TAKEN
    return {
        "data": {name: DATA[name] for name in task.DATA},
        "tokenizer": {name: of_tokenizer[name] for name in NEW_TOKENIZER} | {"path": str, "dropout": float},
        "model": {
            **{name: of_config.get(config.attribute_map.get(name, name), Any) for name in config.field_names()},
            **{"path": str, **({"preset": str} if hasattr(config, "preset") else {})},
        },
        "training": {name: in_table(training[name]) for name in names if not is_secret(name)} | NARROWER | OWN,
        "generation": GENERATION if task.MODEL.can_generate() else {},
        "evaluation": {name: EVALUATION[name] for name in task.EVALUATION},
    }


def in_table(hint: Any) -> Any:
    """A field that is a dictionary, or text or a file that has it, is a table in a recipe."""
    return dict if {dict, str} <= {*map(origin, alternatives(hint))} else hint


def is_secret(name: str) -> bool:
    """Whether a field of [training] is one, as transformers too tells them."""
    return name.endswith("token")


def check_table(table: str, values: Any, types: dict[str, Any]) -> None:
    """Raises UsageError for what is no table, for a key that `types` has not, with the nearest one, and for a value that is not
    of its key's type and range."""
    if not isinstance(values, dict):
        raise UsageError(f"{table} is {reprlib.repr(values)}, expected a table")
    for name, value in values.items():
        if table == "training" and is_secret(name):  # whose value is not shown
            remedy = "expected the environment variable HF_TOKEN, or a login with `hf auth login`"
            raise UsageError(f"training.{name} is a secret, which files of a run would show: {remedy}")
        check_name(f"key of [{table}]", name, types)
        check_value(f"{table}.{name}", value, types[name], ANY if table == "model" else RANGES.get(name))


def check_name(what: str, name: Any, known: Iterable[str]) -> None:
    """Raises UsageError naming the nearest known name."""
    if not isinstance(name, str) or name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        seen = f"no {what} {reprlib.repr(name)}"
        raise UsageError(f"{seen}; did you mean {close[0]!r}?" if close else f"{seen}, expected {sorted(known)}")


def check_value(key: str, value: Any, hint: Any, bounds: tuple | None) -> None:
    is_amount = {*alternatives(hint)} - {NoneType} <= {int, float}
    words, holds = bounds or (NOT_NEGATIVE if is_amount else ANY)
    if value is None and fits(None, hint):
        return
    is_right, expected = fits(value, hint), in_words(hint) + words
    if is_right and is_amount and abs(value) > LARGEST:
        is_right, expected = False, f"at most {LARGEST}"
    if not is_right or not holds(value):
        raise UsageError(f"{key} is {reprlib.repr(value)}, expected {expected}")
    check_text(key, value)
    if key == "data.encoding":
        check_encoding(key, value)


def check_text(key, value):
    """What is no text, half of a surrogate pair, would be found only when the run is written down."""
    try:
        json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{key} is {reprlib.repr(value)}, expected text that can be written as UTF-8") from None


def check_encoding(key, value):
    try:
        codecs.lookup(value)
    except LookupError:
        raise UsageError(f"{key} is {value!r}, expected the name of an encoding, like 'UTF-8' or 'latin-1'") from None


def fits(value: Any, hint: Any) -> bool:
    """Whether `value` is of the type `hint`. A whole number is a number too, but true and false are none; text is one of the
    names of an `Enum`, if the type has one."""
    names = [item.value for kind in alternatives(hint) if is_enum(kind) for item in kind]
    if names and isinstance(value, str):
        return value in names
    try:
        type_validator("", value, hint)
    except TypeError:
        return type(value) is int and fits(0.0, hint)
    return value == value  # nan is no number


def in_words(hint: Any) -> str:
    """What a value of the type `hint` is."""
    kinds = [kind for kind in alternatives(hint) if kind is not NoneType]
    if enums := [kind for kind in kinds if is_enum(kind)]:
        return f"one of {', '.join(item.value for kind in enums for item in kind)}"
    return " or ".join(map(one_in_words, kinds))


def one_in_words(kind):
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", list: "a list", dict: "a table"}
    if origin(kind) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    return words.get(origin(kind), str(kind))


def alternatives(hint):
    return typing.get_args(hint) if origin(hint) in (typing.Union, UnionType) else (hint,)


def origin(hint):
    return typing.get_origin(hint) or hint


def is_enum(kind):
    return isinstance(kind, type) and issubclass(kind, Enum)
