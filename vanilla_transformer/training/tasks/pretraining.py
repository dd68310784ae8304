"""BERT's pretraining: masked words and next-sentence prediction (Devlin et al. 2019, section 3.1).

A file has one sentence a line, and an empty line between documents.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ...modeling_vanilla_transformer import VanillaEncoderForPreTraining
from ..data import BadRows, read_all_lines, split_files
from ..values import SPLITS, data_keys
from . import causal_lm, masked_lm
from .task import Columns, Rows, Scored, Task

# `max_length` is in tokens of a pair; the longer sentence is cut.
DATA = data_keys("directory", *SPLITS, "encoding", "max_length", "skip_bad_rows")
FOLLOWS, DOES_NOT = 0, 1


def read(data: dict, split: str) -> Rows | None:
    """Return the sentence pairs of a split, or None if the recipe has no such split.

    The columns are first, second and next_sentence_label. Raises ValueError for less than two
    documents, or none with two sentences. `data` is the [data] of the recipe, and `split` "train",
    "validation" or "test".
    """
    if split not in data:
        return None
    encoding = data.get("encoding", "UTF-8")
    bad = BadRows(data, split)
    every = [
        document for path in split_files(data, split) for document in documents(path, encoding, bad)
    ]
    bad.report(sum(map(len, every)))
    if len(every) < 2 or max(map(len, every)) < 2:
        longest = max(map(len, every), default=0)
        seen = f"the {split} text has {len(every)} documents of up to {longest} sentences"
        raise ValueError(
            f"{seen}, expected at least 2 documents of 2 sentences, with an empty line between "
            "documents"
        )
    return Dataset.from_list(list(pairs(every)))


def documents(path: Path, encoding: str, bad: BadRows) -> list[list[str]]:
    """Return a list of sentences for each document of a file, in which empty lines separate
    documents.

    Bad lines raise ValueError, or are counted and left out if `bad` skips them.
    """
    every = [[]]
    for line in read_all_lines([path], encoding, bad, fault=None):
        if line.strip():
            every[-1].append(line.strip())
        else:
            every.append([])
    return list(filter(None, every))


def pairs(documents: list[list[str]]) -> Iterator[dict]:
    """Yield each sentence with the next one or, half of the time, with one of another document.

    The keys are first, second and next_sentence_label, 0 if the second follows. The pairs are the
    same in each call.
    """
    rng = random.Random(0)
    for index, document in enumerate(documents):
        for first, second in zip(document, document[1:]):
            label = rng.choice((FOLLOWS, DOES_NOT))
            if label == DOES_NOT:
                other = (index + rng.randrange(1, len(documents))) % len(documents)
                second = rng.choice(documents[other])
            yield {"first": first, "second": second, "next_sentence_label": label}


def texts(dataset: Rows) -> Iterable[str]:
    return dict.fromkeys(chain(dataset["first"], dataset["second"]))


def encode(columns: Columns, tokenizer: Callable, data: dict) -> Columns:
    cut = (
        {"truncation": "longest_first", "max_length": data["max_length"]}
        if "max_length" in data
        else {}
    )
    encoded = tokenizer(columns["first"], columns["second"], return_token_type_ids=True, **cut)
    return {
        "input_ids": encoded["input_ids"],
        "token_type_ids": encoded["token_type_ids"],
        "labels": masked_lm.word_numbers(encoded),
        "next_sentence_label": columns["next_sentence_label"],
    }


def reduce(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    prediction, relationship = logits
    return causal_lm.reduce(prediction, labels[0]), relationship.argmax(dim=-1)


def metrics(prediction: tuple, scored: Scored) -> dict[str, Any]:
    (losses, predicted), (labels, expected) = prediction
    return {
        **masked_lm.metrics((losses, labels), scored),
        "next_sentence_accuracy": np.mean(predicted == expected),
    }


TASK = Task(
    model=VanillaEncoderForPreTraining,
    pipeline="fill-mask",
    data=DATA,
    metric_names=("nll", "next_sentence_accuracy"),
    read=read,
    texts=texts,
    config_fields=lambda text, data: {"type_vocab_size": 2},
    encode=encode,
    augment=masked_lm.augment,
    collator=masked_lm.collator,
    reduce=reduce,
    metrics=metrics,
    label_smoothing=False,
    sparse_labels=True,
)
