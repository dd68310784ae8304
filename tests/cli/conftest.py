"""Fixtures: a corpus to train on."""

import pytest
from checkpoints import write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    return *write_corpus(directory, "train", 200, seed=0), *write_corpus(
        directory, "val", 20, seed=1
    )
