"""Git LFS pointers: small text files in place of large files in a clone without git-lfs."""

import os
from pathlib import Path

POINTER = b"version https://git-lfs.github.com/spec/"  # first bytes of every pointer


def check_no_pointer(path: str | os.PathLike) -> None:
    """Raise ValueError if the file `path` is a Git LFS pointer. Ignore missing files."""
    if not Path(path).is_file():
        return
    with open(path, "rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise ValueError(
                f"{path} is a git-lfs pointer, expected the file itself: run `git lfs pull` in "
                f"the clone"
            )
