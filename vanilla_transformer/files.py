"""Directories and files that appear whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def refuse_existing(path: str | os.PathLike, force: bool) -> None:
    """What `new_directory` checks, for callers with long work to do before they get there."""
    if Path(path).exists() and not force:
        raise FileExistsError(f"{path} exists already; expected a new path, or --force to replace it")


@contextlib.contextmanager
def new_directory(path: str | os.PathLike, force: bool = False) -> Iterator[Path]:
    """Yields an empty directory beside `path` that takes its name when the block ends without an error.

    Raises:
        FileExistsError: if `path` exists and `force` is not given; nothing is written then.
    """
    path = Path(path)
    refuse_existing(path, force)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        partial.chmod(0o777 & ~current_umask())
        yield partial
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def new_file(path: str | os.PathLike, force: bool = False) -> Iterator[Path]:
    """As `new_directory`, for one file: yields a path to write it to."""
    path = Path(path)
    refuse_existing(path, force)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as directory:
        partial = Path(directory) / path.name
        yield partial
        partial.replace(path)


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
