"""Checks of installed packages and devices, with instructions for missing CUDA support."""

import contextlib
import ctypes
import importlib
import io
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from .cpu_info import CpuInfo

# Older versions fail in the cpu target's graphs; versions up to 1.26 crash the process.
ONNXRUNTIME = (1, 30)
PACKAGES = (
    "vanilla-transformer",
    "numpy",
    "tokenizers",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "transformers",
    "onnx",
)
ONLY_GPU = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
# Libraries of CUDA 13 and cuDNN 9 that the CUDA provider of onnxruntime 1.31 loads.
LIBRARIES = (
    "libcudart.so.13",
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcurand.so.10",
    "libcudnn.so.9",
)
MIN_DRIVER = 580  # major version, for CUDA 13
CUDA_MAJORS = (8, 9, 12)  # compute capabilities with kernels in onnxruntime-gpu 1.31; also 7.5
GPU_FIELDS = ("name", "driver_version", "memory.total", "compute_cap")
WITH_LIBRARIES = "pip install 'onnxruntime-gpu[cuda,cudnn]'"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
# instructions that select the integer matmul kernels
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni")


class Gpu(NamedTuple):
    """A GPU, in the words of `nvidia-smi`."""

    name: str
    driver: str
    memory: str
    compute_capability: str


def require_onnxruntime() -> None:
    """Check the version of onnxruntime before any graph is loaded, if it is installed.

    Raises:
        ImportError: if the installed version is older than `ONNXRUNTIME`.
    """
    if problem := onnxruntime_problem():
        raise ImportError(problem)


def require(device: str, activations: str = "fp32") -> None:
    """Check that CUDA or TensorRT can be used, and computes `activations`, such as "bf16".

    `device` is "cuda" or "tensorrt".

    Raises:
        OSError: with the problem and the command that fixes it.
    """
    report = facts()
    if problem := report[f"{device}_problem"]:
        raise OSError(problem)
    if activations == "bf16":
        for gpu in report["gpus"]:
            check_bfloat16(Gpu(**gpu))


def require_running(provider: str, running: list[str]) -> None:
    """Check that `provider` is among the providers `running` in a session. onnxruntime falls back
    to others with only a warning.

    Raises:
        OSError: if `provider` is missing, with the running providers.
    """
    if provider not in running:
        hint = "see its warning and `vanilla-transformer doctor`"
        raise OSError(f"onnxruntime runs on {running}, expected {provider}: {hint}")


def facts() -> dict:
    """Return the facts that `vanilla-transformer doctor` prints.

    The keys are python, packages, threads, processor, instructions, providers, onnxruntime_problem,
    libraries, gpus, cuda_problem and tensorrt_problem. `onnxruntime_problem` is None if onnxruntime
    is new enough or not installed. `cuda_problem` is None if CUDA is available. `tensorrt_problem`
    is None if onnxruntime has TensorRT, whose libraries are only loaded by a session.
    """
    available = providers()
    if CUDA in available:
        preload()
    cpu = CpuInfo.detect()
    report = {
        "python": platform.python_version(),
        "packages": installed_versions(),
        "threads": available_cpus(),
        "processor": cpu.name,
        "instructions": sorted(cpu.instructions.intersection(INSTRUCTIONS)),
        "providers": available,
        "onnxruntime_problem": onnxruntime_problem(),
        "libraries": [name for name in LIBRARIES if loads(name)],
        "gpus": [gpu._asdict() for gpu in gpus()],
    }
    return {
        **report,
        "cuda_problem": cuda_problem(report),
        "tensorrt_problem": tensorrt_problem(report),
    }


def onnxruntime_problem() -> str | None:
    """Return an error if the installed onnxruntime is too old, with the command that upgrades it.

    It is None if onnxruntime is new enough or not installed.
    """
    try:
        from onnxruntime import __version__ as installed_version
    except ImportError:
        return None
    if tuple(map(int, installed_version.split(".")[:2])) >= ONNXRUNTIME:
        return None
    name = "onnxruntime-gpu" if "onnxruntime-gpu" in installed_versions() else "onnxruntime"
    lowest = ".".join(map(str, ONNXRUNTIME))
    return (
        f"{name} {installed_version} is too old for these graphs, expected {lowest} or newer: "
        f"pip install '{name}>={lowest}'"
    )


def cuda_problem(report: dict) -> str | None:
    """Return an error with a remedy if CUDA cannot be used according to the facts `report`, else
    `None`."""
    packages = report["packages"]
    missing = [name for name in LIBRARIES if name not in report["libraries"]]
    if "onnxruntime" in packages and "onnxruntime-gpu" in packages:
        versions = (
            f"onnxruntime {packages['onnxruntime']} and onnxruntime-gpu "
            f"{packages['onnxruntime-gpu']}"
        )
        return (
            f"{versions} are both installed, and one has overwritten files of the other: {ONLY_GPU}"
        )
    if report["onnxruntime_problem"]:
        return report["onnxruntime_problem"]
    if CUDA not in report["providers"]:
        return f"this onnxruntime has no CUDA, its providers are {report['providers']}: {ONLY_GPU}"
    if not report["gpus"]:
        return (
            f"`nvidia-smi` lists no GPU, expected one with a driver from {MIN_DRIVER} on: install "
            "the driver, give a container the GPU, or run on the CPU"
        )
    if problem := gpu_problem(Gpu(**report["gpus"][0])):
        return problem
    if missing:
        return f"libraries of CUDA or cuDNN are missing, {', '.join(missing)}: {WITH_LIBRARIES}"
    return None


def tensorrt_problem(report: dict) -> str | None:
    """Return an error with a remedy if TensorRT cannot be used according to the facts `report`,
    else None.

    TensorRT needs CUDA.
    """
    problem = cuda_problem(report)
    if problem or TENSORRT in report["providers"]:
        return problem
    return (
        f"this onnxruntime has no TensorRT, its providers are {report['providers']}: use CUDA alone"
    )


def installed_versions() -> dict[str, str]:
    """Return {package: version} of those of `PACKAGES` that are installed."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def available_cpus() -> int:
    """Return how many CPUs this process may use. On macOS and Windows, count all CPUs."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def providers() -> list[str]:
    """Return the providers of the installed onnxruntime, or an empty list without onnxruntime."""
    try:
        import onnxruntime
    except ImportError:
        return []
    return onnxruntime.get_available_providers()


def preload() -> None:
    """Load CUDA libraries that were installed with pip, including torch's, so that onnxruntime
    finds them.

    It needs onnxruntime. Missing libraries are no error: `cuda_problem` lists them.
    """
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()
    with contextlib.suppress(ImportError):
        # loads TensorRT's libraries if they were installed with pip
        importlib.import_module("tensorrt_libs")


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def gpus() -> list[Gpu]:
    """Return the GPUs that `nvidia-smi` lists; none if it cannot be run."""
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        result = subprocess.run(
            query, capture_output=True, encoding="utf-8", errors="replace", timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in result.stdout.splitlines()]
    return [Gpu(*row) for row in rows if len(row) == len(GPU_FIELDS)]


def gpu_problem(gpu: Gpu) -> str | None:
    """Return why the CUDA provider cannot use `gpu`, or None if it can."""
    driver, capability = version_numbers(gpu.driver), version_numbers(gpu.compute_capability)
    if driver and driver < (MIN_DRIVER,):
        return (
            f"the driver of {gpu.name} is {gpu.driver}, expected {MIN_DRIVER} or newer for "
            "CUDA 13: update the driver"
        )
    if capability and capability[0] not in CUDA_MAJORS and capability != (7, 5):
        return (
            f"{gpu.name} has compute capability {gpu.compute_capability}, expected 7.5, 8.x, 9.x "
            "or 12.x, for which onnxruntime-gpu has kernels: use another GPU, or run on the CPU"
        )
    return None


def check_bfloat16(gpu: Gpu) -> None:
    """Raise OSError if `gpu` has no bfloat16. A GPU of unknown compute capability passes."""
    capability = version_numbers(gpu.compute_capability)
    if capability and capability < (8,):
        raise OSError(
            f"{gpu.name} has compute capability {gpu.compute_capability}, expected 8.0 or newer "
            "for bf16: export with --dtype fp16 or fp32"
        )


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as (580, 65) for "580.65", or () if it has other
    parts."""
    parts = text.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()
