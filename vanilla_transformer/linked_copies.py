"""Temporary directories with links to the files of a checkpoint, some of them replaced."""

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory


def linked_copy(directory: Path, without: Collection[str]) -> TemporaryDirectory:
    """Return a temporary directory with links to the entries of `directory`, except those whose
    names are in `without`. It exists while the caller keeps the result."""
    copy = TemporaryDirectory(prefix="vanilla-transformer-")
    for file in directory.resolve().iterdir():
        if file.name not in without:
            Path(copy.name, file.name).symlink_to(file)
    return copy


@contextlib.contextmanager
def errors_name(directory: Path, copy: Path) -> Iterator[None]:
    """Replace the path `copy` with `directory` in messages of ValueError and FileNotFoundError.

    An error with another message is a plain ValueError or FileNotFoundError."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        if directory == copy or str(copy) not in str(error):
            raise
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(str(error).replace(str(copy), str(directory))) from None
