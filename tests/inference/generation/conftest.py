"""Fixtures: models in torch with their loaded exports."""

import functools

import pytest
from generation_pairs import CPU_MODELS, Pair, build

from vanilla_transformer_export import Runtime, export


@pytest.fixture(scope="session")
def pairs(exported, tmp_path_factory):
    """A name of `MODELS` -> its `Pair`."""
    root = tmp_path_factory.mktemp("options")

    @functools.cache
    def make(name):
        if name not in CPU_MODELS:
            return Pair(exported(name).model, exported(name).directory)
        build(name).save_pretrained(root / name)
        export(root / name, root / "export" / name, cases=1, target="cpu")
        return Pair(build(name), root / "export" / name)

    return make


@pytest.fixture
def pair(pairs, name):
    return pairs(name)


@pytest.fixture(scope="session")
def on_each_target(exported_for):
    """A kind of `targets.MODELS` -> its runtimes for the portable, cpu and cuda target, on the
    CPU."""

    @functools.cache
    def load(kind):
        return [
            Runtime(exported_for(kind, target)[1], device="cpu")
            for target in ("portable", "cpu", "cuda")
        ]

    return load
