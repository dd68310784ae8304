"""Nothing here reaches the network, and every test starts from the same seed."""

import functools
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers
from checkpoints import save_and_export


@pytest.fixture(autouse=True)
def seed():
    transformers.set_seed(0)


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A name of `checkpoints.CHECKPOINTS` -> its model, checkpoint and export, made once. Not to be changed."""
    return functools.cache(lambda name: save_and_export(name, tmp_path_factory.mktemp(name)))
