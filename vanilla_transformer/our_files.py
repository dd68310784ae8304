"""The files in a directory that this package wrote, so that nothing else is ever replaced."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from .files import (
    CARD,
    CONFIG,
    MANIFEST,
    MODULES,
    TOKEN_HEADS,
    TOKENIZER_FILES,
    TRITON_CONFIG,
    TRITON_MARK,
    VERSION_KEY,
    read_object,
)

MODEL_TYPE = re.compile(r"vanilla-(encoder|decoder|seq2seq|vision)")
TRITON_FILE = re.compile(r"config\.pbtxt|1/model\.onnx(/\w+\.onnx(_data)?)?")
CHECKPOINT_FILE = re.compile(
    r"(config|generation_config|training|model\.safetensors\.index)\.json"
    r"|model(-\d{5}-of-\d{5})?\.safetensors"
    r"|README\.md|curves\.png|(configuration|layers|modeling|pipelines)_vanilla_transformer\.py|"
    + "|".join(map(re.escape, TOKENIZER_FILES))
)
EXPORT_FILE = re.compile(
    r"(config|generation_config|genai_config|tokenizer_config|(target_)?tokenizer)\.json"
    r"|onnx/\w+\.onnx(_data)?|reference\.npz|chat_template\.jinja"
)
# files of image processors and sentence-transformers in exports and checkpoints; the second
# pattern is for the files in a module's folder
COMPANION = re.compile(
    r"(preprocessor_config|modules|config_sentence_transformers|sentence_[\w-]+_config)\.json"
)
TOKEN_HEAD = re.compile(rf"({'|'.join(TOKEN_HEADS)})\.(safetensors|pt)")
OF_MODULE = re.compile(r"([\w-]+)/(config\.json|model\.safetensors|pytorch_model\.bin)")
IGNORED = {"__pycache__", ".DS_Store"}  # files that operating systems create
IGNORED_ON_MOUNT = {"lost+found", ".partial"}
MAX_NAMES = 5  # maximum number of foreign entries in an error


def join_names(names: list[str]) -> str:
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + rest


def check_replaceable(directory: Path, force: bool) -> None:
    """Check that `directory` may be replaced.

    It may be missing or empty, or with `force` hold only files that this package wrote.

    Raises:
        NotADirectoryError: if it is a file.
        FileExistsError: if it has files without `force`, or files of anyone else.
        ValueError: if it is a mount point that holds files.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file, expected a directory or a new path")
    ignored = IGNORED_ON_MOUNT if os.path.ismount(directory) else set()
    entries = sorted(entry for entry in os.listdir(directory) if entry not in ignored)
    if not entries:
        return
    if os.path.ismount(directory):
        raise ValueError(
            f"{directory} is a mount point that holds {join_names(entries)}: expected an empty one"
        )
    if not force:
        raise FileExistsError(
            f"{directory} exists already, expected a new path, or --force to replace it"
        )
    ours = (
        files_of_export(directory)
        or files_of_checkpoint(directory)
        or files_of_triton_model(directory)
    )
    if not ours:
        raise FileExistsError(
            f"{directory} holds {join_names(entries)}: expected only an export or a checkpoint "
            "that vanilla-transformer wrote"
        )
    files = {path for path in relative_files(directory) if not IGNORED & {*Path(path).parts}}
    if foreign := sorted(files - ours):
        raise FileExistsError(
            f"{directory} also holds {join_names(foreign)}, which vanilla-transformer did not "
            "write: move it away"
        )


def relative_files(directory: Path) -> Iterator[str]:
    """Yield all files and empty folders in `directory` and its subfolders, as relative paths with
    slashes.

    A symbolic link is yielded like a file, also if it leads to a directory. An empty `directory`
    yields ".".
    """
    for folder, names, files in os.walk(directory):
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]
        for name in [*files, *links] or ([] if names else [""]):
            yield (Path(folder) / name).relative_to(directory).as_posix()


def files_of_export(directory: Path) -> set[str]:
    """Return the paths of the export files in `directory`: those in the manifest, the manifest
    itself and README.md.

    They are relative. The set is empty without a manifest that this package wrote.
    """
    manifest = read_object(directory / MANIFEST)
    files = manifest.get("files")
    if not {"schema_version", "architecture", "model_type"} <= manifest.keys() or not isinstance(
        files, dict
    ):
        return set()
    return {
        MANIFEST,
        CARD,
        *(name for name in files if EXPORT_FILE.fullmatch(name)),
        *companions_in(directory, files),
    }


def files_of_checkpoint(directory: Path) -> set[str]:
    """Return the relative paths of the checkpoint files in `directory`; none if this package did
    not write its config.json."""
    config = read_object(directory / CONFIG)
    is_ours = VERSION_KEY in config or MODEL_TYPE.fullmatch(str(config.get("model_type")))
    if not is_ours:
        return set()
    files = list(relative_files(directory))
    return {
        *(name for name in files if CHECKPOINT_FILE.fullmatch(name)),
        *companions_in(directory, files),
    }


def files_of_triton_model(directory: Path) -> set[str]:
    """Return the relative paths of the Triton model's files in `directory`; none if this package
    did not write its config.pbtxt."""
    try:
        is_ours = (directory / TRITON_CONFIG).read_text(encoding="utf-8").startswith(TRITON_MARK)
    except (OSError, ValueError):
        return set()
    return (
        {name for name in relative_files(directory) if TRITON_FILE.fullmatch(name)}
        if is_ours
        else set()
    )


def companions_in(directory: Path, files: Iterable[str]) -> set[str]:
    """Return those of `files`, paths relative to `directory`, that are companions of a model.

    These are configs of image processors and sentence-transformers, BGE-M3's heads, and files in
    the folder of a module that modules.json names.
    """
    try:
        modules = json.loads((directory / MODULES).read_bytes())
        module_paths = {module["path"] for module in modules}
    except (OSError, ValueError, TypeError, KeyError):
        module_paths = set()
    matches = [match for match in map(OF_MODULE.fullmatch, files) if match]
    of_modules = {match[0] for match in matches if match[1] in module_paths}
    return of_modules | {
        name for name in files if COMPANION.fullmatch(name) or TOKEN_HEAD.fullmatch(name)
    }
