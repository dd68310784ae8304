"""Tests of where onnxruntime and CUDA's libraries are found: several folders, and one folder that
two packages were installed into."""

import base64
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from messages import check_message

from vanilla_transformer_export.inference import devices

MODULE = "__version__ = {version!r}\nget_available_providers = lambda: {providers!r}\n"
PROVIDERS = {
    "onnxruntime": ["CPUExecutionProvider"],
    "onnxruntime-gpu": ["CUDAExecutionProvider", "CPUExecutionProvider"],
}
GPU = ("NVIDIA H200", "580.65.06", "143771 MiB", "9.0")
PROBLEM = f"""
from vanilla_transformer_export.inference import devices
devices.load = lambda name: None
devices.gpus = lambda: [devices.Gpu(*{GPU})]
print(devices.onnxruntime_problem() or devices.cuda_problem(devices.facts()))
"""


def install(folder, name, version, libraries="a"):
    """Install a made-up onnxruntime as pip does: its files, and a RECORD with their sizes. Files
    that are there are overwritten."""
    files = {
        "onnxruntime/__init__.py": MODULE.format(version=version, providers=PROVIDERS[name]),
        "onnxruntime/capi/state.so": libraries * (100 + len(name)),
    }
    lines = []
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest())
        lines.append(f"{path},sha256={digest.decode().rstrip('=')},{len(content)}")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,"]) + "\n")


def problem(*folders):
    """Return the problem of CUDA in a process that finds onnxruntime in `folders`."""
    path = os.pathsep.join([*map(str, folders), *map(str, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", PROBLEM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_two_onnxruntimes_in_two_folders_are_whole(tmp_path):
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    install(cpu, "onnxruntime", "1.32.0")
    install(gpu, "onnxruntime-gpu", "1.31.1")
    assert "libcuda" in problem(gpu, cpu)  # what the check of the driver says comes next
    expected = ("CPUExecutionProvider", "pip install onnxruntime-gpu")
    check_message(problem(cpu, gpu), seen=("no CUDA", str(cpu)), expected=expected)


@pytest.mark.parametrize(
    "order, is_refused",
    [(("onnxruntime-gpu", "onnxruntime"), True), (("onnxruntime", "onnxruntime-gpu"), False)],
)
def test_two_onnxruntimes_in_one_folder_are_refused_if_files_were_overwritten(
    tmp_path, order, is_refused
):
    for name in order:
        install(tmp_path, name, "1.31.1")
    message = problem(tmp_path)
    assert ("overwritten" in message) == is_refused, message
    if is_refused:
        versions = ("onnxruntime 1.31.1 and onnxruntime-gpu 1.31.1", str(tmp_path))
        check_message(message, seen=versions, expected="pip uninstall -y")


def test_error_of_an_old_version_names_the_package_that_is_imported(tmp_path):
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    install(cpu, "onnxruntime", "1.29.0")
    install(gpu, "onnxruntime-gpu", "1.31.1")
    check_message(problem(cpu, gpu), seen="onnxruntime 1.29.0", expected="'onnxruntime>=1.30'")


@pytest.fixture
def library(tmp_path):
    """The path of a shared library in a folder like that of one of NVIDIA's wheels."""
    path = tmp_path / "nvidia/cu13/lib/libmade_up_for_a_test.so.13"
    path.parent.mkdir(parents=True)
    soname = f"-Wl,-soname,{path.name}"
    command = ["cc", "-shared", "-fPIC", soname, "-x", "c", "-", "-o", path]
    subprocess.run(command, input="int made_up(void) { return 7; }", text=True, check=True)
    return path


def test_libraries_are_loaded_from_wheels_in_all_folders(tmp_path, library, monkeypatch):
    assert devices.load(library.name) is None
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert devices.load(library.name) == str(library)
    # a loaded library is found by its name, as onnxruntime looks for it
    assert devices.load(library.name) == library.name


def test_file_that_is_no_library_is_not_loaded(tmp_path, monkeypatch):
    path = Path(tmp_path, "nvidia/cudnn/lib/libnothing_of_a_test.so.9")
    path.parent.mkdir(parents=True)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert devices.load(path.name) is None
