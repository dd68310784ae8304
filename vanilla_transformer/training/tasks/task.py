"""A task of training, as a dataclass, and functions that several tasks have."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, IterableDataset
from transformers import (
    BaseImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ..values import KeyType

Rows = Dataset | IterableDataset
Columns = dict[str, list]
Collator = Callable[[list[dict]], dict]


class Scored(NamedTuple):
    """A split whose predictions are scored.

    Attributes:
        rows: the examples of the split.
        tokenizer: the tokenizer of the model.
        config: the config of the model.
        evaluation: the [evaluation] of the recipe.
    """

    rows: Any
    tokenizer: PreTrainedTokenizerFast
    config: PreTrainedConfig
    evaluation: dict


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of training: what a recipe may set for it, and its functions.

    `data` in the signatures is the [data] of the recipe. A task that reads images has a `processor`
    instead of `encode` and `texts`.

    Attributes:
        model: the class of the model.
        pipeline: the Hub's name for what the model does.
        data: the keys of a recipe's [data], see `values.data_keys`. A task that reads text always
            has `skip_bad_rows` (see `data.BadRows`).
        metric_names: the numbers that `metrics` gives, of which a recipe may name one as the best.
        read: (data, split) -> the rows of the split, "train", "validation" or "test"; `None` if the
            recipe has no such split.
        encode: (columns, tokenizer, data) -> the encoded columns of rows, {name: values}, such as
            `input_ids` and `labels`. A row of text may become several encoded rows. `tokenizer` is
            called with texts.
        collator: (tokenizer, model) -> a function from a list of examples to a padded batch.
        metrics: (prediction, scored) -> {name: metric}. The prediction is (what `reduce` kept of
            the logits, labels), or (generated tokens, labels).
        texts: (rows) -> all text in the rows, to train a new tokenizer.
        config_fields: (rows by split, data) -> the config fields that the text determines, such as
            labels.
        examples: (encoded rows, data, split) -> the examples of a split: these rows, or parts of
            them.
        reduce: (logits, labels) -> the part of the logits that the metrics need; `None` if they
            need generated tokens instead of logits.
        augment: (row, random, tokenizer) -> the row with random changes; `None` without any.
        processor: (config) -> a new image processor, in a task that reads images.
        evaluation: the keys of a recipe's [evaluation].
        needs: keys of [data] without which there are no examples.
        parallel_files: what each file of a split holds, line by line; empty where a split may have
            any number of files.
        bpe_dropout: its text may be split into other subwords each time it is seen.
        label_smoothing: its loss is the cross-entropy of `labels` alone, which label smoothing and
            R-Drop change.
        row_labels: each row has one label, which teachers can predict.
        sparse_labels: few tokens of a row have a label, so only these need logits.
        carries_pipeline: its checkpoints carry the translation pipeline.
    """

    model: type[PreTrainedModel]
    pipeline: str
    data: dict[str, KeyType]
    metric_names: tuple[str, ...]
    read: Callable[[dict, str], Rows | None]
    encode: Callable[[Columns, Callable, dict], Columns] | None = None
    collator: Callable[[PreTrainedTokenizerFast, PreTrainedModel], Collator]
    metrics: Callable[[tuple, Scored], dict[str, Any]]
    texts: Callable[[Rows], Iterable[str]] = lambda rows: rows["text"]
    config_fields: Callable[[dict[str, Rows], dict], dict[str, Any]] = lambda text, data: {}
    examples: Callable[[Rows, dict, str], Any] = lambda rows, data, split: rows
    reduce: Callable[[Any, Any], Any] | None = None
    augment: Callable[[dict, Random, PreTrainedTokenizerFast], dict] | None = None
    processor: Callable[[PreTrainedConfig], BaseImageProcessor] | None = None
    evaluation: dict[str, KeyType] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    parallel_files: tuple[str, ...] = ()
    bpe_dropout: bool = False
    label_smoothing: bool = True
    row_labels: bool = False
    sparse_labels: bool = False
    carries_pipeline: bool = False

    @property
    def config(self) -> type[PreTrainedConfig]:
        """The class of the model's config."""
        return self.model.config_class


# -------------------------------------------------------------------- functions of several tasks


def top_label(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the number of the label with the largest logit."""
    return logits.argmax(dim=-1)


def accuracy(prediction: tuple, scored: Scored) -> dict[str, Any]:
    """Return the accuracy of a task with one label for each row."""
    return {"accuracy": np.mean(prediction[0] == prediction[1])}


def pad_changed(pad: Collator, change: Callable[[dict], dict]) -> Collator:
    """Return a function that makes a batch by `pad` of rows after `change`."""
    return lambda rows: pad([change(row) for row in rows])


def named_labels(rows: Dataset, column: str, features: Features) -> Dataset:
    """Return `rows` with these `features`, and the names of labels in `column`, whose rows may have
    numbers or lists of numbers."""
    labels = rows.features[column]
    labels = getattr(labels, "feature", labels)
    if not isinstance(labels, ClassLabel):
        return rows.cast(features)
    return rows.map(lambda row: {column: labels.int2str(row[column])}, features=features)
