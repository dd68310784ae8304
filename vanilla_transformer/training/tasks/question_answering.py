"""Extractive question answering: the span of a context that answers a question.

The method is that of Devlin et al. 2019, section 4.2. Files are JSON in the form of SQuAD 1.1
or 2.0 (Rajpurkar et al. 2016, 2018). A context too long for `max_length` is read in windows that
share `stride` tokens, each after the question. In a window without the answer, the first token is
the target. In version 2.0 this is the answer "" to a question without an answer.
"""

import json
import re
import reprlib
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerFast

from ...modeling_vanilla_transformer import VanillaEncoderForQuestionAnswering
from ..data import (
    SOURCES,
    BadRows,
    read_columns,
    read_text,
    split_files,
    valid_positions,
    valid_rows,
)
from ..values import COUNTED, SPLITS, KeyType, data_keys
from .task import Collator, Columns, Rows, Scored, Task, pad_changed

DATA = data_keys(*SOURCES, *SPLITS, "max_length", stride=KeyType(int))
METRICS = ("exact_match", "f1")
# columns of a data set; answers are {"text": [...], "answer_start": [...]}
NAMES = ("id", "question", "context", "answers")
TARGETS = ("start_positions", "end_positions")
# columns that only the metrics use
SCORED = ("id", "context", "answers", "offsets")


def read(data: dict, split: str) -> Rows | None:
    if "dataset" in data:
        rows = read_columns(data, split, NAMES)
        if rows and isinstance(rows[0]["answers"], list):
            rows = rows.map(lambda row: {"answers": answer_lists(row["answers"])})
        return rows and valid_rows(rows, fault, BadRows(data, split))
    if split in data:
        rows = [row for path in split_files(data, split) for row in questions(path)]
        return Dataset.from_list(
            [rows[offset] for offset in valid_positions(rows, fault, BadRows(data, split))]
        )
    return None


def questions(path: Path) -> list[dict]:
    """Return a dict for each question of a SQuAD file, with the keys id, question, context and
    answers.

    The answers are {"text": [...], "answer_start": [...]}, with empty lists for a question without
    answers. Raises ValueError for another format, or no questions.
    """
    try:
        paragraphs = [
            paragraph
            for article in json.loads(read_text(path))["data"]
            for paragraph in article["paragraphs"]
        ]
        rows = [
            {
                "id": one["id"],
                "question": one["question"],
                "context": paragraph["context"],
                "answers": answer_lists(one["answers"]),
            }
            for paragraph in paragraphs
            for one in paragraph["qas"]
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON in the form of SQuAD: {error!r}") from None
    if not rows:
        raise ValueError(f"{path} has no questions, expected at least one")
    return rows


def answer_lists(answers: Any) -> Any:
    """Return a list of {"text": str, "answer_start": int}, as in SQuAD's files, in the form of data
    sets: {"text": [...], "answer_start": [...]}. Other answers are returned as they are."""
    if not isinstance(answers, list):
        return answers
    return {name: [answer[name] for answer in answers] for name in ("text", "answer_start")}


def fault(row: dict) -> str | None:
    """Return what is wrong with a question's `row`, such as a wrong answer position, or None."""
    name = f"question {row['id']}"
    answers = row["answers"]
    context = row["context"]
    if not isinstance(row["question"], str) or not isinstance(context, str):
        return f"{name} is {row['question']!r} on {context!r}, expected two texts"
    if not isinstance(answers, dict) or not {"text", "answer_start"} <= answers.keys():
        form = '{"text": [...], "answer_start": [...]}'
        return f"{name} has the answers {reprlib.repr(answers)}, expected {form}"
    for text, start in zip_longest(answers["text"] or (), answers["answer_start"] or ()):
        if not isinstance(text, str) or not isinstance(start, int):
            return f"{name} has the answer {text!r} at {start!r}, expected a text and its position"
        actual = context[start : start + len(text)] if start >= 0 else ""
        if actual != text or not text:
            return f"{name}: its context has {actual!r} at {start}, expected the answer {text!r}"
    return None


def texts(dataset: Rows) -> Iterable[str]:
    return chain(dict.fromkeys(dataset["context"]), dataset["question"])


def encode(columns: Columns, tokenizer: Callable, data: dict) -> Columns:
    """Return columns with one row for each window of each context, after its question.

    They are input_ids, token_type_ids, start_positions and end_positions (token numbers of the
    first answer, 0 without it), id, context, answers and offsets. `offsets` are the positions of
    tokens in the context, None for tokens outside it. Raises ValueError for a question that leaves
    no room for the context. `data` is the [data] of the recipe.
    """
    max_length = data.get("max_length", 384)
    stride = data.get("stride", 128)
    max_question = max_length - stride - tokenizer.num_special_tokens_to_add(pair=True)
    for id, ids in zip(
        columns["id"],
        tokenizer(columns["question"], add_special_tokens=False)["input_ids"],
        strict=True,
    ):
        if len(ids) >= max_question:
            raise ValueError(
                f"question {id} has {len(ids)} tokens, expected fewer than {max_question}, the "
                f"rest of max_length={max_length} beside stride={stride}"
            )
    encoded = tokenizer(
        columns["question"],
        columns["context"],
        max_length=max_length,
        stride=stride,
        truncation="only_second",
        return_overflowing_tokens=True,
        return_token_type_ids=True,
        return_offsets_mapping=True,
        return_attention_mask=False,
    )
    encoded_columns = {name: encoded[name] for name in ("input_ids", "token_type_ids")}
    encoded_columns |= {name: [] for name in TARGETS + SCORED}
    for window, row in enumerate(encoded["overflow_to_sample_mapping"]):
        sides = encoded.sequence_ids(window)
        answers = columns["answers"][row]
        offsets = [
            list(offset) if side == 1 else None
            for offset, side in zip(encoded["offset_mapping"][window], sides)
        ]
        values = (columns["id"][row], columns["context"][row], answers["text"] or [""], offsets)
        target = (0, 0)
        if answers["text"]:
            target = positions(offsets, answers["answer_start"][0], len(answers["text"][0]))
        for name, value in zip(TARGETS + SCORED, target + values, strict=True):
            encoded_columns[name].append(value)
    return encoded_columns


def positions(offsets: list, start: int, length: int) -> tuple[int, int]:
    """Return (first, last) token of the `length` characters of the context from `start` on.

    `offsets` has (start, end) for each token, None outside the context. The result is (0, 0) if the
    window does not hold all characters.
    """
    tokens = [token for token, offset in enumerate(offsets) if offset is not None]
    if not tokens or offsets[tokens[0]][0] > start or offsets[tokens[-1]][1] < start + length:
        return 0, 0
    inside = [
        token
        for token in tokens
        if offsets[token][1] > start and offsets[token][0] < start + length
    ]
    return inside[0], inside[-1]


def examples(rows: Rows, data: dict, split: str) -> Rows:
    return rows.remove_columns([*SCORED]) if split == "train" else rows


def collator(tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel) -> Collator:
    unseen = {*SCORED, *([] if model.config.type_vocab_size else ["token_type_ids"])}
    return pad_changed(
        DataCollatorWithPadding(tokenizer),
        lambda row: {name: value for name, value in row.items() if name not in unseen},
    )


def metrics(prediction: tuple, scored: Scored) -> dict[str, Any]:
    """Return SQuAD's scores in percent: the mean over questions of the best score of its answers.

    If a question of the split has no answer, "" is predicted where its score is higher, as in
    `run_qa.py` of transformers with `version_2_with_negative`.
    """
    (starts, ends), (first, _) = prediction
    rows, longest = scored.rows, scored.evaluation.get("max_answer_length", 30)
    if not np.array_equal(first, rows["start_positions"]):
        raise ValueError(
            "predictions are not in the order of the examples, expected an evaluation without "
            "sorting"
        )
    best = defaultdict(lambda: (-np.inf, ""))
    nulls = defaultdict(lambda: np.inf)  # of "", the lowest of the windows
    answers = {}
    for row, start, end in zip(rows, starts, ends, strict=True):
        answers[row["id"]] = row["answers"]
        best[row["id"]] = max(best[row["id"]], best_span(row, start, end, longest))
        nulls[row["id"]] = min(nulls[row["id"]], float(start[0] + end[0]))
    if [""] in answers.values():
        best |= {id: (nulls[id], "") for id in best if nulls[id] > best[id][0]}
    scores = [
        (
            max(normalize(best[id][1]) == normalize(one) for one in gold),
            max(f1(best[id][1], one) for one in gold),
        )
        for id, gold in answers.items()
    ]
    return dict(zip(METRICS, 100 * np.mean(scores, axis=0)))


def best_span(row: dict, start: np.ndarray, end: np.ndarray, longest: int) -> tuple[float, str]:
    """Return (score, text) of the best span of at most `longest` tokens of the context.

    The score is the sum of the logits of the span's first token, in `start`, and of its last token,
    in `end`. `row` is a window, with the context and the `offsets` of its tokens in the context.
    """
    tokens = [token for token, offset in enumerate(row["offsets"]) if offset is not None]
    sums = np.asarray(start)[tokens][:, None] + np.asarray(end)[tokens]
    allowed = np.tril(np.triu(np.ones(sums.shape, bool)), longest - 1)
    first, last = np.unravel_index(np.where(allowed, sums, -np.inf).argmax(), sums.shape)
    span = slice(row["offsets"][tokens[first]][0], row["offsets"][tokens[last]][1])
    return float(sums[first, last]), row["context"][span]


def normalize(text: str) -> str:
    """Return `text` as SQuAD's evaluation normalizes it.

    The result is in lower case, without punctuation and articles, with single spaces.
    """
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1(text: str, gold: str) -> float:
    """Return the F1 score, 0 to 1, of the words that `text` shares with `gold`, both normalized as
    in SQuAD's evaluation. An empty text equals only another one."""
    words, gold_words = normalize(text).split(), normalize(gold).split()
    if not words or not gold_words:
        return float(words == gold_words)
    common = sum((Counter(words) & Counter(gold_words)).values())
    return 2 * common / (len(words) + len(gold_words)) if common else 0.0


TASK = Task(
    model=VanillaEncoderForQuestionAnswering,
    pipeline="question-answering",
    data=DATA,
    evaluation={"max_answer_length": COUNTED},  # maximum tokens of an answer, 30 by default
    metric_names=METRICS,
    read=read,
    texts=texts,
    encode=encode,
    examples=examples,
    collator=collator,
    reduce=lambda logits, labels: logits,
    metrics=metrics,
    label_smoothing=False,
)
