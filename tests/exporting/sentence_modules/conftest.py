"""A model of sentence-transformers."""

import pytest
from families import random_config, random_model
from sentence_models import TEXTS, embedder

from vanilla_transformer.training.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Return a function that saves a model with a tokenizer and returns its directory and width."""
    tokenizer = train_tokenizer([*TEXTS, "the book :"] * 2, 60, variant="encoder", token_types=True)

    def make(architecture="BertModel", family="bert", **fields):
        directory = tmp_path_factory.mktemp(architecture)
        config = random_config(family, architecture, 0)
        config.update({"vocab_size": len(tokenizer), **fields})
        random_model(architecture, config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return str(directory), config.hidden_size

    return make


@pytest.fixture
def saved(base, tmp_path):
    model = embedder(base())
    model.save(str(tmp_path / "theirs"))
    return tmp_path / "theirs"
