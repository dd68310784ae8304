"""Nothing here reaches the network, and every test starts from the same seed."""

import functools
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Each pytest-xdist worker keeps to one core: thread pools of two cores each would wait for each other.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

import pytest
import transformers
from checkpoints import Exported, build, save_and_export
from filelock import FileLock


@pytest.fixture(autouse=True)
def seed():
    transformers.set_seed(0)


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A name of `checkpoints.CHECKPOINTS` -> its model, checkpoint and export. Tests change copies of the files only."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers of one run share what the first of them made
        root = root.parent

    @functools.cache
    def make(name: str) -> Exported:
        found = Exported(build(name), root / name / "checkpoint", root / name / "export")
        with FileLock(root / f"{name}.lock"):
            if not found.directory.exists():
                save_and_export(found.model, found.checkpoint, found.directory)
        return found

    return make
