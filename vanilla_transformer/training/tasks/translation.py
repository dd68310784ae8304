"""Translation from one language to another, or any other task from text to text."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ...modeling_vanilla_transformer import VanillaSeq2SeqForConditionalGeneration
from ..data import SOURCES, read_columns
from ..metrics import bleu, chrf
from ..noise import add_noise
from ..values import PROBABILITY, SPLITS, KeyType, data_keys
from .task import Columns, Rows, Scored, Task

SIDES = ("source", "target")
DATA = data_keys(*SOURCES, "streaming", *SPLITS, source_noise=KeyType(float, PROBABILITY))


def read(data: dict, split: str) -> Rows | None:
    rows = read_columns(data, split, SIDES)
    share = data.get("source_noise") if split == "train" else None
    return add_noise(rows, share) if rows and share else rows


def texts(dataset: Rows) -> Iterable[str]:
    return chain(dataset["source"], dataset["target"])


def encode(columns: Columns, tokenizer: Callable, data: dict) -> Columns:
    is_plain = isinstance(tokenizer, PreTrainedTokenizerBase)  # others split both alike
    labels = tokenizer(text_target=columns["target"]) if is_plain else tokenizer(columns["target"])
    return {"input_ids": tokenizer(columns["source"])["input_ids"], "labels": labels["input_ids"]}


def metrics(prediction: tuple, scored: Scored) -> dict[str, Any]:
    """Return `bleu` and `chrf` in percent, and the `signature` of BLEU, of generated ids against
    label ids.

    `prediction` are both, (B, T), of which T may differ, padded with -100 or the pad token.
    """
    outputs, references = (texts_of_ids(ids, scored.tokenizer) for ids in prediction)
    score, signature = bleu(outputs, references, scored.evaluation.get("bleu_tokenize", "13a"))
    return {"bleu": score, "chrf": chrf(outputs, references), "signature": signature}


def texts_of_ids(ids: np.ndarray, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return tokenizer.batch_decode(
        np.where(ids == -100, tokenizer.pad_token_id, ids), skip_special_tokens=True
    )


TASK = Task(
    model=VanillaSeq2SeqForConditionalGeneration,
    pipeline="translation",
    data=DATA,
    evaluation={"bleu_tokenize": KeyType(str)},  # of sacreBLEU, "13a" by default
    metric_names=("bleu", "chrf"),
    read=read,
    texts=texts,
    encode=encode,
    collator=DataCollatorForSeq2Seq,
    metrics=metrics,
    bpe_dropout=True,
    carries_pipeline=True,
    parallel_files=SIDES,
)
