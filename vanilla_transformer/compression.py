"""Compressed files of lines: decompress what the standard library can, and reject the rest by its
name or first bytes."""

import contextlib
import gzip
import importlib
import io
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from .files import check_no_pointer


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
CHUNK = 2**16  # bytes that are decompressed together


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
    suffix = Path(path.name).suffix
    compression = COMPRESSIONS.get(suffix)
    if compression is None or compression.module is None:
        return open(path, "rb")
    module = importlib.import_module(compression.module)
    match suffix:
        case ".bz2":
            chunks = streams(path, module.BZ2Decompressor)
        case ".xz":
            chunks = streams(path, lambda: module.LZMADecompressor(module.FORMAT_XZ), padding=4)
        case _:
            return module.open(path, "rb")
    return io.BufferedReader(Chunks(chunks))


def streams(path: Path, new: Callable[[], Any], padding: int = 0) -> Generator[bytes, None, None]:
    """Yield the decompressed bytes of all streams of a file, for each of which `new` makes a
    decompressor.

    After a stream there may be zeros, if their number is a multiple of `padding`. (The standard
    library ignores whatever follows the first stream and is damaged.)
    """
    with open(path, "rb") as file:
        rest = file.read(CHUNK)
        while True:
            decompressor = new()
            while not decompressor.eof:
                if decompressor.needs_input and not (rest := rest or file.read(CHUNK)):
                    raise EOFError("it ends within a stream")
                yield decompressor.decompress(rest, CHUNK)
                rest = b""
            rest = decompressor.unused_data or file.read(CHUNK)
            zeros = 0
            while padding and rest.startswith(b"\0"):
                zeros += len(rest) - len(rest := rest.lstrip(b"\0"))
                rest = rest or file.read(CHUNK)
            if padding and zeros % padding:
                raise EOFError(f"{zeros} zeros follow a stream, expected a multiple of {padding}")
            if not rest:
                return


class Chunks(io.RawIOBase):
    """The bytes of `chunks` as a file."""

    def __init__(self, chunks: Generator[bytes, None, None]):
        self.chunks = chunks
        self.rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.rest:
            if (chunk := next(self.chunks, None)) is None:
                return 0
            self.rest = chunk
        count = min(len(buffer), len(self.rest))
        buffer[:count], self.rest = self.rest[:count], self.rest[count:]
        return count

    def close(self) -> None:
        self.chunks.close()
        super().close()


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
