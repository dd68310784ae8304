"""Copies of the files of models."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..inference.export_info import MANIFEST, ExportInfo, file_facts, is_rewritable
from ..shared.files import TOKEN_HEADS, json_object, write_json

# configs and their code, tokenizers, modules of sentence-transformers and heads of BGE-M3, beside
# weights or graphs
COMPANION_FILES: tuple[str, ...] = ("*.json", "*.py", "*.txt", "*.jinja", "*.model", "*.spm")
COMPANION_FILES += ("*.bpe", "[0-9]_*/*", *(f"{head}.*" for head in TOKEN_HEADS))


def save(info: ExportInfo, directory: Path, changes: Mapping[str, dict[str, Any]]) -> None:
    """Copy the files of an export or repository to `directory`, in place of an export there.

    The dtype of `info` becomes the default of the copy. `changes` are new fields of configs, by the
    name of the file. `directory` may be that of `info`.

    Raises FileNotFoundError for missing files of the model, and FileExistsError as `remove_export`
    does. Nothing is removed then.
    """
    is_export = "variants" in info.manifest
    names = [*info.manifest["files"], *([MANIFEST] if is_export else [])]
    if missing := [name for name in names if not (info.directory / name).is_file()]:
        raise FileNotFoundError(f"{info.directory} has no {', '.join(missing)}, expected {names}")
    if directory.resolve() != info.directory.resolve():
        remove_export(directory, names)
        copy_files(info.directory, names, directory)
    manifest = read_json(directory / MANIFEST)
    files = dict(manifest.get("files", {}))
    for name, fields in changes.items():
        if fields:
            path = write_json(directory / name, {**read_json(directory / name), **fields})
            files[name] = file_facts(path)
    changed = {**manifest, "default_dtype": info.dtype, "files": files}
    if is_export and changed != manifest:
        write_json(directory / MANIFEST, changed)


def remove_export(directory: Path, names: Iterable[str]) -> None:
    """Remove the graphs, configs and manifest of an export in `directory`, if there is one.

    Raises FileExistsError for graphs that are neither of the export nor in `names`, but lie beside
    or above `names`: they could be opened in their place.
    """
    paths = (path.relative_to(directory).as_posix() for path in directory.rglob("*"))
    fixed = {name for name in paths if not is_rewritable(name)}
    exported = read_json(directory / MANIFEST).get("files", {}).keys()
    folders = {folder for name in names if ".onnx" in name for folder in Path(name).parents}
    graphs = {name for name in fixed if ".onnx" in name and Path(name).parent in folders}
    if others := sorted(graphs - exported - {*names}):
        raise FileExistsError(f"{directory} has {others} of another model, expected none of these")
    for name in fixed & exported:
        (directory / name).unlink()
    (directory / MANIFEST).unlink(missing_ok=True)


def copy_files(source: Path, names: Iterable[str], target: Path) -> None:
    """Copy the files `names` from the folder `source` to the folder `target`."""
    for name in names:
        path, copy = source / name, target / name
        if copy.resolve() != path.resolve():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def companion_files(directory: Path) -> set[str]:
    """Return the names of configs, tokenizers and modules beside the weights or graphs."""
    paths = {path for name in COMPANION_FILES for path in directory.glob(name) if path.is_file()}
    paths -= {*directory.glob("*.index.json"), directory / MANIFEST}
    return {path.relative_to(directory).as_posix() for path in paths}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`, an empty one if there is no file."""
    return json_object(path, path.read_bytes()) if path.is_file() else {}
