"""Nothing here reaches the network, and every test starts from the same seed."""

import functools
import gc
import os
import random
import ssl

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Each pytest-xdist worker keeps to one core: thread pools of two cores each would wait for each
# other.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

import hypothesis
import numpy as np
import pytest
from filelock import FileLock

# A million objects are made before the first test, and they stay: to look at them again and again
# takes a tenth of all time.
gc.disable()

# Clients of HTTP share a context: each would read all certificates again, in 30 ms.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# The same examples each time in `make test`; many others, and new ones, in `make test-all`.
hypothesis.settings.register_profile("default", max_examples=50, deadline=None, derandomize=True)
hypothesis.settings.register_profile("long", max_examples=2000, deadline=None)
hypothesis.settings.load_profile("default")


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 5)
    gc.enable()


# Packages are imported inside the fixtures: the process that hands tests to the workers needs none.
# `set_seed` of transformers takes 100 times as long, because torch notes the stack for each GPU
# library that is not loaded yet.
@pytest.fixture(autouse=True)
def seed():
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def quick_checkpoints():
    """Save and load checkpoints in three quarters of the time, with the same result.

    Weights on the meta device, which have no values, get no first ones; and the imports of a file
    of code, which each saved checkpoint has, are searched once.
    """
    import torch
    from transformers import dynamic_module_utils

    for layer in (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm):
        layer.reset_parameters = skip_meta(layer.reset_parameters)
    dynamic_module_utils.get_relative_imports = once_for_each_version(
        dynamic_module_utils.get_relative_imports
    )


def skip_meta(reset_parameters):
    return lambda layer: None if layer.weight.is_meta else reset_parameters(layer)


def once_for_each_version(find_imports):
    @functools.cache
    def find(path, changed):
        return find_imports(path)

    return lambda path: find(path, os.stat(path).st_mtime_ns)


@pytest.fixture(scope="session")
def shared_root(tmp_path_factory):
    """A directory for what the workers of one run share: the first that needs it makes it."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@pytest.fixture(scope="session")
def exported(shared_root):
    """A name of `checkpoints.CHECKPOINTS` -> its model, checkpoint and export. Tests change copies
    of the files only."""
    from checkpoints import Exported, build, save_and_export

    @functools.cache
    def make(name: str) -> Exported:
        found = Exported(
            build(name), shared_root / name / "checkpoint", shared_root / name / "export"
        )
        with FileLock(shared_root / f"{name}.lock"):
            if not found.directory.exists():
                save_and_export(found.model, found.checkpoint, found.directory)
        return found

    return make


@pytest.fixture(scope="session")
def exported_for(shared_root):
    """A name of `targets.MODELS`, a target and a dtype -> the model, and the directory of its
    export."""
    from targets import build

    from vanilla_transformer_export import export

    @functools.cache
    def make(name: str, target: str, dtype: str = "fp32"):
        model, directory = build(name), shared_root / f"{name}-{target}-{dtype}"
        with FileLock(f"{directory}.lock"):
            if not directory.exists():
                model.save_pretrained(f"{directory}-checkpoint")
                export(f"{directory}-checkpoint", directory, cases=3, target=target, dtype=dtype)
        return model, directory

    return make
