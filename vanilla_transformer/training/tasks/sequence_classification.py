"""Text classification: one label for each text.

A line of a file is a label without spaces, a tab or spaces, and a text.
"""

import random
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from ...checkpoint_config import MAX_LABELS
from ...modeling_vanilla_transformer import VanillaEncoderForSequenceClassification
from ..data import BadRows, read_all_lines, shorten, split_files, split_key
from ..values import NOT_EMPTY, SPLITS, KeyType, at_least, data_keys
from .task import Collator, Columns, Rows, Task, accuracy, pad_changed, top_label

# With `folds`, the training lines without their duplicates are split into that many parts, at
# random but always the same, and part `fold` (counted from 0) is the validation split. With
# `label_names` the labels in files are indices into these names.
DATA = data_keys(
    *("directory", *SPLITS, "encoding", "skip_bad_rows"),
    folds=KeyType(int, at_least(2)),
    fold=KeyType(int),
    label_names=KeyType(list[str], NOT_EMPTY),
)
logger = logging.get_logger(__name__)


def read(data: dict, split: str) -> Rows | None:
    if "folds" in data and split != "test":
        lines = list(dict.fromkeys(labelled(data, "train", reports=split == "train")))
        random.Random(0).shuffle(lines)
        count, fold = data["folds"], data["fold"]
        lines = [
            line
            for number, line in enumerate(lines)
            if (number % count == fold) == (split == "validation")
        ]
        if not lines:
            raise ValueError(
                f"the {split} text of fold {fold} has no lines, expected at least folds={count} "
                "different lines"
            )
    elif split in data:
        lines = labelled(data, split)
    else:
        return None
    labels, _, texts = zip(*map(split_label, lines), strict=True)
    names = data.get("label_names")
    return Dataset.from_dict(
        {"label": [names[int(label)] for label in labels] if names else labels, "text": texts}
    )


def labelled(data: dict, split: str, reports: bool = True) -> list[str]:
    bad = BadRows(data, split)
    fault = partial(unlabelled, names=data.get("label_names"))
    lines = read_all_lines(split_files(data, split), data.get("encoding", "UTF-8"), bad, fault)
    if reports:
        bad.report(len(lines))
    return lines


def split_label(line: str) -> list[str]:
    """Return the label, the separator and the text of a line. Without a separator, the label is the
    only item."""
    return re.split(r"([ \t]+)", line, maxsplit=1)


def unlabelled(line: str, names: list[str] | None = None) -> str | None:
    label, *rest = split_label(line)
    if not label or not "".join(rest).strip():
        return f"{shorten(line)}, expected a label, a tab or a space, and a text"
    separator, text = rest
    if "\t" in text and "\t" not in separator:  # a label with spaces, or a text with tabs
        return f"{shorten(line)}, expected a label without spaces before the first tab"
    if names and label not in map(str, range(len(names))):
        return (
            f"has the label {label!r:.80}, expected one of 0 to {len(names) - 1}, the indices "
            "of data.label_names"
        )
    return None


def config_fields(text: dict[str, Rows], data: dict) -> dict[str, Any]:
    names = data.get("label_names")
    return label_mappings(names) if names else label_fields(text, data)


def label_fields(
    text: dict[str, Rows],
    data: dict,
    what: str = "labels",
    labels_of: Callable[[Rows], Iterable[str]] = lambda rows: rows["label"],
) -> dict:
    """Return `id2label` and `label2id` of the training text's labels, in alphabetical order.

    `labels_of` returns all labels of the rows of a split, and `text` are these by split. `data` is
    the [data] of the recipe. `what` names the labels in errors, such as "tags". Labels that occur
    once are logged.

    Raises:
        ValueError: for a label that only another split has, and for a training text with one label.
    """
    of_splits = {split: Counter(labels_of(rows)) for split, rows in text.items()}
    counts, key = of_splits["train"], split_key(data, "train")
    names = sorted(counts)
    if len(names) < 2:  # transformers takes one label for a regression
        raise ValueError(f"{key} has the {what} {names}, expected at least two")
    if len(names) > MAX_LABELS:
        seen = f"{key} has {len(names)} {what}, such as {names[0]!r:.100}"
        raise ValueError(f"{seen}, expected at most {MAX_LABELS}")
    for split, labels in of_splits.items():
        if unknown := sorted(labels.keys() - counts.keys()):
            raise ValueError(
                f"{split_key(data, split)} has {what} {reprlib.repr(unknown)} for {split}, "
                f"expected some of {reprlib.repr(names)}, those of the training text"
            )
    if rare := [name for name in names if counts[name] == 1]:
        logger.warning_once(
            f"{key} has one example of the {what} {reprlib.repr(rare)}, expected several: a model "
            "hardly learns a label from one"
        )
    return label_mappings(names)


def label_mappings(names: list[str]) -> dict:
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }


def encode(columns: Columns, tokenizer: Callable, data: dict) -> Columns:
    # Teachers have their own tokenizers, so they need the text.
    return {
        "input_ids": tokenizer(columns["text"])["input_ids"],
        "label": columns["label"],
        "text": columns["text"],
    }


def collator(tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel) -> Collator:
    ids = model.config.label2id
    return pad_changed(
        DataCollatorWithPadding(tokenizer),
        lambda row: {"input_ids": row["input_ids"], "label": ids[row["label"]]},
    )


TASK = Task(
    model=VanillaEncoderForSequenceClassification,
    pipeline="text-classification",
    data=DATA,
    metric_names=("accuracy",),
    read=read,
    config_fields=config_fields,
    encode=encode,
    collator=collator,
    reduce=top_label,
    metrics=accuracy,
    bpe_dropout=True,
    row_labels=True,
)
