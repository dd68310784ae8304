"""Fixtures: a small corpus, and a run on it."""

import pytest
from checkpoints import write_corpus
from training_runs import make_recipe

from vanilla_transformer.training.run import train


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """(train files, validation files)."""
    directory = tmp_path_factory.mktemp("corpus")
    return write_corpus(directory, "train", 300, seed=0), write_corpus(directory, "val", 30, seed=1)


@pytest.fixture
def unimproved(corpus):
    """A recipe of nine epochs whose run gets no better than in the first, and waits for two."""
    settings = dict(
        learning_rate=0.0, num_train_epochs=9, eval_strategy="epoch", early_stopping_patience=2
    )
    return make_recipe(
        corpus, **settings, load_best_model_at_end=True, metric_for_best_model="bleu"
    )


@pytest.fixture(scope="session")
def short(corpus, tmp_path_factory):
    """A run of three epochs, undisturbed: its directory and metrics."""
    output = tmp_path_factory.mktemp("short") / "model"
    return output, train(make_recipe(corpus), output)
