"""Atomic outputs: directories and files that appear complete or not at all, and that replace only
what this package wrote.

While OUT is written, the folder `.OUT.partial` is next to it (or `OUT/.partial` inside it, if OUT
is a mount point, which cannot be renamed). A lock on the folder claims OUT for one process of this
machine. The folder contains

    new      the output that is being written
    ready    the complete output, while its entries move into a mount point
    old      the previous OUT, until `new` is renamed to OUT
    trash    the previous OUT, afterwards

The lock ends with its process. A process that locks an existing folder therefore finishes or undoes
the work of a killed process.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # missing on Windows
    fcntl = None  # type: ignore[assignment]

StrPath = str | os.PathLike

MANIFEST, CARD = "manifest.json", "README.md"  # files of an export
CONFIG = "config.json"  # the config of a checkpoint
WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"  # unsharded weights of a checkpoint
TRITON_CONFIG = "config.pbtxt"  # the configuration of a Triton model
TRITON_MARK = "# Written by vanilla-transformer export."  # the first line of this configuration
TRITON_FILE = re.compile(r"config\.pbtxt|1/model\.onnx(/\w+\.onnx(_data)?)?")
IMAGE_PROCESSOR = "preprocessor_config.json"
MODULES = "modules.json"  # sentence-transformers' modules after the model
# key in the config of a checkpoint that we wrote for another library
VERSION_KEY = "vanilla_transformer_version"
MODEL_TYPE = re.compile(r"vanilla-(encoder|decoder|seq2seq|vision)")
VOCABULARIES = (  # a checkpoint with one of these has a tokenizer
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "source.spm",
    "target.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer_config.json",  # the only file of a byte tokenizer
)
# for target text that is split differently from source text
TARGET_TOKENIZER = "target_tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    *VOCABULARIES,
    TARGET_TOKENIZER,
    "target_vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
)
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
OF_MODULE = re.compile(r"([\w-]+)/(config\.json|model\.safetensors|pytorch_model\.bin)")
IGNORED = {"__pycache__", ".DS_Store"}  # files that operating systems create
IGNORED_ON_MOUNT = {"lost+found", ".partial"}
MAX_NAMES = 5  # maximum number of foreign entries in an error
PARTS = {"writing", "new", "ready", "old", "trash"}  # entries of a claim
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # first bytes of every git-lfs pointer


def check_no_pointer(path: str | os.PathLike) -> None:
    """Raise ValueError if the file `path` is a pointer of git-lfs, of a clone that was made without
    git-lfs. A missing file is no error."""
    if not Path(path).is_file():
        return
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(
                f"{path} is a git-lfs pointer, expected the file itself: run `git lfs pull` in "
                f"the clone"
            )


def sha256(path: Path) -> str:
    """Return the SHA-256 of the file `path` in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_object(path: Path, content: bytes) -> dict[str, Any]:
    """Return the parsed `content` of the file `path`. Raise ValueError unless it is a JSON
    object."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path} is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {value!r:.100}, expected a JSON object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file is missing or holds anything
    else."""
    try:
        return json_object(path, path.read_bytes())
    except (OSError, ValueError):
        return {}


def write_json(path: Path, content: Any, sort_keys: bool = False) -> Path:
    """Write `content` to the file `path` as JSON, and return `path`."""
    text = json.dumps(content, indent=2, sort_keys=sort_keys, default=str, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def safetensors_header(file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Return the byte where the data of a safetensors `file` begin, and {name: facts}.

    The facts are dtype, shape and data_offsets. Raises ValueError or TypeError if it is no such
    file.
    """
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return 8 + size, header


@contextlib.contextmanager
def new_directory(
    path: StrPath, force: bool = False, inputs: Iterable[StrPath] = ()
) -> Iterator[Path]:
    """Yield an empty directory that is renamed to `path` when the block ends without an error.

    After an error it is removed, and `path` stays as it was.

    Args:
        path: a new path, or an empty directory. A symbolic link to a directory stays; its target is
            replaced.
        force: whether an export, a checkpoint or a Triton model of this package at `path` may be
            replaced.
        inputs: paths that the caller reads, which must be neither `path` nor inside it.

    Raises:
        FileNotFoundError: if `path` is a broken link.
        NotADirectoryError: if it is a file.
        FileExistsError: if it exists without `force`, holds files of anyone else, is being written
            by another process, or has changed at the end. In the last case the changed directory
            stays, and the error names the folder of the result.
        ValueError: if it is the working directory, the home directory, an input, one that holds any
            of these, or a mount point that is not empty.
    """
    out = output_path(path, inputs)
    with claim_output(out) as claim:
        check_replaceable(out, force)
        before, new = file_states(out), claim / "new"
        new.mkdir(0o700)  # until it has the mode of what it replaces, which may be as private
        with full_disk_named(out):
            yield new
        set_modes(new, out, claim)
        publish(claim, out, before)


@contextlib.contextmanager
def new_file(path: StrPath, force: bool = False, inputs: Iterable[StrPath] = ()) -> Iterator[Path]:
    """Yield a temporary path to write a file to, and move the file to `path` on success.

    Raises:
        IsADirectoryError: if `path` is a directory.
        FileNotFoundError: if `path` is a broken link.
        FileExistsError: if it exists without `force`, is being written by another process, or has
            changed at the end.
        ValueError: if it is one of `inputs`.
    """
    out = output_path(path, inputs)
    with claim_output(out) as claim:
        if out.is_dir():
            raise IsADirectoryError(f"{out} is a directory, expected a file or a new path")
        if out.exists() and not force:
            raise FileExistsError(
                f"{out} exists already, expected a new path, or --force to replace it"
            )
        before, folder = file_states(out), claim / "writing"
        folder.mkdir(0o700)
        with full_disk_named(out):
            yield folder / out.name  # matplotlib reads the image format from the name
        set_modes(folder / out.name, out, claim)
        (folder / out.name).rename(claim / "new")
        publish(claim, out, before)


def replace_text(path: Path, text: str) -> None:
    """Write `text` to the file `path`, which is replaced in one step and keeps its mode.

    A link at `path` is replaced, not followed.
    """
    new = path.with_name(f".{secrets.token_hex(16)}.new")
    try:
        with open(new, "x", encoding="utf-8") as file:  # follows no link
            file.write(text)
        if path.is_file():
            shutil.copymode(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def full_disk_named(out: Path) -> Iterator[None]:
    """Add the name of `out` to the error of a full disk, which names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        raise OSError(
            error.errno, f"{error.strerror} while {out} was written, expected room for all of it"
        ) from error


# ----------------------------------------------------------------------------- what may be replaced


def output_path(path: StrPath, inputs: Iterable[StrPath] = ()) -> Path:
    """Return the real path of `path`, if something may be written there.

    Raises:
        FileNotFoundError: if `path` is a link that leads nowhere.
        ValueError: if it is the working directory, the home directory, one of `inputs`, or holds
            any of these.
    """
    if os.path.islink(path) and not os.path.exists(path):
        raise FileNotFoundError(
            f"{path} is a link to {os.readlink(path)}, which does not exist: expected a new path"
        )
    out = Path(os.path.realpath(path))
    if not out.exists():
        return out
    kept = {"the working directory": os.getcwd(), "the home directory": os.path.expanduser("~")}
    kept |= {f"the input {name}": name for name in inputs if os.path.exists(name)}
    for what, place in kept.items():
        place = Path(os.path.realpath(place))
        if any(
            os.path.exists(parent) and os.path.samefile(out, parent)
            for parent in (place, *place.parents)
        ):
            raise ValueError(f"{path} is or contains {what}, expected a path that does not")
    return out


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

    These are configs of image processors and sentence-transformers, and files in the folder of a
    module that modules.json names.
    """
    try:
        modules = json.loads((directory / MODULES).read_bytes())
        module_paths = {module["path"] for module in modules}
    except (OSError, ValueError, TypeError, KeyError):
        module_paths = set()
    matches = [match for match in map(OF_MODULE.fullmatch, files) if match]
    of_modules = {match[0] for match in matches if match[1] in module_paths}
    return of_modules | {name for name in files if COMPANION.fullmatch(name)}


def file_states(path: Path) -> dict[str, tuple] | None:
    """Return {relative path: state} of the files in or at `path`, or None if nothing is there.

    A state is the inode, with size and modification time of a regular file; renaming does not
    change it.
    """
    if not path.exists():
        return None
    names = relative_files(path) if path.is_dir() else [""]
    states = {name: (path / name).lstat() for name in names if not IGNORED & {*Path(name).parts}}
    return {
        name: (
            state.st_ino,
            *((state.st_size, state.st_mtime_ns) if S_ISREG(state.st_mode) else ()),
        )
        for name, state in states.items()
    }


# ------------------------------------------------------------------------------------ one at a time


@contextlib.contextmanager
def claim_output(out: Path) -> Iterator[Path]:
    """Yield the claim of `out`, a locked folder next to it.

    The work of a killed process in the folder is finished or undone first. Afterwards the folder is
    removed.

    Raises:
        FileExistsError: if another process of this machine has the claim, or if the folder's name
            is taken.
    """
    claim = out / ".partial" if os.path.ismount(out) else out.with_name(f".{out.name}.partial")
    created = [folder for folder in claim.parents if not folder.exists()]
    claim.parent.mkdir(parents=True, exist_ok=True)
    try:
        with hold_lock(claim, out):
            check_ours(claim)
            settle(claim, out)
            if left := sorted(claim.iterdir()):
                raise FileExistsError(f"{left[0]} of a killed run cannot be removed: remove it")
            try:
                yield claim
            finally:
                settle(claim, out)
                with contextlib.suppress(OSError):
                    claim.rmdir()
    finally:
        for folder in created:  # new parent folders that stayed empty
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def hold_lock(claim: Path, out: Path) -> Iterator[None]:
    """Make the folder `claim` if needed, and hold its lock in the block, where the system has such
    locks.

    Raises FileExistsError if another process has the lock, with `out` in the message, and for a
    link or a file in place of the folder.
    """
    while True:
        make_claim(claim)
        if fcntl is None:
            yield
            return
        try:
            handle = os.open(claim, os.O_RDONLY)
        except FileNotFoundError:  # the previous process removed it
            continue
        try:
            lock(handle, out)
            if is_same_file(handle, claim):
                yield
                return
        finally:
            os.close(handle)


def make_claim(claim: Path) -> None:
    """Make the folder `claim` if it is not there. Raise FileExistsError for a link or a file in its
    place."""
    if claim.is_symlink() or (claim.exists() and not claim.is_dir()):
        raise FileExistsError(
            f"{claim} was not written by vanilla-transformer, expected nothing there: move it away"
        )
    claim.mkdir(exist_ok=True)


def lock(handle: int, out: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(
            f"{out} is being written by another process, expected no other writer"
        ) from None


def is_same_file(handle: int, path: Path) -> bool:
    """Return True if `path` is still the file or directory that `handle` has open."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def check_ours(claim: Path) -> None:
    """Raise FileExistsError for an entry of `claim`, the folder that a run works in, that no run of
    this package makes."""
    if foreign := sorted({path.name for path in claim.iterdir()} - PARTS):
        raise FileExistsError(
            f"{claim / foreign[0]} was not written by vanilla-transformer, expected nothing "
            f"else in {claim}"
        )


# ---------------------------------------------------------------------------------- taking the name


def publish(claim: Path, out: Path, before: dict | None) -> None:
    """Rename `claim/new` to `out`, if `out` is still in the state `before`, a result of
    `file_states`.

    Otherwise raises FileExistsError. What is at `out` then stays, and the message names the folder
    of the result.
    """
    new, ready, old = (claim / name for name in ("new", "ready", "old"))
    try:
        if os.path.ismount(out):
            check_replaceable(out, force=False)
            new.rename(ready)
            move_entries(ready, out)
            return
        if before is not None and out.exists():
            out.rename(old)
            if file_states(old) != before:
                raise FileExistsError("it changed while the new one was written")
        place(new, out)
    except (OSError, ValueError) as error:
        if old.exists() and not out.exists():
            old.rename(out)
        kept = {"the result": new, "the rest of the result": ready, "what was there before": old}
        places = [f"{what} is in {keep(path, out)}" for what, path in kept.items() if path.exists()]
        raise FileExistsError(
            f"{out} cannot be replaced, {error}: what is there stays, {', '.join(places)}"
        ) from error


def place(path: Path, out: Path) -> None:
    """Rename `path` to `out`, where nothing may be, except an empty directory if `path` is one too.

    Raises FileExistsError or another OSError otherwise."""
    if path.is_dir():
        path.rename(out)
        return
    try:
        os.link(path, out)  # rename would silently replace a file
    except OSError:
        if not os.path.lexists(out):  # the file system has no links
            path.rename(out)
            return
        if out.is_symlink() or not path.samefile(out):
            raise FileExistsError(f"{out} exists") from None
    path.unlink()


def keep(path: Path, out: Path) -> Path:
    """Move `path` to a free name beside `out`, and return the new path."""
    folder = out if os.path.ismount(out) else out.parent
    number = 1
    while (kept := folder / f"{out.name}.kept-{number}").exists():
        number += 1
    path.rename(kept)
    return kept


def move_entries(source: Path, target: Path) -> None:
    """Move the entries of `source` to `target`; the manifest or config, which marks them complete,
    is last."""
    for entry in sorted(
        source.iterdir(), key=lambda path: (path.name == MANIFEST, path.name == CONFIG, path.name)
    ):
        place(entry, target / entry.name)


def settle(claim: Path, out: Path) -> None:
    """Finish or undo the work of a run that stopped at any point, and empty its folder `claim`.

    Afterwards `out` is as it was before the run, or as it was meant to become.

    Raises:
        FileExistsError: if what was at `out` cannot come back because something else is there.
    """
    old, new, ready = claim / "old", claim / "new", claim / "ready"
    if ready.exists():
        move_entries(ready, out)
    if old.exists() and not out.exists():
        place(old, out)
    elif old.exists() and new.exists() and not new.samefile(out):
        raise FileExistsError(
            f"{out} was written while its last version stood in {old}: move one of them away"
        )
    elif old.exists():
        old.rename(claim / "trash")
    for part in claim.iterdir():
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink()


def set_modes(path: Path, out: Path, claim: Path) -> None:
    """Give `path` and everything in it the file modes of what they replace in `out`.

    New entries get the mode of the folder `claim`, which follows the umask. Some libraries write
    files that only their owner may read.
    """
    mode = claim.stat().st_mode & 0o777
    for entry in (path, *path.rglob("*")):
        replaced = out / entry.relative_to(path)
        if replaced.exists() and replaced.is_dir() == entry.is_dir():
            entry.chmod(replaced.stat().st_mode & 0o777)
        else:
            entry.chmod(mode if entry.is_dir() else mode & 0o666)
