"""The arguments of optimum's `from_pretrained`: which files are opened, and how."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime
from huggingface_hub import snapshot_download
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME, cached_file, logging

from ..errors import UsageError
from ..exporting.export import export
from ..exporting.repository_files import MARIAN_NAMES
from ..inference.devices import CUDA, TENSORRT
from ..inference.export_info import CONFIGS, MANIFEST, sha256
from ..runtime import Runtime
from .foreign import ForeignRuntime

logger = logging.get_logger(__name__)

HUB_OPTIONS = {"revision", "token", "cache_dir", "local_files_only", "force_download"}
OPTIONS = {*HUB_OPTIONS, "trust_remote_code", "provider", "providers", "provider_options"}
OPTIONS |= {"session_options", "use_cache", "use_merged", "use_io_binding", "dtype"}
# configs, tokenizers and modules of sentence-transformers, beside weights or graphs
COMPANION_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.spm", "*.bpe", "[0-9]_*/*")
CPUS = dict.fromkeys(("CPUExecutionProvider", "AzureExecutionProvider"), "cpu")
DEVICES = {**CPUS, CUDA: "cuda", TENSORRT: "tensorrt"}
THREADS = "intra_op_num_threads"


@dataclass(frozen=True)
class Source:
    """The files of a model, and how they are opened.

    Args:
        directory: an export, or a directory of another exporter.
        graphs: graphs of another exporter, by role; empty for an export.
        threads, device, dtype: arguments of `Runtime`.
    """

    directory: Path
    graphs: Mapping[str, Path] = field(default_factory=dict)
    threads: int | None = None
    device: str | None = None
    dtype: str | None = None

    def open(self) -> Any:
        """Return a `Runtime` of an export, or a `ForeignRuntime` of other graphs.

        Raises:
            FileNotFoundError, ValueError, OSError: if the files cannot be opened.
        """
        if self.graphs:
            return ForeignRuntime(self.directory, self.graphs, self.threads, self.device)
        return Runtime(self.directory, self.threads, device=self.device, dtype=self.dtype)

    def load_config(self, fields: Mapping[str, Any]) -> PreTrainedConfig:
        """Return a config object for `fields`, the config.json of an export.

        Names that only Transformers.js reads are left out. For graphs of another exporter,
        transformers reads the file.
        """
        if self.graphs:
            return AutoConfig.from_pretrained(self.directory)
        names = fields.keys() - MARIAN_NAMES.keys()  # which only Transformers.js reads
        return AutoConfig.for_model(**{name: fields[name] for name in names})

    def save(self, directory: Path, changes: Mapping[str, dict[str, Any]]) -> None:
        """Copy the files to `directory`, in place of an export that is there.

        `changes` are new values of fields, by the file name of the config and the field.
        """
        if directory.resolve() != self.directory:
            remove_export(directory)
            copy_files(self.directory, self._list_files(), directory)
        for name, fields in changes.items():
            if fields:
                change_config(directory, name, fields)

    def _list_files(self) -> Iterable[Path]:
        """Return the files of the export, or the graphs with their weights and configs."""
        if self.graphs:
            weights = [path.parent.glob(f"{path.name}*") for path in self.graphs.values()]
            names = [self.directory / name for name in CONFIGS]
            return [*names, *(path for paths in weights for path in paths)]
        files = read_json(self.directory / MANIFEST)["files"]
        return [self.directory / name for name in (*files, MANIFEST)]


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write the JSON object `value` to the file `path`."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def change_config(directory: Path, name: str, fields: dict[str, Any]) -> None:
    """Change `fields`, by name, of the config file `name` in `directory`.

    In an export, its size and hash in the manifest change too.
    """
    path, manifest = directory / name, directory / MANIFEST
    write_json(path, (read_json(path) if path.is_file() else {}) | fields)
    if manifest.is_file():
        facts = read_json(manifest)
        facts["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        write_json(manifest, facts)


def local_directory(model_id: str | os.PathLike, options: Mapping[str, Any]) -> Path:
    """Return the directory `model_id`, or the folder of a downloaded Hub repository of that name.

    Only graphs, configs and tokenizers are downloaded. `options` may have `revision`, `token`,
    `cache_dir`, `local_files_only` and `force_download`.

    Raises:
        OSError: by transformers, if there is neither.
    """
    if Path(model_id).is_dir():
        return Path(model_id).resolve()
    hub = {name: options[name] for name in HUB_OPTIONS & options.keys()}
    cached_file(str(model_id), CONFIG_NAME, **hub)
    patterns = [*COMPANION_FILES, "*.onnx*"]
    return Path(snapshot_download(str(model_id), allow_patterns=patterns, **hub))


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
    auto_class: Any, root: Path, out: Path, target: str | None, options: dict, **source: Any
) -> None:
    """Load a checkpoint and export it to the folder `out`.

    Args:
        auto_class: the class of transformers that loads it.
        root: folder with the tokenizer or image processor and the modules of sentence-transformers,
            which are exported too.
        out: folder of the export.
        target: target of the export, `None` for the default.
        options: options of `from_pretrained`, of which those of the Hub count.
        source: further arguments of `from_pretrained`, such as the name of the model.
    """
    names = {*HUB_OPTIONS, "trust_remote_code"} & options.keys()
    with TemporaryDirectory(prefix="vanilla-transformer-") as checkpoint:
        files = {path for name in COMPANION_FILES for path in root.glob(name)}
        weights = {*root.glob("*.index.json"), root / MANIFEST}
        copy_files(root, files - weights, Path(checkpoint))
        model = auto_class.from_pretrained(**source, **{name: options[name] for name in names})
        model.save_pretrained(checkpoint)
        export(checkpoint, out, **({} if target is None else {"target": target}))


def runtime_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"device": …, "threads": …}` for `Runtime` from the `options` of `from_pretrained`.

    A warning is logged for each option without effect.

    Raises:
        TypeError: for an unknown option.
        UsageError: for a provider that no export runs on.
    """
    if unknown := sorted(options.keys() - OPTIONS):
        raise TypeError(f"unknown {unknown}, expected some of {sorted(OPTIONS)}")
    if not options.get("use_cache", True):
        logger.warning("use_cache=False has no effect: exports always have caches")
    if options.get("provider_options"):
        logger.warning(f"provider_options={options['provider_options']} has no effect")
    provider = (options.get("providers") or [options.get("provider")])[0]
    name = provider[0] if isinstance(provider, tuple) else provider
    if name is not None and name not in DEVICES:
        raise UsageError(f"provider {name!r} is not supported, expected one of {list(DEVICES)}")
    threads = find_threads(options.get("session_options"))
    return {"device": DEVICES.get(name), "threads": threads}


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
    variants = read_json(directory / MANIFEST)["variants"]
    graphs = [(file, dtype) for dtype in variants for file in variants[dtype]["graphs"].values()]
    dtypes = {Path(file).name: dtype for file, dtype in graphs}
    if Path(file_name).name not in dtypes:
        raise FileNotFoundError(f"{directory} has no {file_name}, expected one of {list(dtypes)}")
    return dtypes[Path(file_name).name]


def copy_files(source: Path, paths: Iterable[Path], target: Path) -> None:
    """Copy the files `paths`, which lie in `source`, to the same places in the folder `target`."""
    for path in paths:
        copy = target / path.relative_to(source)
        if path.is_file() and copy.resolve() != path.resolve():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def remove_export(directory: Path) -> None:
    """Remove the graphs and the manifest of an export in `directory`, if there is one."""
    if (directory / MANIFEST).is_file():
        files = read_json(directory / MANIFEST)["files"]
        for path in list(directory.rglob("*.onnx*")):
            if path.relative_to(directory).as_posix() in files:
                path.unlink()
        (directory / MANIFEST).unlink()
