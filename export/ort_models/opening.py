"""From the arguments of optimum's `from_pretrained` to an export directory and the arguments of
`Runtime`."""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime
from huggingface_hub import snapshot_download
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.utils import CONFIG_NAME, cached_file, logging

from ..errors import UsageError
from ..exporting.export import export
from ..inference.devices import CUDA, TENSORRT
from ..inference.export_info import MANIFEST

logger = logging.get_logger(__name__)

HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
# files of an export or of ONNX graphs, without the weights of a checkpoint
HUB_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.onnx*", "[0-9]_*/*")
DEVICES = {
    "CPUExecutionProvider": "cpu",
    "AzureExecutionProvider": "cpu",
    CUDA: "cuda",
    TENSORRT: "tensorrt",
}
THREADS = "intra_op_num_threads"


def local_directory(model_id: str | os.PathLike, hub: Mapping[str, Any]) -> Path:
    """Return the directory `model_id`, or the downloaded graphs and configs of that repository.

    Raises:
        OSError: by transformers, if there is no such directory or repository.
    """
    if Path(model_id).is_dir():
        return Path(model_id)
    cached_file(str(model_id), CONFIG_NAME, **hub)
    return Path(snapshot_download(str(model_id), allow_patterns=HUB_FILES, **hub))


def find_export(root: Path, subfolder: str) -> Path:
    """Return the export in `subfolder` of `root`, or `root` if only its graphs are there.

    Raises:
        ValueError: if another exporter wrote the graphs.
    """
    for directory in (root / subfolder, root):
        if (directory / MANIFEST).is_file():
            return directory
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.onnx"))
    raise ValueError(
        f"{root} has {', '.join(names)} without {MANIFEST}: another exporter wrote these graphs; "
        "export the checkpoint again with export=True"
    )


def must_export(model_id: str | os.PathLike, root: Path, export: bool) -> bool:
    """Return whether a checkpoint must be exported first. Log a warning if `export` says
    otherwise."""
    has_graphs = any(root.rglob("*.onnx"))
    if has_graphs and export:
        logger.warning(f"{model_id} has ONNX graphs and export=True: it is exported again")
    elif not has_graphs and not export:
        logger.warning(
            f"{model_id} has no ONNX graphs: it is exported now. Keep the export with "
            "save_pretrained"
        )
    return export or not has_graphs


def export_checkpoint(
    auto_class: Any,
    model_id: str | os.PathLike,
    options: Mapping[str, Any],
    config: Any,
    target: str | None,
) -> TemporaryDirectory:
    """Export the checkpoint that `auto_class` loads from `model_id`, with its tokenizer or image
    processor. Return the temporary directory of the export."""
    out = TemporaryDirectory(prefix="vanilla-transformer-")
    with TemporaryDirectory(prefix="vanilla-transformer-") as checkpoint:
        auto_class.from_pretrained(model_id, config=config, **options).save_pretrained(checkpoint)
        for processor_class in (AutoTokenizer, AutoImageProcessor):
            with contextlib.suppress(OSError, ValueError):
                processor_class.from_pretrained(model_id, **options).save_pretrained(checkpoint)
        export(checkpoint, Path(out.name) / "export", **({"target": target} if target else {}))
    return out


def find_device(provider: str | None, providers: Sequence[Any] | None) -> str | None:
    """Return the device of the first provider, or `None` for the device of the target.

    Raises:
        UsageError: for a provider that no export runs on.
    """
    first = providers[0] if providers else provider
    name = first[0] if isinstance(first, tuple) else first
    if name is not None and name not in DEVICES:
        raise UsageError(f"provider {name!r} is not supported, expected one of {list(DEVICES)}")
    return DEVICES.get(name)


def find_threads(session_options: onnxruntime.SessionOptions | None) -> int | None:
    """Return the threads of `session_options`. Log one warning for other options that are set."""
    if session_options is None:
        return None
    default = onnxruntime.SessionOptions()
    changed = [
        name
        for name in dir(default)
        if not name.startswith("_")
        and not callable(getattr(default, name))
        and getattr(session_options, name) != getattr(default, name)
    ]
    if ignored := [name for name in changed if name != THREADS]:
        logger.warning(f"session_options sets {', '.join(ignored)}, expected only {THREADS}")
    return session_options.intra_op_num_threads or None


def find_dtype(directory: Path, file_name: str | None) -> str | None:
    """Return the dtype of the graph `file_name`, or `None` without a name.

    Raises:
        FileNotFoundError: if no graph of the export has this name.
    """
    if file_name is None:
        return None
    variants = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["variants"]
    dtypes = {
        Path(file).name: dtype
        for dtype, variant in variants.items()
        for file in variant["graphs"].values()
    }
    if (name := Path(file_name).name) not in dtypes:
        raise FileNotFoundError(f"{directory} has no {file_name}, expected one of {list(dtypes)}")
    return dtypes[name]


def copy_export(source: Path, names: Sequence[str], target: Path) -> None:
    """Copy the files `names` of an export, and remove the graphs of an export that `target`
    had."""
    if target.resolve() == source.resolve():
        return
    if (target / MANIFEST).is_file():
        earlier = json.loads((target / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name in earlier:
            (target / name).unlink(missing_ok=True)
    for name in (*names, MANIFEST):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
