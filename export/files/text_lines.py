"""Lines of UTF-8 text, from a file or standard input."""

import hashlib
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..shared.compression import decompression_errors, open_lines

LONGEST = 1_000_000  # bytes of a line
ENDLESS = 1_000_000_000  # bytes of what is no line: a device such as /dev/zero never ends one
LINE_BREAKS = re.compile(r"[\r\n]+")


def raw_lines(file: BinaryIO | io.BufferedIOBase, name: str) -> Iterator[bytes]:
    """Yield lines of bytes without LF or CRLF, and without a byte order mark at the start of the
    file.

    A line of more than `LONGEST` bytes is cut, but stays longer than `LONGEST`, so that
    `decode_line` rejects it. `name` is the file, for errors.

    Raises:
        ValueError: for a damaged compressed file, and a line of more than `ENDLESS` bytes.
    """
    max_bytes = LONGEST + 5  # with a byte order mark and the end
    with decompression_errors(name):
        for number in itertools.count(1):
            line = file.readline(max_bytes)
            if not line:
                return
            is_cut = len(line) == max_bytes and not line.endswith(b"\n")
            line = (
                line.removesuffix(b"\r\n") if line.endswith(b"\r\n") else line.removesuffix(b"\n")
            )
            yield line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            for _ in range(ENDLESS // max_bytes):
                if not is_cut or not (rest := file.readline(max_bytes)):
                    break
                is_cut = not rest.endswith(b"\n")
            else:
                raise ValueError(
                    f"line {number} of {name} is longer than {ENDLESS:,} bytes, expected lines of "
                    f"text"
                )


def decode_line(line: bytes, name: str) -> str:
    """Return the text of a line. `name` stands for the line in errors.

    Raises:
        ValueError: for a line that is not UTF-8 or has more than `LONGEST` bytes.
    """
    if len(line) > LONGEST:
        raise ValueError(f"{name} is longer than {LONGEST:,} bytes, expected at most {LONGEST:,}")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from None


def decode_lines(file: BinaryIO | io.BufferedIOBase, name: str) -> Iterator[str]:
    """Yield the text of each line. `name` is the file, for errors.

    Raises:
        ValueError: for a damaged compressed file, and for a line that is not UTF-8 or too long.
    """
    for number, line in enumerate(raw_lines(file, name), 1):
        yield decode_line(line, f"line {number} of {name}")


def read_lines(path: Path) -> Iterator[str]:
    """Yield the text of each line of a file, plain or compressed.

    Raises:
        ValueError: for a compression that cannot be read, a git-lfs pointer, a damaged file, and a
            line that is not UTF-8 or too long.
    """
    with open_lines(path) as file:
        yield from decode_lines(file, str(path))


def hash_lines(lines: list[bytes]) -> str:
    """Return the SHA-256 of the lines, joined by LF, in hexadecimal."""
    return hashlib.sha256(b"\n".join(lines)).hexdigest()
