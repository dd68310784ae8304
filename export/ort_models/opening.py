"""The arguments of optimum's `from_pretrained`: they choose an export and the arguments of
`Runtime`."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime
from huggingface_hub import snapshot_download
from transformers.utils import CONFIG_NAME, cached_file, logging

from ..errors import UsageError
from ..exporting.export import export
from ..inference.devices import CUDA, TENSORRT
from ..inference.export_info import MANIFEST
from .foreign import ForeignGraph

logger = logging.get_logger(__name__)

HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
OPTIONS = {"trust_remote_code", "provider", "providers", "provider_options", "session_options"}
OPTIONS |= {*HUB_OPTIONS, "use_cache", "use_merged", "use_io_binding", "dtype"}
# configs, tokenizers and modules of sentence-transformers, beside weights or graphs
COMPANION_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.spm", "*.bpe", "[0-9]_*/*")
CPUS = dict.fromkeys(("CPUExecutionProvider", "AzureExecutionProvider"), "cpu")
DEVICES = {**CPUS, CUDA: "cuda", TENSORRT: "tensorrt"}
THREADS = "intra_op_num_threads"


def local_directory(model_id: str | os.PathLike, options: Mapping[str, Any]) -> Path:
    """Return the directory `model_id`, or the folder of a downloaded Hub repository of that name.

    Only graphs, configs and tokenizers are downloaded. `options` may have `revision`, `token`,
    `cache_dir`, `local_files_only` and `force_download`.

    Raises:
        OSError: by transformers, if there is neither.
    """
    if Path(model_id).is_dir():
        return Path(model_id).resolve()
    hub = {name: options[name] for name in HUB_OPTIONS if name in options}
    cached_file(str(model_id), CONFIG_NAME, **hub)
    patterns = [*COMPANION_FILES, "*.onnx*"]
    return Path(snapshot_download(str(model_id), allow_patterns=patterns, **hub))


def checkpoint_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `options` that transformers' `from_pretrained` takes."""
    names = (*HUB_OPTIONS, "trust_remote_code")
    return {name: options[name] for name in names if name in options}


def must_export(root: Path, export: bool) -> bool:
    """Return True if the checkpoint in `root` must be exported: it has no graphs, or `export` is
    set.

    A warning is logged if `export` and the graphs do not fit together.
    """
    has_graphs = any(root.rglob("*.onnx"))
    if has_graphs and export:
        logger.warning(f"{root} has ONNX graphs and export=True: it is exported again")
    if not has_graphs and not export:
        logger.warning(f"{root} has no ONNX graphs: it is exported. Keep it with save_pretrained")
    return export or not has_graphs


def find_export(root: Path, subfolder: str) -> Path | None:
    """Return the folder of the export: `subfolder` of `root`, or `root` if only its graphs are
    there.

    Return `None` if neither has a manifest, as graphs of another exporter.
    """
    directories = [root / subfolder, root]
    return next((path for path in directories if (path / MANIFEST).is_file()), None)


def export_checkpoint(
    auto_class: Any, root: Path, out: Path, target: str | None, config: Any, **source: Any
) -> None:
    """Load a checkpoint and export it to the folder `out`.

    Args:
        auto_class: the class of transformers that loads it.
        root: folder with the tokenizer or image processor and the modules of sentence-transformers,
            which are exported too.
        out: folder of the export.
        target: target of the export, `None` for the default.
        config: config of the model, `None` for its own.
        source: further arguments of `from_pretrained`, such as the name of the model.
    """
    with TemporaryDirectory(prefix="vanilla-transformer-") as checkpoint:
        files = {path for name in COMPANION_FILES for path in root.glob(name)}
        weights = {*root.glob("*.index.json"), root / MANIFEST}
        copy_files(root, files - weights, checkpoint)
        auto_class.from_pretrained(**source, config=config).save_pretrained(checkpoint)
        export(checkpoint, out, **({} if target is None else {"target": target}))


def runtime_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"device": …, "threads": …}` for `Runtime` from the `options` of `from_pretrained`.

    A warning is logged for each option without effect.

    Raises:
        UsageError: for a provider that no export runs on.
    """
    if not options.get("use_cache", True):
        logger.warning("use_cache=False has no effect: exports always have caches")
    if options.get("provider_options"):
        logger.warning(f"provider_options={options['provider_options']} has no effect")
    providers = options.get("providers") or [options.get("provider")]
    return {
        "device": find_device(providers[0]),
        "threads": find_threads(options.get("session_options")),
    }


def find_device(provider: Any) -> str | None:
    """Return the device of an onnxruntime `provider`, or `None` for the device of the target.

    The provider is a name, a tuple that begins with it, or `None`.

    Raises:
        UsageError: for a provider that no export runs on.
    """
    name = provider[0] if isinstance(provider, tuple) else provider
    if name is not None and name not in DEVICES:
        raise UsageError(f"provider {name!r} is not supported, expected one of {list(DEVICES)}")
    return DEVICES.get(name)


def find_threads(session_options: Any) -> int | None:
    """Return the threads that onnxruntime's `session_options` set, or `None` if they set none.

    A warning is logged if they set anything else.
    """
    if session_options is None:
        return None
    default = onnxruntime.SessionOptions()
    names = [name for name in dir(default) if isinstance(getattr(default, name), int | str)]
    changed = [name for name in names if getattr(session_options, name) != getattr(default, name)]
    if ignored := [name for name in changed if not name.startswith("_") and name != THREADS]:
        logger.warning(f"session_options sets {', '.join(ignored)}, expected only {THREADS}")
    return session_options.intra_op_num_threads or None


def find_dtype(directory: Path, file_name: str | None) -> str | None:
    """Return the dtype of the graph `file_name` of the export in `directory`, `None` without a
    name.

    Raises:
        FileNotFoundError: if the export has no graph of that name.
    """
    if file_name is None:
        return None
    variants = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["variants"]
    graphs = [(file, dtype) for dtype in variants for file in variants[dtype]["graphs"].values()]
    dtypes = {Path(file).name: dtype for file, dtype in graphs}
    if Path(file_name).name not in dtypes:
        raise FileNotFoundError(f"{directory} has no {file_name}, expected one of {list(dtypes)}")
    return dtypes[Path(file_name).name]


def copy_files(source: Path, paths: Iterable[Path], target: str | os.PathLike) -> None:
    """Copy the files `paths`, which lie in `source`, to the same places in the folder `target`."""
    for path in paths:
        copy = Path(target) / path.relative_to(source)
        if path.is_file() and copy.resolve() != path.resolve():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def remove_graphs(directory: Path) -> None:
    """Remove the graphs and the manifest of an export that is already in `directory`.

    Other files stay, and graphs that are not in the manifest.
    """
    if (directory / MANIFEST).is_file():
        files = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
        for path in list(directory.rglob("*.onnx*")):
            if path.relative_to(directory).as_posix() in files:
                path.unlink()
        (directory / MANIFEST).unlink()


def list_files(directory: Path, runtime: Any) -> list[Path]:
    """Return the paths of all files of the export in `directory`, or of a graph of another
    exporter.

    `runtime` is the `Runtime` or `ForeignGraph` that is open.
    """
    if isinstance(runtime, ForeignGraph):
        return runtime.files
    return [directory / name for name in (*runtime.info.manifest["files"], MANIFEST)]
