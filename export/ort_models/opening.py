"""The arguments of optimum's `from_pretrained`: which files are opened, and how."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from pickle import PicklingError
from typing import Any

import onnxruntime
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME, logging

from vanilla_transformer.checkpoint_files import checkpoint_directory

from ..errors import UsageError
from ..exporting.export import export
from ..inference.export_info import MANIFEST
from ..runtime import Runtime
from .encoder_graph import DEVICES, ForeignEncoder, find_graph
from .saving import COMPANION_FILES, companion_files, copy_files, read_json

logger = logging.get_logger(__name__)

HUB_OPTIONS = {"revision", "token", "cache_dir", "local_files_only", "force_download"}
CHECKPOINT_OPTIONS = {*HUB_OPTIONS, "trust_remote_code"}
# options without effect, and the value that gives no warning
IGNORED = {"use_cache": True, "use_merged": True, "provider_options": None}
OPTIONS = {*CHECKPOINT_OPTIONS, *IGNORED, "provider", "providers"}
OPTIONS |= {"session_options", "use_io_binding", "dtype"}
PROVIDERS = {**DEVICES, "AzureExecutionProvider": "cpu"}  # device of each provider
THREADS = "intra_op_num_threads"
PREFIX = "vanilla-transformer-"  # of temporary folders


def runtime_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return device and threads for `Runtime`, and log options of `from_pretrained` without effect.

    Raises TypeError for an unknown option, and UsageError for an unknown provider.
    """
    if unknown := sorted(options.keys() - OPTIONS):
        raise TypeError(f"unknown {unknown}, expected some of {sorted(OPTIONS)}")
    for name, silent in IGNORED.items():
        if (value := options.get(name)) not in (None, silent):
            logger.warning(f"{name}={value} has no effect")
    providers = options.get("providers") or options.get("provider")
    first: Any = providers if isinstance(providers, str | None) else providers[0]
    provider, *ignored = [first] if isinstance(first, str | None) else first
    if any(ignored):
        logger.warning(f"the options {ignored} of {provider} have no effect")
    if provider is not None and provider not in PROVIDERS:
        raise UsageError(f"provider {provider!r} is not supported, expected one of {[*PROVIDERS]}")
    threads = find_threads(options.get("session_options"))
    return {"device": provider and PROVIDERS[provider], "threads": threads}


def find_threads(session_options: Any) -> int | None:
    """Return the threads that onnxruntime's `session_options` set, and log other attributes.

    onnxruntime does not list config entries. Raises TypeError for another class.
    """
    if session_options is None:
        return None
    if not isinstance(session_options, onnxruntime.SessionOptions):
        kind = type(session_options).__name__
        raise TypeError(f"session_options is a {kind}, expected an onnxruntime.SessionOptions")
    default = onnxruntime.SessionOptions()
    names = {name for name in dir(default) if not callable(getattr(default, name))}
    changed = {name for name in names if getattr(session_options, name) != getattr(default, name)}
    if ignored := sorted(changed - {THREADS, "__doc__", "__module__"}):
        logger.warning(f"session_options sets {', '.join(ignored)}, expected only {THREADS}")
    return session_options.intra_op_num_threads or None


def model_directory(
    model_id: str | os.PathLike, subfolder: str, graph: str | None, options: Mapping[str, Any]
) -> Path:
    """Return the directory `model_id`, or that of the Hub repository in the cache.

    An export is downloaded, or companion files and the graph of that name. If the repository does
    not have the graph, all graphs are downloaded. Raises OSError if there is neither, or no
    `subfolder`.
    """
    hub = {name: options[name] for name in HUB_OPTIONS & options.keys()}
    root = checkpoint_directory(model_id, COMPANION_FILES, **hub)
    # nothing to do for a directory; of a Hub id, all files are of the commit that was found first
    get = partial(checkpoint_directory, model_id, commit=root.name, **hub)
    directory, folder = config_directory(root, root / subfolder), f"{subfolder}/".lstrip("/")
    if files := read_json(directory / MANIFEST).get("files"):
        prefix = directory.relative_to(root)
        get(tuple((prefix / name).as_posix() for name in files))
    elif graph is not None:
        get((f"{folder}{graph}*", f"{folder}*/{graph}*"))
        if not any((root / subfolder).rglob(graph)):
            get((f"{folder}*.onnx*", f"{folder}*/*.onnx*"))
    if not (root / subfolder).is_dir():
        raise FileNotFoundError(f"{root} has no folder {subfolder!r}, expected one with the model")
    return root.resolve()


def config_directory(root: Path, folder: Path) -> Path:
    """Return the directory of config.json and the manifest: the subfolder `folder`, else `root`."""
    return folder if (folder / CONFIG_NAME).is_file() else root


def must_export(folder: Path, export: bool) -> bool:
    """Return True if `folder` has no graphs or `export` is True, and warn if only one is true."""
    has_graphs = any(folder.rglob("*.onnx"))
    if has_graphs and export:
        logger.warning(f"{folder} has ONNX graphs and export=True: it is exported again")
    if not has_graphs and not export:
        logger.warning(f"{folder} has no ONNX graphs: it is exported. Keep it with save_pretrained")
    return export or not has_graphs


def export_checkpoint(model: Any, companions: Path, target: str | None) -> "TemporaryFolder":
    """Export the torch `model` to a temporary folder, and return the folder.

    The tokenizer and other files beside the weights are in the folder `companions`.
    """
    folder = TemporaryFolder()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as checkpoint:
        copy_files(companions, companion_files(companions), Path(checkpoint))
        model.save_pretrained(checkpoint)
        export(checkpoint, folder.path, **({} if target is None else {"target": target}))
    return folder


class TemporaryFolder:
    """A folder that its process removes when no model uses it any more. Copies of models share it.

    Only child processes can unpickle a model in it, as others could outlive the folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        weakref.finalize(self, remove_folder, self.path, os.getpid())

    def __deepcopy__(self, memo: dict) -> "TemporaryFolder":
        return self

    def __reduce__(self) -> tuple:
        if get_spawning_popen() is None:
            raise PicklingError(
                f"the model is in the temporary folder {self.path}, expected a saved one: call "
                "save_pretrained and open what it saved"
            )
        return type(None), ()  # the parent process keeps the folder


def remove_folder(path: Path, process_id: int) -> None:
    """Remove the folder `path`, unless this is a fork of the process that made it."""
    if os.getpid() == process_id:
        shutil.rmtree(path, ignore_errors=True)


def find_runtime(
    root: Path,
    folder: Path,
    file_name: str | None,
    config: PreTrainedConfig | None,
    options: Mapping[str, Any],
    is_generator: bool,
) -> tuple[Callable[..., Any], PreTrainedConfig | None]:
    """Return a function of device and threads that opens the graphs in `folder`, and the config.

    By default, the config is that of an encoder without a manifest, and `None` for an export.
    `folder` is `root` or a subfolder of it. See `find_graph` for `file_name` and errors. Raises
    ValueError if `is_generator` is True and there is no manifest.
    """
    directory = config_directory(root, folder)
    files = read_json(directory / MANIFEST).get("files", {})
    if any((directory / name).is_relative_to(folder) for name in files):  # not beside an export
        return partial(Runtime, directory, dtype=find_dtype(directory, file_name)), config
    if is_generator:
        names = sorted(path.name for path in folder.rglob("*.onnx"))
        expected = "an export or a checkpoint: pass export=True to export the weights beside them"
        raise ValueError(f"{folder} has {names} of another exporter, expected {expected}")
    path = find_graph(folder, file_name)
    config = config or resolve_config(directory, options)
    return partial(ForeignEncoder, directory, path, config.to_dict()), config


def resolve_config(config: Any, options: Mapping[str, Any]) -> PreTrainedConfig:
    """Return `config`, or that of a directory or Hub repository. Raises TypeError for others."""
    if isinstance(config, PreTrainedConfig):
        return config
    if not isinstance(config, str | os.PathLike):
        expected = "a PreTrainedConfig, a directory or a Hub repository"
        raise TypeError(f"config is a {type(config).__name__}, expected {expected}")
    return AutoConfig.from_pretrained(config, **checkpoint_options(options))


def checkpoint_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `options` that `from_pretrained` of transformers takes."""
    return {name: options[name] for name in CHECKPOINT_OPTIONS & options.keys()}


def find_dtype(directory: Path, file_name: str | None) -> str | None:
    """Return the dtype of the graph `file_name` of an export, `None` without a name.

    Raises FileNotFoundError if the export has no graph of that name.
    """
    if file_name is None:
        return None
    dtypes: dict[str, str] = {}
    for dtype, variant in read_json(directory / MANIFEST)["variants"].items():
        dtypes |= {Path(file).name: dtype for file in variant["graphs"].values()}
    if Path(file_name).name not in dtypes:
        raise FileNotFoundError(f"{directory} has no {file_name}, expected one of {list(dtypes)}")
    return dtypes[Path(file_name).name]
