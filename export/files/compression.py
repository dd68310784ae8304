"""Compressed files of lines: decompress what the standard library can, and reject the rest by its
name or first bytes."""

import contextlib
import gzip
import importlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..inference.lfs import check_no_pointer


class Compression(NamedTuple):
    """A format, the first bytes of its files, and the module of the standard library that reads it,
    if there is one."""

    name: str
    magic: re.Pattern[bytes] | None = None
    module: str | None = None


COMPRESSIONS = {
    ".gz": Compression("gzip", re.compile(rb"\x1f\x8b"), "gzip"),
    ".bz2": Compression("bzip2", re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), "bz2"),
    ".xz": Compression("xz", re.compile(rb"\xfd7zXZ\x00"), "lzma"),
    ".zst": Compression("Zstandard", re.compile(rb"\x28\xb5\x2f\xfd")),
    ".lz4": Compression("LZ4", re.compile(rb"\x04\x22\x4d\x18")),
    ".zip": Compression("zip", re.compile(rb"PK\x03\x04")),
    ".7z": Compression("7-Zip", re.compile(rb"7z\xbc\xaf\x27\x1c")),
    ".br": Compression("Brotli"),
    ".lzma": Compression("LZMA"),
    ".lzo": Compression("LZO", re.compile(rb"\x89LZO")),
    ".Z": Compression("compress", re.compile(rb"\x1f\x9d")),
    ".rar": Compression("RAR", re.compile(rb"Rar!\x1a\x07")),
    ".tar": Compression("tar"),
    ".tgz": Compression("tar and gzip"),
}
READABLE = tuple(
    suffix for suffix, compression in COMPRESSIONS.items() if compression.module is not None
)
HEAD = 64  # bytes


def without_compression(name: str) -> str:
    """Return the file name `name` without .gz, .bz2 or .xz, if it ends with one of them."""
    return name.removesuffix(Path(name).suffix) if name.endswith(READABLE) else name


def open_lines(path: Path) -> BinaryIO:
    """Open a file of lines for reading bytes, decompressed by its name. The caller closes it.

    Raises:
        ValueError: for a compression that cannot be read or that the name does not tell, and for a
            git-lfs pointer. Damage raises EOFError and others while the file is read.
    """
    check_lines(path)
    module = compression_module(path.name)
    return open(path, "rb") if module is None else module.open(path, "rb")


def compression_module(name: str) -> Any:
    """Return the module that decompresses a file of this name: gzip, bz2 or lzma, by its ending.

    Return None for any other name. That includes .zst and .zip, which `check_lines` rejects.
    """
    compression = COMPRESSIONS.get(Path(name).suffix)
    if compression is None or compression.module is None:
        return None
    return importlib.import_module(compression.module)


def check_lines(path: Path) -> None:
    """Check that the name of a file of lines tells its compression, and that it can be read.

    Only regular files are checked. The bytes of a pipe can be read only once, and a missing file
    raises FileNotFoundError when it is opened. Damage, or plain text named .gz, is noticed when the
    file is read.

    Raises:
        ValueError: for a compression that cannot be read or that the name does not tell, and for a
            git-lfs pointer.
    """
    if not path.is_file():
        return
    check_no_pointer(path)
    with open(path, "rb") as file:
        head = file.read(HEAD)
    for suffix, (name, magic, module) in COMPRESSIONS.items():
        has_suffix = suffix in (Path(path.name).suffix, Path(without_compression(path.name)).suffix)
        if has_suffix and module is None:
            raise ValueError(f"{path} is a {name} file, expected plain text, {', '.join(READABLE)}")
        if not has_suffix and magic is not None and magic.match(head):
            expected = (
                f"a name that ends with {suffix}"
                if module
                else f"plain text, {', '.join(READABLE)}"
            )
            raise ValueError(f"{path} has the first bytes of a {name} file, expected {expected}")


@contextlib.contextmanager
def decompression_errors(name: str) -> Iterator[None]:
    """Replace errors of truncated and damaged compressed files by a ValueError that names the file
    `name`.

    Other errors are raised unchanged.
    """
    try:
        yield
    except Exception as error:
        if not is_damage(error):
            raise
        suffix = Path(name).suffix
        kind = COMPRESSIONS[suffix].name if suffix in COMPRESSIONS else "compressed"
        raise ValueError(f"{name} is not a complete {kind} file: {error}") from None


def is_damage(error: Exception) -> bool:
    """Return True if `error` is what gzip, bz2 or lzma raises for a damaged file.

    bz2 raises an OSError without a number.
    """
    if (
        isinstance(error, EOFError | zlib.error | gzip.BadGzipFile)
        or type(error).__name__ == "LZMAError"
    ):
        return True
    return type(error) is OSError and error.errno is None
