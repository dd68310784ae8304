"""The arguments of optimum's `from_pretrained`: which files are opened, and how."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime
from huggingface_hub import snapshot_download
from transformers.utils import CONFIG_NAME, cached_file, logging

from ..errors import UsageError
from ..exporting.export import export
from ..inference.export_info import MANIFEST
from ..runtime import Runtime
from .foreign import DEVICES, ForeignRuntime, Form, find_graphs
from .saving import copy_files, read_json

logger = logging.get_logger(__name__)

HUB_OPTIONS = {"revision", "token", "cache_dir", "local_files_only", "force_download"}
CHECKPOINT_OPTIONS = {*HUB_OPTIONS, "trust_remote_code"}
IGNORED = {"use_cache": True, "provider_options": None}  # and their values without a warning
OPTIONS = {*CHECKPOINT_OPTIONS, *IGNORED, "provider", "providers"}
OPTIONS |= {"session_options", "use_io_binding", "dtype"}
# configs, tokenizers and modules of sentence-transformers, beside weights or graphs
COMPANION_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.spm", "*.bpe", "[0-9]_*/*")
PROVIDERS = {**DEVICES, "AzureExecutionProvider": "cpu"}  # and their devices
THREADS = "intra_op_num_threads"


def runtime_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return device and threads for `Runtime` from the `options` of `from_pretrained`.

    Options without effect are warnings. Raises TypeError for an unknown option, and UsageError for
    an unknown provider.
    """
    if unknown := sorted(options.keys() - OPTIONS):
        raise TypeError(f"unknown {unknown}, expected some of {sorted(OPTIONS)}")
    for name, silent in IGNORED.items():
        if (value := options.get(name)) not in (None, silent):
            logger.warning(f"{name}={value} has no effect")
    provider = (options.get("providers") or [options.get("provider")])[0]
    name = provider[0] if isinstance(provider, tuple) else provider
    if name is not None and name not in PROVIDERS:
        raise UsageError(f"provider {name!r} is not supported, expected one of {[*PROVIDERS]}")
    threads = find_threads(options.get("session_options"))
    return {"device": PROVIDERS.get(name), "threads": threads}


def find_threads(session_options: Any) -> int | None:
    """Return the threads that onnxruntime's `session_options` set; anything else is a warning."""
    if session_options is None:
        return None
    default = onnxruntime.SessionOptions()
    names = [name for name in dir(default) if isinstance(getattr(default, name), int | str)]
    changed = {name for name in names if getattr(session_options, name) != getattr(default, name)}
    if ignored := sorted(changed - {THREADS, "__doc__", "__module__"}):
        logger.warning(f"session_options sets {', '.join(ignored)}, expected only {THREADS}")
    return session_options.intra_op_num_threads or None


def local_directory(model_id: str | os.PathLike, options: Mapping[str, Any]) -> Path:
    """Return the directory `model_id`, or the folder of the downloaded Hub repository.

    Weights are not downloaded. Raises OSError, as transformers does, if there is neither.
    """
    if Path(model_id).is_dir():
        return Path(model_id).resolve()
    hub = {name: options[name] for name in HUB_OPTIONS & options.keys()}
    cached_file(str(model_id), CONFIG_NAME, **hub)  # with transformers' errors
    patterns = [*COMPANION_FILES, "*.onnx*", "*.npz"]
    return Path(snapshot_download(str(model_id), allow_patterns=patterns, **hub))


def must_export(root: Path, export: bool) -> bool:
    """Return True if `root` has no graphs or `export` is True, with a warning unless both hold."""
    has_graphs = any(root.rglob("*.onnx"))
    if has_graphs and export:
        logger.warning(f"{root} has ONNX graphs and export=True: it is exported again")
    if not has_graphs and not export:
        logger.warning(f"{root} has no ONNX graphs: it is exported. Keep it with save_pretrained")
    return export or not has_graphs


def export_checkpoint(model: Any, companions: Path, target: str | None) -> TemporaryDirectory:
    """Export the torch `model` to a temporary folder, and return the folder.

    The folder `companions` has its tokenizer, image processor and modules of sentence-transformers.
    `target` is by default portable.
    """
    out = TemporaryDirectory(prefix="vanilla-transformer-")
    with TemporaryDirectory(prefix="vanilla-transformer-") as checkpoint:
        files = {path for name in COMPANION_FILES for path in companions.glob(name)}
        weights = {*companions.glob("*.index.json"), companions / MANIFEST}
        copy_files(companions, files - weights, Path(checkpoint))
        model.save_pretrained(checkpoint)
        export(checkpoint, out.name, **({} if target is None else {"target": target}))
    return out


def find_runtime(
    root: Path, subfolder: str, file_name: str | None, forms: Sequence[Form]
) -> Callable[..., Any]:
    """Return a function of threads and device that opens a `Runtime` or a `ForeignRuntime`.

    Exports have their manifest in `root` or its `subfolder`. Other repositories have graphs in the
    subfolder, see `find_graphs` for `file_name` and `forms`, and for errors.
    """
    for directory in (root / subfolder, root):
        if (directory / MANIFEST).is_file():
            return partial(Runtime, directory, dtype=find_dtype(directory, file_name))
    return partial(ForeignRuntime, root, find_graphs(root / subfolder, forms, file_name))


def find_dtype(directory: Path, file_name: str | None) -> str | None:
    """Return the dtype of the graph `file_name` of an export, `None` without a name.

    Raises FileNotFoundError if the export has no graph of that name.
    """
    if file_name is None:
        return None
    variants = read_json(directory / MANIFEST)["variants"].items()
    graphs = [(file, dtype) for dtype, variant in variants for file in variant["graphs"].values()]
    dtypes = {Path(file).name: dtype for file, dtype in graphs}
    if Path(file_name).name not in dtypes:
        raise FileNotFoundError(f"{directory} has no {file_name}, expected one of {list(dtypes)}")
    return dtypes[Path(file_name).name]
