"""Tests of both packages without names that only Linux has, which are removed before import."""

import importlib
import os
import subprocess
import sys
from collections import namedtuple

import numpy as np
import psutil
import pytest
import torch
from checkpoints import START

from vanilla_transformer.training import dry_run
from vanilla_transformer_export import Runtime
from vanilla_transformer_export.inference import devices

# Other packages depend on the system they were built for, so they are imported first. The generated
# tokens are printed as JSON.
ELSEWHERE = """
import importlib, json, numpy, onnxruntime, os, pkgutil, signal, sys, tokenizers
for name in sys.argv[1].split():
    importlib.import_module(name)
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in (
    "chown", "fchmod", "fork", "geteuid", "getpgid", "getuid", "killpg", "mkfifo",
    "sched_getaffinity", "sched_setaffinity", "setsid", "sysconf", "uname",
):
    delattr(os, name)
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1"):
    delattr(signal, name)
for package in sys.argv[2].split():
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, package + "."):
        importlib.import_module(module.name)
from vanilla_transformer_export.cli import doctor
from vanilla_transformer_export.inference import devices
from vanilla_transformer_export import Runtime
runtime = Runtime(sys.argv[3])
tokens = runtime.generate(numpy.array(json.loads(sys.argv[4])), max_new_tokens=5)
assert doctor.report(devices.facts())
print(json.dumps([runtime.threads, tokens.tolist()]))
"""
WITH_ALL = (
    "accelerate datasets matplotlib.pyplot onnx onnx_ir sacrebleu transformers.trainer uvloop"
)


@pytest.mark.parametrize(
    "others, packages",
    [
        ("", ""),
        pytest.param(
            WITH_ALL, "vanilla_transformer vanilla_transformer_export", marks=pytest.mark.slow
        ),
    ],
    ids=["runtime", "all modules"],
)
def test_packages_run_without_names_that_only_linux_has(exported, others, packages):
    directory, prompt = exported("seq2seq").directory, [[5, 9, START]]
    command = [sys.executable, "-c", ELSEWHERE, others, packages, str(directory), str(prompt)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = Runtime(directory).generate(np.array(prompt), max_new_tokens=5).tolist()
    assert done.stdout.strip() == str([os.cpu_count(), expected])


def test_default_threads_are_cpus_available_to_process(exported, monkeypatch):
    monkeypatch.setattr(devices, "cpu_quota", lambda: None)
    assert Runtime(exported("encoder").directory).threads == len(os.sched_getaffinity(0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the peak is that of the GPU")
def test_peak_memory_without_resource_is_peak_working_set(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    memory = namedtuple("pmem", "rss peak_wset")(3_000, 5_000)
    monkeypatch.setattr(
        psutil, "Process", lambda: namedtuple("Process", "memory_info")(lambda: memory)
    )
    assert importlib.reload(dry_run).peak_memory() == 5_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="the peak is that of the GPU")
@pytest.mark.parametrize("platform, unit", [("linux", 1024), ("darwin", 1)])
def test_peak_memory_is_in_bytes(monkeypatch, platform, unit):
    """Linux counts in kilobytes, macOS in bytes."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrusage", lambda who: namedtuple("rusage", "ru_maxrss")(7_000))
    monkeypatch.setattr(sys, "platform", platform)
    assert dry_run.peak_memory() == 7_000 * unit
