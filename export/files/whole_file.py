"""A file that appears whole or not at all, and replaces only what it may replace."""

import contextlib
import filecmp
import os
import re
import secrets
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path
from stat import S_IMODE, S_ISREG

from ..inference.export_info import file_stamp
from ..shared.files import place

TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.new")  # the name of a file until it is whole


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

    Until then it is in `folder`, on the file system of `path`, with a name that nobody can foresee.
    After an error it is removed. `before` is the `regular_file` that it may replace, whose mode it
    gets, or None.

    Raises:
        FileExistsError: if anything but `before` or a file of the same content is at `path` at the
            end. It stays.
    """
    new = folder / f".{secrets.token_hex(16)}.new"
    try:
        with open(new, "x+b") as file:  # follows no link and opens no file that is there
            yield file
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            new.chmod(S_IMODE(before.st_mode))
        publish(new, path, before)
    finally:
        new.unlink(missing_ok=True)


def publish(new: Path, path: Path, before: os.stat_result | None) -> None:
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


def remove(path: Path, before: os.stat_result | None) -> None:
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
