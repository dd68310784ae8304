"""Outputs: directories and files that appear whole or not at all, and take the place only of what we wrote.

While OUT is being made, `.OUT.partial` stands beside it (or `OUT/.partial` inside, if OUT is a mount point, which cannot be
renamed). Making it claims OUT for one process, whose folder in it holds

    new      what is being written
    ready    `new`, whole, while its entries move into a mount point
    old      what OUT was, from when it is moved aside until `new` has its name
    trash    what OUT was, afterwards

so that whoever finds the folder of a process that has died knows what is left to do.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from stat import S_ISREG
from urllib.parse import quote

import psutil

StrPath = str | os.PathLike

MANIFEST, CARD = "manifest.json", "README.md"  # of an export
CONFIG = "config.json"  # of a checkpoint
WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"  # of a checkpoint, whole
TRITON_CONFIG = "config.pbtxt"  # of a model of Triton Inference Server
TRITON_MARK = "# Written by vanilla-transformer export."  # its first line
TRITON_FILE = re.compile(r"config\.pbtxt|1/model\.onnx(/\w+\.onnx(_data)?)?")
IMAGE_PROCESSOR = "preprocessor_config.json"
MODULES = "modules.json"  # of sentence-transformers, what is done with the states of a model
VERSION_KEY = "vanilla_transformer_version"  # in the config of a checkpoint that we wrote for another library
MODEL_TYPE = re.compile(r"vanilla-(encoder|decoder|seq2seq|vision)")
VOCABULARIES = (  # a checkpoint with one of these has a tokenizer
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "source.spm",
    "target.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer_config.json",  # all there is of a tokenizer of bytes
)
TARGET_TOKENIZER = "target_tokenizer.json"  # of target text, where that is cut otherwise than source text
TOKENIZER_FILES = (
    *VOCABULARIES,
    TARGET_TOKENIZER,
    "target_vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
CHECKPOINT_FILE = re.compile(
    r"(config|generation_config|training|model\.safetensors\.index)\.json|model(-\d{5}-of-\d{5})?\.safetensors"
    r"|README\.md|curves\.png|(configuration|layers|modeling|pipelines)_vanilla_transformer\.py|"
    + "|".join(map(re.escape, TOKENIZER_FILES))
)
EXPORT_FILE = re.compile(
    r"(config|generation_config|genai_config|tokenizer_config|(target_)?tokenizer)\.json|onnx/\w+\.onnx(_data)?"
)
# Of image processors and sentence-transformers, in both; the second kind are of a module, in its folder.
COMPANION = re.compile(r"(preprocessor_config|modules|config_sentence_transformers|sentence_[\w-]+_config)\.json")
OF_MODULE = re.compile(r"([\w-]+)/(config\.json|model\.safetensors|pytorch_model\.bin)")
IGNORED = {"__pycache__", ".DS_Store"}  # what systems put anywhere
IGNORED_ON_MOUNT = {"lost+found", ".partial"}
NAMED = 5  # entries of others that an error names
CLAIM_SECONDS = 1.0  # from making the claim to putting a name to it, at most
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
SAME_START = 60.0  # seconds by which two readings of the start of one process may differ: clocks are corrected


LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # the first bytes of all of them


def check_no_pointer(path: str | os.PathLike) -> None:
    """Raise ValueError if the file `path` is a pointer of git-lfs, of a clone that was made without git-lfs."""
    if not Path(path).is_file():
        return
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{path} is a git-lfs pointer, expected the file itself: run `git lfs pull` in the clone")


@contextlib.contextmanager
def new_directory(path: StrPath, force: bool = False, inputs: Iterable[StrPath] = ()) -> Iterator[Path]:
    """Yields an empty directory that takes the name `path` when the block ends without an error.

    Args:
        path: a new path, or an empty directory. A symbolic link to a directory stays, what it leads to is replaced.
        force: whether what is at `path` may be replaced, if it is an export or a checkpoint that we wrote.
        inputs: paths that the caller reads, which must be neither `path` nor inside it.

    Raises:
        FileNotFoundError: if `path` is a link that leads nowhere.
        NotADirectoryError: if it is a file.
        FileExistsError: if it exists and `force` is not given; if it holds anything that we do not write; if another process is
            writing it; and, at the end, if it has changed since: what is there then stays, and the result beside it is named.
        ValueError: if it is the working directory, the home directory, an input, one that holds any of these, or a mount point
            that is not empty.
    """
    out = output_path(path, inputs)
    with claimed(out) as claim:
        check_replaceable(out, force)
        before, new = state_of(out), claim / "new"
        new.mkdir()
        with full_disk_named(out):
            yield new
        set_modes(new, claim)
        publish(claim, out, before)


@contextlib.contextmanager
def new_file(path: StrPath, force: bool = False, inputs: Iterable[StrPath] = ()) -> Iterator[Path]:
    """As `new_directory`, for one file: yields the path to write it to.

    Raises:
        IsADirectoryError: if `path` is a directory.
        FileNotFoundError, FileExistsError, ValueError: as `new_directory`.
    """
    out = output_path(path, inputs)
    with claimed(out) as claim:
        if out.is_dir():
            raise IsADirectoryError(f"{out} is a directory, expected a file or a new path")
        if out.exists() and not force:
            raise FileExistsError(f"{out} exists already; expected a new path, or --force to replace it")
        before, folder = state_of(out), claim / "writing"
        folder.mkdir()
        with full_disk_named(out):
            yield folder / out.name  # the format of an image is told by its name
        (folder / out.name).rename(claim / "new")
        set_modes(claim / "new", claim)
        publish(claim, out, before)


@contextlib.contextmanager
def full_disk_named(out: Path) -> Iterator[None]:
    """Have the error of a full disk, which names no file, say that it was `out` that found no room."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        raise OSError(error.errno, f"{error.strerror} while {out} was written, expected room for all of it") from error


# ------------------------------------------------------------------------------------------------- what may be replaced


def output_path(path: StrPath, inputs: Iterable[StrPath] = ()) -> Path:
    """The place that `path` leads to, where something may be written, if only what we wrote is there.

    Raises:
        FileNotFoundError: if `path` is a link that leads nowhere.
        ValueError: if it is the working directory, the home directory, one of `inputs`, or holds any of these.
    """
    if os.path.islink(path) and not os.path.exists(path):
        raise FileNotFoundError(f"{path} is a link to {os.readlink(path)}, which does not exist: expected a new path")
    out = Path(os.path.realpath(path))
    if not out.exists():
        return out
    kept = {"the working directory": os.getcwd(), "the home directory": os.path.expanduser("~")}
    kept |= {f"the input {name}": name for name in inputs if os.path.exists(name)}
    for what, place in kept.items():
        place = Path(os.path.realpath(place))
        if any(os.path.exists(found) and os.path.samefile(out, found) for found in (place, *place.parents)):
            raise ValueError(f"{path} is {what} or holds it: expected a path whose replacement leaves that alone")
    return out


def entries_of(directory: Path) -> list[str]:
    ignored = IGNORED_ON_MOUNT if os.path.ismount(directory) else set()
    return sorted(entry for entry in os.listdir(directory) if entry not in ignored)


def named(names: list[str]) -> str:
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest


def check_replaceable(directory: Path, force: bool) -> None:
    """Raises as `new_directory` unless `directory` is missing, empty, or with `force` ours alone."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file, expected a directory or a new path")
    if not (entries := entries_of(directory)):
        return
    if os.path.ismount(directory):
        raise ValueError(f"{directory} is a mount point that holds {named(entries)}: expected an empty one")
    if not force:
        raise FileExistsError(f"{directory} exists already; expected a new path, or --force to replace it")
    ours = files_of_export(directory) or files_of_checkpoint(directory) or files_of_triton_model(directory)
    if not ours:
        found = f"{directory} holds {named(entries)}"
        raise FileExistsError(f"{found}: expected an export or a checkpoint that vanilla-transformer wrote, nothing else")
    found = {path for path in relative_files(directory) if not IGNORED & {*Path(path).parts}}
    if foreign := sorted(found - ours):
        raise FileExistsError(f"{directory} also holds {named(foreign)}, which vanilla-transformer did not write: move it away")


def relative_files(directory: Path) -> Iterator[str]:
    """All that is in `directory` but folders that hold something, as paths with slashes; links are not followed."""
    for folder, names, files in os.walk(directory):
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]
        for name in [*files, *links] or ([] if names else [""]):
            yield (Path(folder) / name).relative_to(directory).as_posix()


def files_of_export(directory: Path) -> set[str]:
    """Those that its manifest lists, the manifest and the card; none if there is no manifest of ours."""
    manifest = read_object(directory / MANIFEST)
    files = manifest.get("files")
    if not {"schema_version", "architecture", "model_type"} <= manifest.keys() or not isinstance(files, dict):
        return set()
    return {MANIFEST, CARD, *(name for name in files if EXPORT_FILE.fullmatch(name)), *companions_in(directory, files)}


def files_of_checkpoint(directory: Path) -> set[str]:
    """Those whose names are a checkpoint's; none if its config is not one that we wrote."""
    config = read_object(directory / CONFIG)
    is_ours = VERSION_KEY in config or MODEL_TYPE.fullmatch(str(config.get("model_type")))
    if not is_ours:
        return set()
    files = list(relative_files(directory))
    return {*(name for name in files if CHECKPOINT_FILE.fullmatch(name)), *companions_in(directory, files)}


def files_of_triton_model(directory: Path) -> set[str]:
    """Those whose names are such a model's; none if its configuration is not one that we wrote."""
    try:
        is_ours = (directory / TRITON_CONFIG).read_text(encoding="utf-8").startswith(TRITON_MARK)
    except (OSError, ValueError):
        return set()
    return {name for name in relative_files(directory) if TRITON_FILE.fullmatch(name)} if is_ours else set()


def companions_in(directory: Path, files: Iterable[str]) -> set[str]:
    """Those of `files` that are an image processor's or sentence-transformers' own, or of a module that modules.json names."""
    modules = json_or_none(directory / MODULES)
    named = {module.get("path") for module in modules if isinstance(module, dict)} if isinstance(modules, list) else set()
    of_modules = {name for name in files if (found := OF_MODULE.fullmatch(name)) and found[1] in named}
    return of_modules | {name for name in files if COMPANION.fullmatch(name)}


def read_object(path: Path) -> dict:
    """The JSON object in a file; an empty one if it holds anything else."""
    found = json_or_none(path)
    return found if isinstance(found, dict) else {}


def json_or_none(path: Path) -> object:
    """`None` if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def state_of(path: Path) -> dict[str, tuple] | None:
    """Which files are in the directory `path`, or at it; renaming it changes nothing of that."""
    if not path.exists():
        return None
    names = relative_files(path) if path.is_dir() else [""]
    found = {name: (path / name).lstat() for name in names if not IGNORED & {*Path(name).parts}}
    return {
        name: (state.st_ino, *((state.st_size, state.st_mtime_ns) if S_ISREG(state.st_mode) else ()))
        for name, state in found.items()
    }


# ------------------------------------------------------------------------------------------------------- one at a time


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[Path]:
    """Yields this process's folder beside `out`; while it is there, no other process gets one.

    Raises:
        FileExistsError: if another process has one, or may have: which of another machine cannot be known here.
    """
    claims = claims_of(out)
    created = [folder for folder in claims.parents if not folder.exists()]
    claims.parent.mkdir(parents=True, exist_ok=True)
    try:
        claim = make_claim(claims, out)
        try:
            yield claim
        finally:
            settle(claim, out)
    finally:
        for folder in created:  # those in which nothing came to be
            with contextlib.suppress(OSError):
                folder.rmdir()


def claims_of(out: Path) -> Path:
    return out / ".partial" if os.path.ismount(out) else out.with_name(f".{out.name}.partial")


def make_claim(claims: Path, out: Path) -> Path:
    """The folder of this process. What processes that have died left is settled first."""
    if claims.is_symlink() or (claims.exists() and not claims.is_dir()):
        raise FileExistsError(f"{claims} is no directory of ours, expected nothing there: move it away")
    own = claims / owner()
    abandoned = time.monotonic() + CLAIM_SECONDS
    while True:
        try:
            claims.mkdir()
            own.mkdir()
            others = [claim for claim in claims.iterdir() if claim != own]
        except FileExistsError:
            settle_dead(claims, out, time.monotonic() > abandoned)
        except FileNotFoundError:  # another process took it for abandoned
            continue
        else:
            if not others:
                return own
            own.rmdir()
            check_dead(others[0], out)


def settle_dead(claims: Path, out: Path, is_abandoned: bool) -> None:
    """Removes `claims` if all who made one have died; an empty one is about to get its name, unless it `is_abandoned`."""
    try:
        found = sorted(claims.iterdir())
        for claim in found:
            check_dead(claim, out)
            settle(claim, out)
            if claim.exists():
                raise FileExistsError(f"{claim}, which a run that was killed left, cannot be removed: remove it")
        if not found and is_abandoned:
            claims.rmdir()
        elif not found:
            time.sleep(CLAIM_SECONDS / 20)
    except FileNotFoundError:  # another process was faster
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def owner() -> str:
    return f"{host()}-{os.getpid()}-{int(psutil.Process().create_time())}"


def host() -> str:
    """Where process ids mean the same: containers of one machine have their own, also if its name is theirs too."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return quote(f"{socket.gethostname()}-{namespace}", safe="")


def check_dead(claim: Path, out: Path) -> None:
    """Raises FileExistsError unless `claim` is of a process of this machine that is no more."""
    parts = claim.name.rsplit("-", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise FileExistsError(f"{claim} is of no run of vanilla-transformer: expected nothing else in {claim.parent}")
    where, process, start = parts[0], int(parts[1]), int(parts[2])
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start))
    if where != host():
        keep = f"move {claim / 'old'} back to {out} and " if (claim / "old").exists() else ""
        run = f"process {process} of {where}, started {since}"
        raise FileExistsError(f"{out} is being written by {run}, another machine: if that is over, {keep}remove {claim.parent}")
    try:
        found = psutil.Process(process)
        is_alive = abs(found.create_time() - start) < SAME_START and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return
    if is_alive:
        raise FileExistsError(f"{out} is being written by process {process}, started {since}: expected to be alone")


# ---------------------------------------------------------------------------------------------------- taking the name


def publish(claim: Path, out: Path, before: dict | None) -> None:
    """Gives `claim/new` the name `out`, if what is there is still what was there `before`."""
    new, ready, old = (claim / name for name in ("new", "ready", "old"))
    try:
        if os.path.ismount(out):
            check_replaceable(out, force=False)
            new.rename(ready)
            move_entries(ready, out)
            return
        if before is not None and out.exists():
            out.rename(old)
            if state_of(old) != before:
                raise FileExistsError("it is another than when this began")
        place(new, out)
    except (OSError, ValueError) as error:
        if old.exists() and not out.exists():
            old.rename(out)
        kept = {"the result": new, "the rest of the result": ready, "what was there before": old}
        places = [f"{what} is in {keep(path, out)}" for what, path in kept.items() if path.exists()]
        raise FileExistsError(f"{out} cannot be replaced, {error}: what is there stays, {', '.join(places)}") from error


def place(path: Path, out: Path) -> None:
    """Renames `path`; raises FileExistsError or OSError if anything but an empty directory is at `out`."""
    if path.is_dir():
        path.rename(out)
        return
    try:
        os.link(path, out)  # a file is renamed onto another without a word
    except OSError:
        if not out.exists():  # a file system without links
            path.rename(out)
            return
        if not path.samefile(out):  # as it is for a process that was killed between the two
            raise FileExistsError(f"{out} exists") from None
    path.unlink()


def keep(path: Path, out: Path) -> Path:
    """Moves `path` to a free name beside `out`."""
    folder = out if os.path.ismount(out) else out.parent
    number = 1
    while (kept := folder / f"{out.name}.kept-{number}").exists():
        number += 1
    path.rename(kept)
    return kept


def move_entries(source: Path, target: Path) -> None:
    """The manifest or config, which marks the rest as whole, comes last."""
    for entry in sorted(source.iterdir(), key=lambda path: (path.name == MANIFEST, path.name == CONFIG, path.name)):
        place(entry, target / entry.name)


def settle(claim: Path, out: Path) -> None:
    """Ends the run of `claim`, wherever it stopped: `out` is as it was before, or as it was to be, and the claim is gone.

    Raises:
        FileExistsError: if what was at `out` cannot come back because something else is there.
    """
    old, new, ready = claim / "old", claim / "new", claim / "ready"
    if ready.exists():
        move_entries(ready, out)
    if old.exists() and not out.exists():
        place(old, out)
    elif old.exists() and new.exists() and not new.samefile(out):
        raise FileExistsError(f"{out} was written while its last version stood in {old}: move one of them away")
    elif old.exists():
        old.rename(claim / "trash")
    shutil.rmtree(claim, ignore_errors=True)
    with contextlib.suppress(OSError):
        claim.parent.rmdir()


def set_modes(path: Path, claim: Path) -> None:
    """The modes that the umask gives, as `claim` has them: some libraries write files that only their owner may read."""
    mode = claim.stat().st_mode & 0o777
    for found in (path, *path.rglob("*")):
        found.chmod(mode if found.is_dir() else mode & 0o666)
