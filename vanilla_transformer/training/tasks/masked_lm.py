"""Words that were masked, from those around them (Devlin et al. 2019), one text a line."""

import numpy as np
from transformers import DataCollatorForTokenClassification

from ...configuration_vanilla_transformer import VanillaEncoderConfig
from ...modeling_vanilla_transformer import VanillaEncoderForMaskedLM
from ..data import SOURCES, read_columns
from . import causal_lm, sequence_classification

CONFIG, MODEL = VanillaEncoderConfig, VanillaEncoderForMaskedLM
PIPELINE = "fill-mask"
# Each split is a file. If these are `labelled`, they are those of a sequence classification, whose labels are left out.
DATA = (*SOURCES, "streaming", *sequence_classification.DATA[1:], "labelled")
EVALUATION = ()
FOR_ENCODER = True
MASKED = 0.15  # of all words
REPLACED, KEPT = 0.1, 0.1  # of the tokens of these, by a random one and by itself

reduce = causal_lm.reduce


def read(data, split):
    if not data.get("labelled"):
        return read_columns(data, split, ("text",))
    found = sequence_classification.read(data, split)
    return found and found.select_columns("text")


def texts(dataset):
    return dataset["text"]


def config_fields(text):
    return {}


def encode(columns, tokenizer, data):
    encoded = tokenizer(columns["text"], return_token_type_ids=False)
    return {"input_ids": encoded["input_ids"], "labels": word_numbers(encoded)}


def word_numbers(encoded) -> list[list[int]]:
    """The number of the word each token is of, -1 for special tokens; the words of a second sequence are counted on."""
    found = []
    for row in range(len(encoded["input_ids"])):
        words, sides = encoded.word_ids(row), encoded.sequence_ids(row)
        behind = 1 + max((word for word, side in zip(words, sides) if side == 0 and word is not None), default=-1)
        found.append([-1 if word is None else word + behind * side for word, side in zip(words, sides)])
    return found


def examples(rows, data, split):
    return rows


def draw(row, random, tokenizer):
    """Whole words, each with probability `MASKED`, at least one: 80% of their tokens become the mask token, 10% a random one.
    Labels are the tokens of these words, -100 elsewhere."""
    draws = {word: random.random() for word in dict.fromkeys(row["labels"]) if word >= 0}
    chosen = {word for word, value in draws.items() if value <= max(MASKED, min(draws.values()))}
    pairs = list(zip(row["input_ids"], row["labels"], strict=True))
    ids = [replaced(token, tokenizer, random) if word in chosen else token for token, word in pairs]
    return {**row, "input_ids": ids, "labels": [token if word in chosen else -100 for token, word in pairs]}


def replaced(token, tokenizer, random):
    fate = random.random()
    if fate < KEPT:
        return token
    return random.randrange(len(tokenizer)) if fate < KEPT + REPLACED else tokenizer.mask_token_id


def collator(tokenizer, model):
    return DataCollatorForTokenClassification(tokenizer)


def metrics(tokenizer, config, evaluation, rows):
    def mean(prediction):
        losses, labels = prediction
        return {"nll": losses[labels != -100].mean(dtype=np.float64)}

    return mean
