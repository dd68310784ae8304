"""Token classification: one tag for each word, as for named entities or parts of speech.

A file is in CoNLL form. A line has a word and, after spaces or tabs, its tag in the last column; an
empty line ends a sentence. Lines with # before the first word of a sentence are comments, unless
they have the columns of a word.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import (
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ...modeling_vanilla_transformer import VanillaEncoderForTokenClassification
from ..data import (
    SOURCES,
    BadRows,
    Fault,
    lacking,
    lines,
    read_data_set,
    shorten,
    split_files,
)
from ..values import SPLITS, data_keys
from .sequence_classification import label_fields
from .task import Collator, Columns, Rows, Scored, Task, named_labels, pad_changed, top_label

# `columns` are the data set's columns of words and tags
DATA = data_keys(*SOURCES, *SPLITS, "encoding")
COLUMNS = ("tokens", "ner_tags")  # their names in data sets of the Hub
FEATURES = Features(words=List(Value("string")), tags=List(Value("string")))
DOCUMENT = "-DOCSTART-"  # a line in CoNLL's files that starts another text


def read(data: dict, split: str) -> Rows | None:
    if "dataset" in data:
        rows = read_data_set(data, split, (*FEATURES,), COLUMNS, unequal)
        return rows and named_labels(rows, "tags", FEATURES)
    if split not in data:
        return None
    encoding = data.get("encoding", "UTF-8")
    bad = BadRows(data, split)
    rows = [
        sentence for path in split_files(data, split) for sentence in sentences(path, encoding, bad)
    ]
    bad.report(len(rows))
    return Dataset.from_list(rows, features=FEATURES)


def unequal(row: dict) -> str | None:
    words, tags = (len(row[name] or ()) for name in FEATURES)
    if words != tags:
        return f"{words} words and {tags} tags, expected one for each"
    return lacking(row)


def sentences(path: Path, encoding: str, bad: BadRows) -> list[dict[str, list[str]]]:
    """Return {"words": [...], "tags": [...]} for each sentence of a file.

    A line has a word first and its tag last; empty lines separate sentences. Lines that mark the
    beginning of a document are ignored. If `bad` skips bad lines, their sentences are counted and
    left out.

    Raises:
        ValueError: for a line without a tag, unless it is skipped, and for a file without words.
    """
    rows = []
    sentence = []
    columns_of_words = word_columns(path, encoding)
    for number, line in enumerate(chain(lines(path, encoding), [""]), 1):
        if sentence == [] and is_comment(line, columns_of_words):
            continue
        if what := line if isinstance(line, Fault) else untagged(line):
            if sentence is not None:
                bad.add(f"{path}: line {number} {what}")
            sentence = None  # skip until the next sentence
        elif not line.strip():
            if sentence:
                rows.append(dict(zip(FEATURES, map(list, zip(*sentence)), strict=True)))
            sentence = []
        elif sentence is not None and (columns := split_fields(line))[0] != DOCUMENT:
            sentence.append((columns[0], columns[-1]))
    if not rows and not bad.count:
        raise ValueError(f"{path} has no words, expected at least one sentence")
    return rows


def word_columns(path: Path, encoding: str) -> tuple[bool, int]:
    """Return the columns of a file: True if tabs separate them, and their number in its first line
    with a word."""
    for line in lines(path, encoding):
        if line.strip() and not line.startswith("#") and split_fields(line)[0] != DOCUMENT:
            return "\t" in line, len(split_fields(line))
    return False, 2


def is_comment(line: str, columns: tuple[bool, int]) -> bool:
    """Return True if `line` begins with # and does not have the `columns` of the file's words."""
    has_tabs, count = columns
    has_columns = has_tabs == ("\t" in line) and len(split_fields(line)) == count
    return line.startswith("#") and not has_columns


def untagged(line: str) -> str | None:
    one = line.strip() and len(split_fields(line)) == 1
    return f"{shorten(line)}, expected a word, a space or a tab, and a tag" if one else None


def split_fields(line: str) -> list[str]:
    return re.split(r"[ \t]+", line.strip())


def texts(dataset: Rows) -> Iterable[str]:
    return map(" ".join, dataset["words"])


def tags(rows: Rows) -> Iterable[str]:
    return chain.from_iterable(rows["tags"])


def encode(columns: Columns, tokenizer: Callable, data: dict) -> Columns:
    """Return `input_ids` and `labels` of the words and tags in `columns`.

    A label is the tag of a word at its first subword, None at its other subwords and at special
    tokens.
    """
    encoded = tokenizer(columns["words"], is_split_into_words=True, return_token_type_ids=False)
    labels = []
    for row, tags in enumerate(columns["tags"]):
        words = encoded.word_ids(row)
        is_first = [
            word is not None and word != before for word, before in zip(words, [None, *words])
        ]
        labels.append([tags[word] if first else None for word, first in zip(words, is_first)])
    return {"input_ids": encoded["input_ids"], "labels": labels}


def collator(tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel) -> Collator:
    ids = model.config.label2id | {None: -100}
    return pad_changed(
        DataCollatorForTokenClassification(tokenizer),
        lambda row: {**row, "labels": [ids[tag] for tag in row["labels"]]},
    )


def metrics(prediction: tuple, scored: Scored) -> dict[str, Any]:
    """Return the accuracy of words, and the scores of entities if all tags are B-type, I-type or
    O."""
    predictions, labels = prediction
    config, seen = scored.config, labels != -100
    predicted, gold = (
        [[config.id2label[tag] for tag in tags[words]] for tags, words in zip(ids, seen)]
        for ids in (predictions, labels)
    )
    is_bio = all(re.fullmatch("O|[BI]-.+", tag) for tag in config.label2id)
    return {
        "accuracy": np.mean(predictions[seen] == labels[seen]),
        **(scores_of_entities(predicted, gold) if is_bio else {}),
    }


def scores_of_entities(predicted: list[list[str]], gold: list[list[str]]) -> dict[str, float]:
    """Return precision, recall and f1 of entities, 0 to 1 (Tjong Kim Sang and De Meulder 2003).

    The arguments have the tags of each sentence, such as "B-PER". An entity is correct if its type
    and its first and last word are.
    """
    predicted, gold = (
        {(row, *entity) for row, tags in enumerate(sentences) for entity in entities(tags)}
        for sentences in (predicted, gold)
    )
    right = len(predicted & gold)
    precision, recall = right / max(len(predicted), 1), right / max(len(gold), 1)
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * right / max(len(predicted) + len(gold), 1),
    }


def entities(tags: list[str]) -> set[tuple[str, int, int]]:
    """Return the entities in the `tags` of a sentence as (type, first word, word after the last).

    As in conlleval, an entity begins at B, and at an I after O or after another type. It continues
    over each I of its type.
    """
    spans = set()
    name = None
    first = 0
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if name is not None and (prefix, kind) != ("I", name):
            spans.add((name, first, index))
            name = None
        if name is None and prefix != "O":
            name = kind
            first = index
    return spans


TASK = Task(
    model=VanillaEncoderForTokenClassification,
    pipeline="token-classification",
    data=DATA,
    metric_names=("accuracy", "precision", "recall", "f1"),
    read=read,
    texts=texts,
    config_fields=partial(label_fields, what="tags", labels_of=tags),
    encode=encode,
    collator=collator,
    reduce=top_label,
    metrics=metrics,
)
