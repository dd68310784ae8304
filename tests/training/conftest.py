"""Fixtures: a small corpus, and a run on it."""

import pytest
from checkpoints import write_corpus
from training_runs import make_recipe
from training_texts import STORIES

from vanilla_transformer.training import run
from vanilla_transformer.training.run import train


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Draw the curves of `short` only: a figure takes a fifth of the time of a short run."""
    monkeypatch.setattr(run, "draw_curves", lambda history, path: False)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """(train files, validation files)."""
    directory = tmp_path_factory.mktemp("corpus")
    return write_corpus(directory, "train", 150, seed=0), write_corpus(directory, "val", 12, seed=1)


@pytest.fixture
def unimproved(corpus):
    """A recipe of nine epochs whose run stops after three: the loss falls, and the largest loss is
    the best, so the first epoch stays the best."""
    settings = dict(num_train_epochs=9, eval_strategy="epoch", early_stopping_patience=2)
    best = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)
    return make_recipe(corpus, **settings, **best)


@pytest.fixture(scope="session")
def short(corpus, tmp_path_factory):
    """A run of three epochs, undisturbed: its directory and metrics."""
    output = tmp_path_factory.mktemp("short") / "model"
    return output, train(make_recipe(corpus), output)


@pytest.fixture
def documents(tmp_path):
    path = tmp_path / "documents.txt"
    path.write_text("\n\n\n".join("\n".join(document) for document in STORIES) + "\n")
    return path
