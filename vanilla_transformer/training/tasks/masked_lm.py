"""Masked language modeling: prediction of masked words (Devlin et al. 2019), one text a line."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    BatchEncoding,
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ...modeling_vanilla_transformer import VanillaEncoderForMaskedLM
from ..data import SOURCES, BadRows, read_columns
from ..values import KeyType, data_keys
from . import causal_lm, sequence_classification
from .task import Collator, Columns, Rows, Scored, Task

# Each split is a file. `labelled` files are those of sequence classification; their labels are
# ignored. With `block_size` texts are packed into training examples of at most this many tokens,
# and do not attend to each other.
DATA = sequence_classification.DATA | data_keys(
    *SOURCES, "streaming", "block_size", labelled=KeyType(bool)
)
MASKED_SHARE = 0.15  # share of all words
RANDOM_SHARE = 0.1  # share of the tokens of masked words that become a random token
UNCHANGED_SHARE = 0.1  # share of the tokens of masked words


def read(data: dict, split: str) -> Rows | None:
    if not data.get("labelled"):
        return read_columns(data, split, ("text",))
    rows = sequence_classification.read(data, split)
    return rows and rows.select_columns("text")


def encode(columns: Columns, tokenizer: Callable, data: dict) -> Columns:
    encoded = tokenizer(columns["text"], return_token_type_ids=False)
    return {"input_ids": encoded["input_ids"], "labels": word_numbers(encoded)}


def word_numbers(encoded: BatchEncoding) -> list[list[int]]:
    """Return the word number of each token of each row in `encoded`, -1 for special tokens.

    The numbers of a second sequence continue those of the first.
    """
    numbers = []
    for row in range(len(encoded["input_ids"])):
        words = encoded.word_ids(row)
        sides = encoded.sequence_ids(row)
        first_count = 1 + max(
            (word for word, side in zip(words, sides) if side == 0 and word is not None), default=-1
        )
        numbers.append(
            [-1 if word is None else word + first_count * side for word, side in zip(words, sides)]
        )
    return numbers


def examples(rows: Rows, data: dict, split: str) -> Any:
    if split != "train" or "block_size" not in data:
        return rows
    bad = BadRows(data, split)
    blocks = pack(rows, data["block_size"], bad)
    bad.report(len(rows) - bad.count)
    return Dataset.from_list(blocks)


def pack(rows: Dataset, size: int, bad: BadRows) -> list[dict]:
    """Return blocks of at most `size` tokens, with the keys input_ids, labels and documents.

    `documents` has for each token the number of its row in the block. `labels` are word numbers,
    which continue from row to row, -1 for special tokens. Rows are not split and stay in order.

    Raises:
        ValueError: for a row that is longer, unless `bad` skips such rows and counts them.
    """
    blocks = []
    capacity = 0
    for row, (ids, words) in enumerate(zip(rows["input_ids"], rows["labels"], strict=True)):
        if len(ids) > size:
            bad.add(f"row {row} has {len(ids)} tokens, expected at most block_size={size}")
            continue
        if len(ids) > capacity:
            blocks.append({"input_ids": [], "labels": [], "documents": []})
            capacity = size
        block = blocks[-1]
        capacity -= len(ids)
        word_count = 1 + max(block["labels"], default=-1)
        number = 1 + max(block["documents"], default=-1)
        block["input_ids"] += ids
        block["labels"] += [word if word < 0 else word + word_count for word in words]
        block["documents"] += [number] * len(ids)
    return blocks


def augment(row: dict, random: Random, tokenizer: PreTrainedTokenizerFast) -> dict:
    """Return `row` with whole words masked, each with probability `MASKED_SHARE`, at least one.

    80% of the tokens of these words become the mask token, 10% a random one. The labels, word
    numbers before, become the tokens of these words, and -100 elsewhere.
    """
    values = {word: random.random() for word in dict.fromkeys(row["labels"]) if word >= 0}
    masked = {
        word for word, value in values.items() if value <= max(MASKED_SHARE, min(values.values()))
    }
    pairs = list(zip(row["input_ids"], row["labels"], strict=True))
    ids = [
        mask_token(token, tokenizer, random) if word in masked else token for token, word in pairs
    ]
    return {
        **row,
        "input_ids": ids,
        "labels": [token if word in masked else -100 for token, word in pairs],
    }


def mask_token(token: int, tokenizer: PreTrainedTokenizerFast, random: Random) -> int:
    """Return the replacement of `token` in a masked word.

    It is `token` itself (10%), a random token (10%), or the mask token.
    """
    value = random.random()
    if value < UNCHANGED_SHARE:
        return token
    return (
        random.randrange(len(tokenizer))
        if value < UNCHANGED_SHARE + RANDOM_SHARE
        else tokenizer.mask_token_id
    )


def collator(tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel) -> Collator:
    pad = DataCollatorForTokenClassification(tokenizer)

    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        documents = [torch.tensor(row["documents"]) for row in rows if "documents" in row]
        batch = pad(
            [{name: value for name, value in row.items() if name != "documents"} for row in rows]
        )
        if not documents:
            return batch
        window = model.config.sliding_window
        if window is not None:
            raise ValueError(
                f"sliding_window is {window}, expected none with block_size: packed texts have "
                f"no window"
            )
        return {**batch, **isolate_documents(documents)}

    return collate


def isolate_documents(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `attention_mask` (B, 1, S, S) and `position_ids` (B, S) by which tokens see only their
    own document.

    `documents` holds the document number of each token of each example. Positions restart at 0 in
    each document; padding sees only padding.
    """
    numbers = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=-1)
    same = numbers[:, :, None] == numbers[:, None]
    starts = same.int().argmax(-1)
    return {
        "attention_mask": same[:, None],
        "position_ids": torch.arange(numbers.shape[1]) - starts,
    }


def metrics(prediction: tuple, scored: Scored) -> dict[str, Any]:
    losses, labels = prediction
    return {"nll": losses[labels != -100].mean(dtype=np.float64)}


TASK = Task(
    model=VanillaEncoderForMaskedLM,
    pipeline="fill-mask",
    data=DATA,
    metric_names=("nll",),
    read=read,
    encode=encode,
    examples=examples,
    augment=augment,
    collator=collator,
    reduce=causal_lm.reduce,
    metrics=metrics,
    sparse_labels=True,
)
