"""Pointers of git-lfs: small text files that stand for large ones in a clone that was made without
git-lfs."""

import os
from pathlib import Path

POINTER = b"version https://git-lfs.github.com/spec/"  # the first bytes of all of them


def check_no_pointer(path: str | os.PathLike) -> None:
    """Raise ValueError if the file `path` is a pointer. What is no file is left to whoever opens
    it."""
    if not Path(path).is_file():
        return
    with open(path, "rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise ValueError(
                f"{path} is a git-lfs pointer, expected the file itself: run `git lfs pull` in "
                f"the clone"
            )
