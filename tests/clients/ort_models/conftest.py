"""Seeded BERT-shaped checkpoints with a tokenizer, and their exports."""

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from transformers import BertTokenizer

import vanilla_transformer
from vanilla_transformer_export import export

SIZES = dict(
    vocab_size=63,
    hidden_size=32,
    intermediate_size=40,
    num_attention_heads=4,
    num_hidden_layers=2,
    type_vocab_size=2,
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ENTRIES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ","]
ENTRIES += [*LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "dog", "house", "man"]


@dataclass(frozen=True)
class Exported:
    checkpoint: str
    directory: str


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The name of a class -> its checkpoint and its export."""

    @functools.cache
    def make(name: str, **fields) -> Exported:
        transformers.set_seed(0)
        folder = tmp_path_factory.mktemp(name)
        model_class = getattr(vanilla_transformer, name)
        model = model_class(model_class.config_class(**SIZES, **fields)).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder / "checkpoint")
        entries = {entry: index for index, entry in enumerate(ENTRIES)}
        BertTokenizer(vocab=entries, model_max_length=64).save_pretrained(folder / "checkpoint")
        export(folder / "checkpoint", folder / "export", cases=1)
        return Exported(str(folder / "checkpoint"), str(folder / "export"))

    return make


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sentences")
