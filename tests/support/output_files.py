"""Outputs that tests write, read, and stop halfway."""

import os
import sys
from itertools import count
from pathlib import Path

import pytest
from messages import raises

from vanilla_transformer.outputs import new_directory

# Names of Python's audit events for file operations.
OPERATIONS = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.chmod",
    "os.listdir",
    "os.scandir",
)
CHECKPOINT = {
    "config.json": '{"model_type": "vanilla-encoder"}',
    "model.safetensors": "weights",
    "README.md": "card",
}
NEW = {"config.json": '{"model_type": "vanilla-decoder"}', "onnx/model.onnx": "graph"}


def write(directory: Path, contents: dict[str, str]):
    for name, text in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def read(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def save(out: Path, contents: dict[str, str], **options):
    with new_directory(out, **options) as directory:
        write(directory, contents)


def assert_rejected(error, seen, out, expected=(), **options):
    with raises(error, seen=seen, expected=expected), new_directory(out, **options):
        pytest.fail("the block must not run")


def kill_at_step(step: int, work) -> bool:
    """Run `work` in a process that is killed before its file operation number `step`.

    Return whether it was killed.
    """
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        return code == 9
    code = 1
    try:
        steps = count()

        def watch(event, _):
            if event in OPERATIONS and next(steps) == step:
                os._exit(9)

        sys.addaudithook(watch)
        work()
        code = 0
    finally:
        os._exit(code)
