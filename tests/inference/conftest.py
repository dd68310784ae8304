"""Fixtures: runtimes of the shared exports."""

import pytest

from vanilla_transformer_export import Runtime


@pytest.fixture(scope="session")
def runtimes(exported):
    """name -> its Runtime, loaded once."""
    loaded = {}

    def load(name):
        if name not in loaded:
            loaded[name] = Runtime(exported(name).directory)
        return loaded[name]

    return load
