"""Copies of the files of models."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..exporting.repository_files import write_json
from ..inference.export_info import MANIFEST, ExportInfo, sha256


def save(info: ExportInfo, directory: Path, changes: Mapping[str, dict[str, Any]]) -> None:
    """Copy the files of an export or repository to `directory`, in place of an export there.

    `changes` are new fields of configs, by the name of the file. `directory` may be that of `info`.
    """
    if directory.resolve() != info.directory:
        remove_export(directory)
        names = [*info.manifest["files"], MANIFEST]
        copy_files(info.directory, [info.directory / name for name in names], directory)
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


def remove_export(directory: Path) -> None:
    """Remove the graphs and the manifest of an export in `directory`, if there is one."""
    files = read_json(directory / MANIFEST).get("files", {})
    for path in [*directory.rglob("*.onnx*")]:
        if path.relative_to(directory).as_posix() in files:
            path.unlink()
    (directory / MANIFEST).unlink(missing_ok=True)


def copy_files(source: Path, paths: Iterable[Path], target: Path) -> None:
    """Copy those of `paths`, which lie in `source`, that are files to their places in `target`."""
    for path in paths:
        copy = target / path.relative_to(source)
        if path.is_file() and copy.resolve() != path.resolve():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`, an empty one if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
