"""What is installed, what onnxruntime can run on, and what to do where CUDA was asked for and is not what runs."""

import ctypes
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("vanilla-transformer", "numpy", "tokenizers", "onnxruntime", "onnxruntime-gpu", "torch", "transformers", "onnx")
ONLY_GPU = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
# What the CUDA provider of onnxruntime 1.31 loads: the libraries of CUDA 13 and cuDNN 9.
LIBRARIES = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcufft.so.12", "libcudnn.so.9")
WITH_LIBRARIES = "pip install 'onnxruntime-gpu[cuda,cudnn]'"
CUDA = "CUDAExecutionProvider"


def require_cuda(running: list[str] | None = None) -> None:
    """Checks that CUDA can be asked for, and with `running`, the providers of a session, that it is what the session has:
    onnxruntime falls back to the CPU with a warning.

    Raises:
        OSError: saying what was found, and the one command that mends it.
    """
    found = installed()
    if "onnxruntime" in found and "onnxruntime-gpu" in found:
        versions = f"onnxruntime {found['onnxruntime']} and onnxruntime-gpu {found['onnxruntime-gpu']}"
        raise OSError(f"{versions} are both installed, and one has overwritten files of the other: {ONLY_GPU}")
    if CUDA not in (available := providers()):
        raise OSError(f"this onnxruntime has no CUDA, its providers are {available}: {ONLY_GPU}")
    preload()
    if gpu() is None:
        raise OSError("there is no NVIDIA GPU or no driver, `nvidia-smi -L` must list one; for the CPU: --target cpu")
    if missing := [name for name in LIBRARIES if not loads(name)]:
        raise OSError(f"libraries of CUDA or cuDNN are missing, {', '.join(missing)}: {WITH_LIBRARIES}")
    if running is not None and CUDA not in running:
        raise OSError(f"onnxruntime fell back to {running}, its warning says why; look at: vanilla-transformer doctor")


def installed() -> dict[str, str]:
    """Versions of those of `PACKAGES` that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def providers() -> list[str]:
    """Those the installed onnxruntime was built with; none without onnxruntime."""
    try:
        import onnxruntime
    except ImportError:
        return []
    return onnxruntime.get_available_providers()


def preload() -> None:
    """Libraries of CUDA that were installed with pip, torch's too, are found by loading them first."""
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()


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


def facts() -> dict:
    """What `vanilla-transformer doctor` prints; `cuda_problem` is `None` where CUDA can be used."""
    available = providers()
    if CUDA in available:
        preload()
    try:
        require_cuda()
        problem = None
    except OSError as error:
        problem = str(error)
    return {
        "python": platform.python_version(),
        "packages": installed(),
        "threads": len(os.sched_getaffinity(0)),
        "providers": available,
        "libraries": [name for name in LIBRARIES if loads(name)],
        "gpu": gpu(),
        "cuda_problem": problem,
    }


def report(found: dict) -> str:
    """`facts` in lines, and what each target runs on."""
    lines = [f"python       {found['python']}"]
    lines += [f"{name:<12} {number}" for name, number in found["packages"].items()]
    lines += [f"providers    {', '.join(found['providers']) or 'none: onnxruntime is not installed'}"]
    lines += [f"libraries    {', '.join(found['libraries']) or 'none of ' + ', '.join(LIBRARIES)}"]
    lines += [f"gpu          {found['gpu'] or 'none'}"]
    if found["providers"]:
        lines += [f"targets portable and cpu run on the CPU, with {found['threads']} threads"]
    else:
        lines += ["no target runs: pip install 'vanilla-transformer[cpu]', or [gpu] for CUDA"]
    lines += [f"target cuda does not run: {found['cuda_problem']}" if found["cuda_problem"] else "target cuda runs on the GPU"]
    return "\n".join(lines)
