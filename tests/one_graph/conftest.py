"""Exports with one graph that generates."""

import pytest
from one_graphs import Generator

from vanilla_transformer_export import export


@pytest.fixture(scope="session")
def generator(exported, tmp_path_factory):
    made = {}

    def make(mode, target="portable", name="seq2seq"):
        if (mode, target, name) not in made:
            out = tmp_path_factory.mktemp("one") / "export"
            export(exported(name).checkpoint, out, cases=1, target=target, generate=mode)
            made[mode, target, name] = Generator(out, exported(name).directory, mode)
        return made[mode, target, name]

    return make
