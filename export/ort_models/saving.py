"""Copies of the files of models, and folders for models that are exported when they are opened."""

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from pickle import PicklingError
from typing import Any

from ..exporting.repository_files import write_json
from ..inference.export_info import MANIFEST, ExportInfo, is_rewritable, sha256

# configs, tokenizers and modules of sentence-transformers, beside weights or graphs
COMPANION_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.spm", "*.bpe", "[0-9]_*/*")


class TemporaryFolder:
    """A folder that its process removes when no model uses it any more. Copies of models share it.

    Processes that this one starts can use it; other processes may live longer, so pickling it for
    them raises PicklingError.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="vanilla-transformer-")).resolve()
        weakref.finalize(self, remove_folder, self.path, os.getpid())

    def __deepcopy__(self, memo: dict) -> "TemporaryFolder":
        return self

    def __reduce__(self) -> tuple:
        if get_spawning_popen() is None:
            raise PicklingError(
                f"the model is in the temporary folder {self.path}, expected a saved one: call "
                "save_pretrained and open what it saved"
            )
        return Path, (str(self.path),)


def remove_folder(path: Path, process_id: int) -> None:
    """Remove the folder `path`, unless this is a fork of the process that made it."""
    if os.getpid() == process_id:
        shutil.rmtree(path, ignore_errors=True)


def save(info: ExportInfo, directory: Path, changes: Mapping[str, dict[str, Any]]) -> None:
    """Copy the files of an export or repository to `directory`, in place of an export there.

    The dtype of `info` becomes the default of the copy. `changes` are new fields of configs, by the
    name of the file. `directory` may be that of `info`.

    Raises:
        FileNotFoundError: if a file of the model is missing. Nothing is removed then.
        FileExistsError: if `directory` has graphs that are no export. Nothing is removed then.
    """
    is_export = "variants" in info.manifest
    names = [*info.manifest["files"], *([MANIFEST] if is_export else [])]
    if missing := [name for name in names if not (info.directory / name).is_file()]:
        raise FileNotFoundError(f"{info.directory} has no {', '.join(missing)}, expected {names}")
    if directory.resolve() != info.directory.resolve():
        remove_export(directory, names)
        copy_files(info.directory, [info.directory / name for name in names], directory)
    if is_export and info.dtype != info.dtypes[0]:
        manifest = read_json(directory / MANIFEST)
        write_json(directory / MANIFEST, manifest | {"default_dtype": info.dtype})
    for name, fields in changes.items():
        if fields:
            change_config(directory, name, fields)


def change_config(directory: Path, name: str, fields: dict[str, Any]) -> None:
    """Change `fields` of the config file `name`, and its facts in the manifest if there is one."""
    path, manifest = directory / name, directory / MANIFEST
    write_json(path, read_json(path) | fields)
    if manifest.is_file():
        facts = read_json(manifest)
        facts["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        write_json(manifest, facts)


def remove_export(directory: Path, names: Iterable[str]) -> None:
    """Remove the graphs, configs and manifest of an export in `directory`, if there is one.

    Raises FileExistsError for graphs that are neither of the export nor in `names`, but lie beside
    or above `names`: they could be opened in their place.
    """
    earlier = read_json(directory / MANIFEST).get("files", {})
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*")}
    fixed = {name for name in files if not is_rewritable(name)}
    folders = {folder for name in names if ".onnx" in name for folder in Path(name).parents}
    others = {name for name in fixed - earlier.keys() - {*names} if Path(name).parent in folders}
    if graphs := sorted(name for name in others if ".onnx" in name):
        raise FileExistsError(f"{directory} has {graphs} of another model, expected none of these")
    for name in fixed & earlier.keys():
        files[name].unlink()
    (directory / MANIFEST).unlink(missing_ok=True)


def copy_files(source: Path, paths: Iterable[Path], target: Path) -> None:
    """Copy `paths`, files which lie in `source`, to their places in `target`."""
    for path in paths:
        copy = target / path.relative_to(source)
        if path.is_file() and copy.resolve() != path.resolve():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def companion_files(directory: Path) -> set[Path]:
    """Return the configs, tokenizers and modules beside the weights or graphs in `directory`."""
    paths = {path for name in COMPANION_FILES for path in directory.glob(name) if path.is_file()}
    return paths - {*directory.glob("*.index.json"), directory / MANIFEST}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`, an empty one if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
