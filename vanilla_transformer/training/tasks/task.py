"""The protocol of a task, which its module implements, and functions that several modules have."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ..values import KeyType

Rows = Dataset | IterableDataset
Columns = dict[str, list]
Metrics = Callable[[tuple], dict[str, Any]]  # (predictions, labels) -> scores by name


@dataclass(frozen=True)
class Abilities:
    """Optional abilities of a task.

    Attributes:
        bpe_dropout: its text may be split into other subwords each time it is seen.
        label_smoothing: its loss is the cross-entropy of `labels` alone, which label smoothing and
            R-Drop change.
        row_labels: each row has one label, which teachers can predict.
        sparse_labels: few tokens of a row have a label, so only these need logits.
        carries_pipeline: its checkpoints carry the translation pipeline.
        parallel_files: what each file of a split holds, line by line; empty where a split may have
            any number of files.
        needs: keys of [data] without which there are no examples.
        images: it reads images, with an image processor instead of a tokenizer, and without `texts`
            and `encode`. Its module has `processor(config)` for a new model.
    """

    bpe_dropout: bool = False
    label_smoothing: bool = True
    row_labels: bool = False
    sparse_labels: bool = False
    carries_pipeline: bool = False
    parallel_files: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    images: bool = False


class Task(Protocol):
    """The module of a task.

    Attributes:
        ABILITIES: abilities that not every task has.
        CONFIG: the class of the model's config.
        MODEL: the class of the model.
        PIPELINE: the Hub's name for what the model does.
        DATA: the keys of a recipe's [data], see `values.data_keys`. A task that reads text always
            has `skip_bad_rows` (see `data.BadRows`).
        EVALUATION: the keys of a recipe's [evaluation].
        METRICS: the numbers that `metrics` gives, of which a recipe may name one as the best.
        augment: (row, random, tokenizer) -> the row with random changes; `None` without any.
        reduce: (logits, labels) -> the part of the logits that the metrics need; `None` if the
            metrics need generated tokens instead of logits.
    """

    ABILITIES: Abilities
    CONFIG: type[PreTrainedConfig]
    MODEL: type[PreTrainedModel]
    PIPELINE: str
    DATA: dict[str, KeyType]
    EVALUATION: dict[str, KeyType]
    METRICS: tuple[str, ...]
    augment: Callable[[dict, Random, PreTrainedTokenizerFast], dict] | None
    reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None

    def read(self, data: dict, split: str) -> Rows | None:
        """Return the rows of `split`, "train", "validation" or "test"; None if the recipe has none.

        `data` is the [data] of the recipe.
        """

    def texts(self, dataset: Rows) -> Iterable[str]:
        """Return all text in the rows `dataset` of a split, to train a new tokenizer."""

    def config_fields(self, text: dict[str, Rows], data: dict) -> dict[str, Any]:
        """Return the config fields that the text determines, such as labels.

        `text` are the rows by split, `data` is the [data] of the recipe.
        """

    def encode(self, columns: Columns, tokenizer: Callable, data: dict) -> Columns:
        """Return the encoded columns of rows of text, {name: values}, such as `input_ids` and
        `labels`.

        A row of text may become several encoded rows. `tokenizer` is called with texts, and `data`
        is the [data] of the recipe.
        """

    def examples(self, rows: Rows, data: dict, split: str) -> Any:
        """Return the examples of one split: the encoded rows, or parts of them.

        `rows` are the encoded rows, and `data` is the [data] of the recipe.
        """

    def collator(
        self, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel
    ) -> Callable[[list[dict]], dict]:
        """Return a function that makes a padded batch of a list of examples."""

    def metrics(
        self,
        tokenizer: PreTrainedTokenizerFast,
        config: PreTrainedConfig,
        evaluation: dict,
        rows: Rows,
    ) -> Metrics:
        """Return the function that computes {name: metric} of a split with the examples `rows`.

        `Trainer` calls it with what `reduce` kept of the logits, or the generated tokens, and with
        the labels. `evaluation` is the [evaluation] of the recipe.
        """


# -------------------------------------------------------------------- functions of several tasks


def text_column(dataset: Rows) -> Iterable[str]:
    """Return the texts of rows with one text."""
    return dataset["text"]


def no_config_fields(text: dict[str, Rows], data: dict) -> dict[str, Any]:
    """Return no fields, for a task whose text determines none."""
    return {}


def all_rows(rows: Rows, data: dict, split: str) -> Rows:
    """Return the encoded rows as they are."""
    return rows


def top_label(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the number of the label with the largest logit."""
    return logits.argmax(dim=-1)


def accuracy(tokenizer: Any, config: PreTrainedConfig, evaluation: dict, rows: Rows) -> Metrics:
    """Return the function for the accuracy of a task with one label for each row."""
    return lambda prediction: {"accuracy": np.mean(prediction[0] == prediction[1])}


def select_columns(rows: Dataset, columns: Sequence[str], names: Iterable[str]) -> Dataset:
    """Return only the `columns` of a data set, with the new `names`. Raises ValueError for a column
    that it does not have."""
    for column in columns:
        if column not in rows.column_names:
            raise ValueError(
                f"the data set has no column {column!r}, expected one of "
                f"{sorted(rows.column_names)}"
            )
    return rows.select_columns(list(columns)).rename_columns(dict(zip(columns, names, strict=True)))
