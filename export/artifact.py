"""The export directory: ONNX files, the checkpoint's configs and tokenizer, and a manifest that says what they are."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Artifact:
    """An export directory that was found whole: `manifest`, and the `config` and `generation_config` beside it."""

    directory: Path
    manifest: dict
    config: dict
    generation_config: dict


def write_manifest(directory: Path, **facts) -> dict:
    """Records `facts` and the size and SHA-256 of every other file of `directory`, and returns the manifest."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    manifest = {"schema_version": SCHEMA_VERSION, **facts}
    manifest["files"] = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_artifact(directory: str | os.PathLike) -> Artifact:
    """Checks every file against the manifest.

    Raises:
        FileNotFoundError: if the directory, its manifest or a file named there is missing.
        ValueError: if the manifest is of another schema or lists a file outside the directory, or a file is not the one that
            was exported.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no {MANIFEST}: expected a directory `vanilla-transformer export` wrote")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(manifest, dict):
        raise ValueError(f"{path} is not a manifest, expected a JSON object, got {manifest!r}")
    if (found := manifest.get("schema_version")) != SCHEMA_VERSION:
        is_newer = isinstance(found, int) and found > SCHEMA_VERSION
        remedy = "a newer vanilla-transformer wrote it, update this one" if is_newer else "export again"
        raise ValueError(f"{path} has schema version {found}, expected {SCHEMA_VERSION}: {remedy}")
    if missing := {"architecture", "files", "model_type"} - manifest.keys():
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: export again")
    for name, facts in manifest["files"].items():
        # A link is followed, the Hub's cache is made of them: what it leads to must have the right hash.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path} lists {name!r}, which is outside the directory: export again")
        check_file(directory / name, facts)
    config, generation_config = (
        json.loads((directory / name).read_text()) if name in manifest["files"] else {}
        for name in ("config.json", "generation_config.json")
    )
    # config.json names a model type that clients know.
    return Artifact(directory, manifest, config | {"model_type": manifest["model_type"]}, generation_config)


def check_file(path, facts):
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the export is incomplete, export again")
    if path.stat().st_size != facts["bytes"]:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, expected {facts['bytes']}: export again")
    if (found := sha256(path)) != facts["sha256"]:
        raise ValueError(f"{path} has SHA-256 {found}, expected {facts['sha256']}: export again")


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
