"""Fixtures: runtimes, and predictions in shards of eight lines."""

import functools

import pytest
from checkpoints import edit_json, with_words
from shards import OPTIONS

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.files.predictions import Predictions
from vanilla_transformer_export.files.run import Runner


@pytest.fixture(scope="session")
def runtime_of(exported, tmp_path_factory):
    """The name of an export -> the runtime of a copy, with a tokenizer of words; `comment` is in
    its manifest."""

    @functools.cache
    def opened(name, comment=None):
        folder = with_words(exported(name).directory, tmp_path_factory.mktemp("bulk"))
        edit_json(folder / "manifest.json", comment=comment)
        return TextRuntime(folder, threads=1)

    return opened


@pytest.fixture(scope="session")
def runtime(runtime_of):
    """The runtime of a translator."""
    return runtime_of("seq2seq")


@pytest.fixture(scope="session")
def export(runtime):
    """The directory of its export."""
    return runtime.info.directory


@pytest.fixture
def bulk(runtime_of):
    """A translation in shards of eight lines, with other settings where they are given."""

    def made(task="translate", model=("seq2seq",), options=OPTIONS, shard_lines=8, **settings):
        predictions = Predictions(runtime_of(*model), task, options if task == "translate" else {})
        return Runner(predictions, shard_lines=shard_lines, **settings)

    return made
