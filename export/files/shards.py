"""The lines of a run, a shard at a time."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ..shared.compression import open_lines
from .rows import Row
from .text_lines import decode_line, hash_lines, raw_lines

MAX_SHARD_BYTES = 4_000_000  # after which no line is added; 4096 lines of text have fewer


class FileFormat(Protocol):
    """A file format: it reads lines or rows in shards, and writes results. `shards` yields the
    content of each shard, which the other methods take."""

    def count(self, path: Path) -> int:
        """Return the number of lines, or rows, of the file `path`. Raises ValueError if it is
        damaged."""

    def shards(self, path: Path, size: int) -> Iterator[Any]:
        """Yield the content of the file, at most `size` lines at a time. Raises ValueError where it
        is damaged."""

    def digest(self, content: Any) -> str:
        """Return the SHA-256 of the content of a shard."""

    def rows(self, content: Any) -> list[Row]:
        """Return a `Row` for each line, with the example that the task reads.

        A line that cannot be read is a row with a fault. `content` is that of a shard.
        """

    def write(self, file: BinaryIO, shard: "Shard", rows: list[Row], results: list[Any]) -> None:
        """Write the results of one shard to `file`. `rows` and `results` have an item for
        each line; the result of a bad or blank line is None."""

    def join(self, parts: Iterable[Path], file: BinaryIO) -> None:
        """Write the contents of the files `parts`, which `write` has written, one after the other
        to `file`. A table needs at least one part."""


@dataclass(frozen=True)
class Shard:
    """Lines that are read, run and written together: the `number`th shard of a file, whose first
    line is the line `first`, both counted from 0. `format` reads `content`. With `prefixes` each
    translation begins with the prefix of its line."""

    number: int
    first: int
    content: Any
    format: FileFormat
    prefixes: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self.content)

    @property
    def digest(self) -> str:
        """Hash of the lines, their prefixes and their position in the file."""
        prefixes = "" if self.prefixes is None else f" {hash_lines(self.prefixes)}"
        return f"{self.first} {self.format.digest(self.content)}{prefixes}"

    def rows(self) -> list[Row]:
        """Return a `Row` for each line, with the example that the task reads and the target prefix,
        if any.

        A line that cannot be read is a row with a `fault`, and a blank line a row without an
        example. Nothing is raised for them.
        """
        rows = self.format.rows(self.content)
        if self.prefixes is None:
            return rows
        return [with_prefix(row, line) for row, line in zip(rows, self.prefixes, strict=True)]


@dataclass(frozen=True)
class Input:
    """An input file and its format. `target_prefix` is a file with the first words of each line's
    translation, or `None`."""

    path: Path
    format: FileFormat
    target_prefix: Path | None = None

    def check_prefixes(self) -> None:
        """Raise ValueError if the file `target_prefix` does not have one line for each input line.

        Without `target_prefix`, do nothing."""
        if self.target_prefix is None:
            return
        with open_lines(self.target_prefix) as file:
            count = sum(1 for _ in raw_lines(file, str(self.target_prefix)))
        expected = self.format.count(self.path)
        if count != expected:
            raise ValueError(
                f"{self.target_prefix} has {count} lines, expected {expected} as {self.path}"
            )

    def shards(self, size: int) -> Iterator[Shard]:
        """Yield the file in shards of `size` lines, with their target prefixes.

        The last shard may have fewer lines; shards of long lines and of tables may, too. A file
        without lines has no shards, but a table without rows has an empty one. Raises ValueError
        where the file is damaged.
        """
        shards = number_shards(self.format.shards(self.path, size), self.format)
        if self.target_prefix is None:
            yield from shards
            return
        with open_lines(self.target_prefix) as file:
            prefixes = raw_lines(file, str(self.target_prefix))
            for shard in shards:
                yield replace(shard, prefixes=list(itertools.islice(prefixes, len(shard))))


def absolute(source: Input) -> Input:
    """Return `source` with absolute paths, for a process that runs in another directory."""
    prefix = source.target_prefix and source.target_prefix.absolute()
    return replace(source, path=source.path.absolute(), target_prefix=prefix)


def number_shards(contents: Iterable[Any], format: FileFormat) -> Iterator[Shard]:
    """Yield shards with numbers from 0, of `contents` in `format`."""
    first = 0
    for number, content in enumerate(contents):
        yield Shard(number, first, content, format)
        first += len(content)


def split_lines(lines: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    """Yield lists of `size` lines. A list has fewer if it is the last, or as long as
    `MAX_SHARD_BYTES`."""
    content: list[bytes] = []
    num_bytes = 0
    for line in lines:
        content.append(line)
        num_bytes += len(line)
        if len(content) == size or num_bytes >= MAX_SHARD_BYTES:
            yield content
            content, num_bytes = [], 0
    if content:
        yield content


def with_prefix(row: Row, line: bytes) -> Row:
    """Return `row` with `line`, the beginning of its translation, as `target_prefix` of its
    example.

    If `line` is not UTF-8 or too long, the row gets a `fault` instead of an example. A row without
    an example is unchanged.
    """
    if row.example is None:
        return row
    try:
        prefix = decode_line(line, "its target prefix")
    except ValueError as error:
        return row._replace(example=None, fault=str(error))
    return row._replace(example={**row.example, "target_prefix": prefix})
