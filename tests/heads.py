"""Checkpoints of every head with a tokenizer, and what the tests of pipelines and of tasks share."""

import pytest
import torch
import transformers
from checkpoints import SIZES
from transformers import BertTokenizer

import vanilla_transformer

TEXTS = ["the old man sees a red house", "two dogs run", "a woman reads the book ."]
LABELS = {0: "contradiction", 1: "neutral", 2: "entailment"}
LABELLED = {"id2label": LABELS, "label2id": {label: index for index, label in LABELS.items()}}
TAGS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}


def word_pieces(**options):
    """[CLS] question [SEP] context [SEP], with words cut into pieces."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["the", "old", "man", "red", "house", "woman", "book", "and", "river", "##s", "##ing", *".,?"]
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters[:-1]), *words]
    return BertTokenizer(vocab={entry: index for index, entry in enumerate(dict.fromkeys(entries))}, **options)


def save_head(architecture, tokenizer, directory, **fields):
    """A checkpoint of one layer, whose weights are strong enough for answers that differ; its path."""
    transformers.set_seed(0)
    model_class = getattr(vanilla_transformer, architecture)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "num_hidden_layers": 1}
    model = model_class(model_class.config_class(**sizes, **fields)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def close(found, wanted, absolute=1e-6):
    """The same structure, with numbers within float32's accuracy."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name in wanted:
            close(found[name], wanted[name], absolute)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted):
            close(one, other, absolute)
    elif isinstance(wanted, float):
        assert float(found) == pytest.approx(wanted, rel=1e-4, abs=absolute)
    else:
        assert found == wanted
