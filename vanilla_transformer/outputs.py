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
import filecmp
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from io import BufferedRandom
from pathlib import Path
from stat import S_IMODE, S_ISREG

from .files import CONFIG, MANIFEST, file_stamp
from .our_files import IGNORED, check_replaceable, relative_files

try:
    import fcntl
except ImportError:  # missing on Windows
    fcntl = None  # type: ignore[assignment]

StrPath = str | os.PathLike

PARTS = {"writing", "new", "ready", "old", "trash"}  # entries of a claim
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.new")  # the name of a file until it is whole


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
        PermissionError: if it is a directory that the process may not write to.
        FileExistsError: if it exists without `force`, holds files of anyone else, is being written
            by another process, or has changed at the end. In the last case the changed directory
            stays, and the error names the folder of the result.
        ValueError: if it is the working directory, the home directory, an input, one that holds any
            of these, or a mount point that is not empty.
    """
    out = output_path(path, inputs)
    with claim_output(out) as claim:
        check_replaceable(out, force)
        if out.exists() and not os.access(out, os.W_OK):  # then it cannot be renamed either
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(out))
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


# ---------------------------------------------------------------------------------- a single file


@contextlib.contextmanager
def temporary_file(folder: Path) -> Iterator[BufferedRandom]:
    """Yield a new file in `folder` with a name that nobody can foresee, for writing and reading.

    Unless it was moved, it is removed afterwards.
    """
    new = folder / f".{secrets.token_hex(16)}.new"
    try:
        with open(new, "x+b") as file:  # follows no link and opens no file that is there
            yield file
    finally:
        new.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write `text` to the file `path`, which is replaced in one step and keeps its mode.

    A link at `path` is replaced, not followed.
    """
    with temporary_file(path.parent) as file:
        file.write(text.encode())
        file.close()
        if path.is_file():
            shutil.copymode(path, file.name)
        os.replace(file.name, path)


def regular_file(path: Path) -> os.stat_result | None:
    """Return the status of the file `path`. It is None if nothing is there, or anything but a
    file, also a link."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status if S_ISREG(status.st_mode) else None


@contextlib.contextmanager
def whole_file(path: Path, folder: Path, before: os.stat_result | None) -> Iterator[BufferedRandom]:
    """Yield a new file for writing and reading. It becomes `path` when the block ends without an
    error.

    Until then it is a `temporary_file` in `folder`, on the file system of `path`. After an error it
    is removed. `before` is the `regular_file` that it may replace, whose mode it gets, or None.

    Raises:
        FileExistsError: if anything but `before` or a file of the same content is at `path` at the
            end. It stays.
    """
    with temporary_file(folder) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        if before is not None:
            os.chmod(file.name, S_IMODE(before.st_mode))
        publish_file(Path(file.name), path, before)


def publish_file(new: Path, path: Path, before: os.stat_result | None) -> None:
    """Move the file `new` to `path`, where nothing may be but the file `before`.

    A file of the same content stays; a run that was killed may have moved it there. Raises
    FileExistsError for anything else.
    """
    if before is not None and is_unchanged(path, before):
        os.replace(new, path)
        return
    try:
        place(new, path)
    except FileExistsError:
        if regular_file(path) is None or not filecmp.cmp(new, path, shallow=False):
            raise changed(path) from None


def remove_file(path: Path, before: os.stat_result | None) -> None:
    """Remove the file `before` from `path`. Raises FileExistsError if anything else is there."""
    if is_unchanged(path, before):
        path.unlink(missing_ok=True)
    elif os.path.lexists(path):
        raise changed(path)


def is_unchanged(path: Path, before: os.stat_result | None) -> bool:
    """Return True if the file `before` is at `path`, or if both are missing."""
    now = regular_file(path)
    if before is None or now is None:
        return before is None and not os.path.lexists(path)
    return file_stamp(now) == file_stamp(before)


def changed(path: Path) -> FileExistsError:
    return FileExistsError(
        f"{path} was written by another process meanwhile, expected no other writer: it stays"
    )


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
