"""Tests of a wheel in an empty environment: an editable install also finds files that a wheel
lacks."""

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from vanilla_transformer_export import TextRuntime

ROOT = Path(__file__).parents[2]
CARD = ROOT / "model_cards" / "vanilla-seq2seq-tiny-multi30k-en-de"


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=1500, **options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "-w",
        folder,
        ROOT,
    )
    [path] = folder.iterdir()
    return path


@pytest.mark.slow
def test_wheel_contains_every_module_and_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for package, folder in (
        ("vanilla_transformer", "vanilla_transformer"),
        ("vanilla_transformer_export", "export"),
    ):
        for pattern in ("*.py", "*.toml", "*.sh", "*.onnx", "py.typed"):
            for path in (ROOT / folder).rglob(pattern):
                assert f"{package}/{path.relative_to(ROOT / folder).as_posix()}" in names


@pytest.mark.slow
def test_wheel_in_empty_environment_exports_and_generates(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    programs = tmp_path / "venv" / "bin"
    install = (
        programs / "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
    )
    run(
        *install,
        "torch",
        # first and alone: the pinned version has a CPU build, other versions may have none
    )
    run(*install, f"{wheel}[torch,cpu]")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1"
    }
    outside = {"cwd": tmp_path, "env": environment}
    command = programs / "vanilla-transformer"
    assert version("vanilla-transformer") in run(command, "--version", **outside)
    made = json.loads(
        run(command, "export", CARD, "out", "--target", "cpu", "--dtype", "int8", **outside)
    )
    assert made["parity"]["cases"] == 12
    text = "A dog runs across a field."
    [expected] = TextRuntime(tmp_path / "out").generate([text])
    assert expected not in ("", text)
    assert run(command, "generate", "out", text, **outside) == f"{expected}\n"
