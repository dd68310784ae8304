"""Checks of installed packages and devices, with instructions for missing CUDA support."""

import contextlib
import ctypes
import functools
import importlib
import io
import itertools
import math
import os
import platform
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from .cpu_quota import cpu_quota

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
# Libraries of CUDA 13 that the CUDA provider of onnxruntime 1.31 is linked with, each after those
# that it needs itself.
LIBRARIES = ("libcublasLt.so.13", "libcublas.so.13", "libcudart.so.13", "libcurand.so.10")
DRIVER = "libcuda.so.1"  # which the provider is linked with too
CUDNN = "libcudnn.so.9"  # which the provider opens when a graph, such as beam search, first uses it
MIN_DRIVER = 580  # major version, for CUDA 13
CUDA_MAJORS = (8, 9, 12)  # compute capabilities with kernels in onnxruntime-gpu 1.31; also 7.5
GPU_FIELDS = ("name", "driver_version", "memory.total", "compute_cap")
WITH_LIBRARIES = "pip install 'onnxruntime-gpu[cuda,cudnn]'"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
CPUINFO = Path("/proc/cpuinfo")
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
        hint = "its own message on standard error has the reason"
        raise OSError(f"onnxruntime runs on {running}, expected {provider}: {hint}")


def facts() -> dict:
    """Return the facts that `vanilla-transformer doctor` prints.

    The keys are python, packages, threads, cpus, cpu_quota, processor, instructions, providers,
    onnxruntime_problem, libraries, gpus, cuda_problem and tensorrt_problem. `threads` is the
    default number of threads, `cpus` the CPUs that this process may run on, and `cpu_quota` the
    limit of its control groups, or None. `libraries` has the place of each library of
    CUDA that can be loaded, by name. `onnxruntime_problem` is None if onnxruntime is new enough or
    not installed. `cuda_problem` is None if CUDA is available. `tensorrt_problem` is None if
    onnxruntime has TensorRT, whose libraries are only loaded by a session.
    """
    available = providers()
    if CUDA in available:
        preload()
    processor, instructions = cpu_facts()
    report = {
        "python": platform.python_version(),
        "packages": installed_versions(),
        "threads": available_cpus(),
        "cpus": visible_cpus(),
        "cpu_quota": cpu_quota(),
        "processor": processor,
        "instructions": sorted(instructions.intersection(INSTRUCTIONS)),
        "providers": available,
        "onnxruntime_problem": onnxruntime_problem(),
        "libraries": {
            name: place for name in (*LIBRARIES, CUDNN, DRIVER) if (place := load(name)) is not None
        },
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
    name = "onnxruntime-gpu" if "onnxruntime-gpu" in imported_onnxruntime() else "onnxruntime"
    lowest = ".".join(map(str, ONNXRUNTIME))
    return (
        f"{name} {installed_version} is too old for these graphs, expected {lowest} or newer: "
        f"pip install '{name}>={lowest}'"
    )


def cuda_problem(report: dict) -> str | None:
    """Return an error with a remedy if CUDA cannot be used according to the facts `report`, else
    `None`."""
    if not report["gpus"]:  # then nothing needs onnxruntime-gpu
        return (
            f"`nvidia-smi` lists no GPU for CUDA, expected one with a driver from {MIN_DRIVER} on: "
            "install the driver, give a container the GPU, or run on the CPU"
        )
    if problem := overwritten_problem() or report["onnxruntime_problem"]:
        return problem
    if CUDA not in report["providers"]:
        imported = f"onnxruntime in {onnxruntime_folder()} has no CUDA"
        return f"{imported}, its providers are {report['providers']}: {ONLY_GPU}"
    if problem := gpu_problem(Gpu(**report["gpus"][0])):
        return problem
    if DRIVER not in report["libraries"]:
        return (
            f"{DRIVER} of the driver cannot be loaded, expected the library beside `nvidia-smi`: "
            "add its folder to LD_LIBRARY_PATH, or give a container "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    if missing := [name for name in LIBRARIES if name not in report["libraries"]]:
        return f"libraries of CUDA are missing, {', '.join(missing)}: {WITH_LIBRARIES}"
    if CUDNN not in report["libraries"]:
        return (
            f"{CUDNN} is missing, which onnxruntime opens only when beam search or another graph "
            f"first uses it: {WITH_LIBRARIES}"
        )
    return None


def overwritten_problem() -> str | None:
    """Return an error with a remedy if onnxruntime has overwritten files of onnxruntime-gpu in the
    folder that is imported, else None."""
    packages = imported_onnxruntime()
    if len(packages) < 2 or is_whole(packages["onnxruntime-gpu"]):
        return None
    versions = " and ".join(f"{name} {packages[name].version}" for name in sorted(packages))
    return (
        f"{versions} are both installed in {onnxruntime_folder()}, and one has overwritten files "
        f"of the other: {ONLY_GPU}"
    )


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


def onnxruntime_folder() -> Path | None:
    """Return the folder that `import onnxruntime` finds its package in, or None without one."""
    spec = find_spec("onnxruntime")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def imported_onnxruntime() -> dict[str, Distribution]:
    """Return {name: distribution} of the onnxruntime packages that were installed into the folder
    that is imported. Those in other folders of `sys.path` do not count."""
    folder = onnxruntime_folder()
    installed = () if folder is None else distributions(path=[str(folder)])
    by_name = {package.metadata["Name"]: package for package in installed}
    return {name: by_name[name] for name in ("onnxruntime", "onnxruntime-gpu") if name in by_name}


def is_whole(distribution: Distribution) -> bool:
    """Return True if all modules and libraries of `distribution` have the sizes that its RECORD
    lists."""
    files = [file for file in distribution.files or () if file.suffix in (".py", ".so", ".pyd")]
    sizes = [(file.size, Path(str(file.locate()))) for file in files]
    return bool(sizes) and all(
        path.is_file() and path.stat().st_size == size for size, path in sizes
    )


def cpu_facts() -> tuple[str, set[str]]:
    """Return the name of this machine's CPU, and the Linux names of its instructions, none if they
    are unknown."""
    try:
        first = CPUINFO.read_text().split("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine(), set()
    pairs = (line.partition(":") for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    kind = [f"{name} {facts[name]}" for name in ("cpu family", "model") if name in facts]
    name = ", ".join([facts.get("model name") or platform.machine(), *kind])
    return name, set(facts.get("flags", "").split())


def visible_cpus() -> int:
    """Return on how many CPUs this process may run. On macOS and Windows, count all CPUs."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def level2_cache(root: Path = Path("/")) -> float:
    """Return the bytes of a core's level 2 cache, or infinity if the system does not say. `root`
    has the folder sys."""
    try:
        size = (root / "sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(size.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return math.inf


def available_cpus() -> int:
    """Return how many threads this process can keep busy: `visible_cpus`, or its CPU quota if that
    is smaller.

    A quota is rounded down, but not below 1. With 3 threads for 2.5 CPUs, all of them would stand
    still at the end of each period. The remainder is for tokenization and HTTP.
    """
    quota = cpu_quota()
    return visible_cpus() if quota is None else max(1, min(visible_cpus(), int(quota)))


def providers() -> list[str]:
    """Return the providers of the installed onnxruntime, or an empty list without onnxruntime."""
    try:
        import onnxruntime
    except ImportError:
        return []
    return onnxruntime.get_available_providers()


def preload() -> None:
    """Load CUDA libraries that were installed with pip beside onnxruntime, so that it finds them.

    It needs onnxruntime. Missing libraries are no error: `load` looks for them in other folders.
    """
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()
    with contextlib.suppress(ImportError):
        # loads TensorRT's libraries if they were installed with pip
        importlib.import_module("tensorrt_libs")


def load(library: str) -> str | None:
    """Load `library`, so that onnxruntime finds it, and return its place. Return None if there is
    none.

    The place is `library` itself if it was loaded before, or if the system's loader finds it. Else
    it is the path in NVIDIA's wheels, which torch depends on, such as `nvidia/cu13/lib/NAME` and
    `nvidia/cudnn/lib/NAME` in a folder of `sys.path`.
    """
    in_wheels = (
        path for folder in sys.path for path in Path(folder, "nvidia").glob(f"*/lib/{library}")
    )
    for place in itertools.chain([library], in_wheels):
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(place))
            return str(place)
    return None


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
