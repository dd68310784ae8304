"""What is installed, what onnxruntime can run on, and what to do where CUDA was asked for and is
not what runs."""

import contextlib
import ctypes
import importlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

from .processor import Processor

# Older ones fail in the cpu target's graphs, up to 1.26 by ending the process.
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
# What the CUDA provider of onnxruntime 1.31 loads: the libraries of CUDA 13 and cuDNN 9.
LIBRARIES = (
    "libcudart.so.13",
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcufft.so.12",
    "libcudnn.so.9",
)
WITH_LIBRARIES = "pip install 'onnxruntime-gpu[cuda,cudnn]'"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
# that decide how integers are multiplied
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni")


def require_onnxruntime() -> None:
    """Checks the version of onnxruntime, before any graph is loaded.

    Raises:
        ImportError: naming the one that was found, if it is older than `ONNXRUNTIME`.
    """
    if problem := onnxruntime_problem():
        raise ImportError(problem)


def require(device: str) -> None:
    """Checks that `device`, `"cuda"` or `"tensorrt"`, can be asked for.

    Raises:
        OSError: saying what was found, and the one command that mends it.
    """
    if problem := facts()[f"{device}_problem"]:
        raise OSError(problem)


def require_running(provider: str, running: list[str]) -> None:
    """Checks that `provider` is among those `running` a session: onnxruntime falls back to others
    with a warning.

    Raises:
        OSError: naming those that do run it.
    """
    if provider not in running:
        said = "its warning says why; look at: vanilla-transformer doctor"
        raise OSError(f"{provider} was asked for and onnxruntime fell back to {running}, {said}")


def facts() -> dict:
    """What `vanilla-transformer doctor` prints; `onnxruntime_problem` is `None` where onnxruntime
    is new enough or not there, `cuda_problem` where CUDA can be used, and `tensorrt_problem` where
    TensorRT can be asked for: whether its libraries are there is known once a session has it."""
    available = providers()
    if CUDA in available:
        preload()
    here = Processor.here()
    found = {
        "python": platform.python_version(),
        "packages": installed(),
        "threads": processors(),
        "processor": here.name,
        "instructions": sorted(here.instructions.intersection(INSTRUCTIONS)),
        "providers": available,
        "onnxruntime_problem": onnxruntime_problem(),
        "libraries": [name for name in LIBRARIES if loads(name)],
        "gpu": gpu(),
    }
    return {
        **found,
        "cuda_problem": cuda_problem(found),
        "tensorrt_problem": tensorrt_problem(found),
    }


def onnxruntime_problem() -> str | None:
    """Why the installed onnxruntime cannot be used, and the one command that mends it."""
    try:
        from onnxruntime import __version__ as found
    except ImportError:
        return None
    if tuple(map(int, found.split(".")[:2])) >= ONNXRUNTIME:
        return None
    name = "onnxruntime-gpu" if "onnxruntime-gpu" in installed() else "onnxruntime"
    lowest = ".".join(map(str, ONNXRUNTIME))
    return (
        f"{name} {found} is too old for these graphs, expected {lowest} or newer: pip install "
        f"'{name}>={lowest}'"
    )


def cuda_problem(found: dict) -> str | None:
    """Why CUDA cannot be used where `facts` are those, and the one command that mends it."""
    packages = found["packages"]
    missing = [name for name in LIBRARIES if name not in found["libraries"]]
    if "onnxruntime" in packages and "onnxruntime-gpu" in packages:
        versions = (
            f"onnxruntime {packages['onnxruntime']} and onnxruntime-gpu "
            f"{packages['onnxruntime-gpu']}"
        )
        return (
            f"{versions} are both installed, and one has overwritten files of the other: {ONLY_GPU}"
        )
    if found["onnxruntime_problem"]:
        return found["onnxruntime_problem"]
    if CUDA not in found["providers"]:
        return f"this onnxruntime has no CUDA, its providers are {found['providers']}: {ONLY_GPU}"
    if found["gpu"] is None:
        return "there is no NVIDIA GPU or no driver, `nvidia-smi -L` must list one"
    if missing:
        return f"libraries of CUDA or cuDNN are missing, {', '.join(missing)}: {WITH_LIBRARIES}"
    return None


def tensorrt_problem(found: dict) -> str | None:
    """As `cuda_problem`, which TensorRT needs."""
    problem = cuda_problem(found)
    if problem or TENSORRT in found["providers"]:
        return problem
    return (
        f"this onnxruntime has no TensorRT, its providers are {found['providers']}: use CUDA alone"
    )


def installed() -> dict[str, str]:
    """Versions of those of `PACKAGES` that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def processors() -> int:
    """How many this process may use, or where the system does not say, on macOS and Windows, how
    many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def providers() -> list[str]:
    """Those the installed onnxruntime was built with; none without onnxruntime."""
    try:
        import onnxruntime
    except ImportError:
        return []
    return onnxruntime.get_available_providers()


def preload() -> None:
    """Libraries of CUDA that were installed with pip, torch's too, are found by loading them
    first."""
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    with contextlib.suppress(ImportError):
        importlib.import_module("tensorrt_libs")  # TensorRT's, where it was installed with pip


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def gpu() -> str | None:
    """Name, driver and memory, from `nvidia-smi`; `None` without a GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip().replace("\n", "; ") or None if found.returncode == 0 else None
