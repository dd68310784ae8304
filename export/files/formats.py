"""Text, JSON lines and Parquet: how a file is read in shards, and how the results of these are
written and joined."""

import contextlib
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import UsageError
from .compression import check_lines, open_lines, without_compression
from .rows import Fields, Row
from .text_lines import LINE_BREAKS, raw_lines

TEXT, JSON, PARQUET = "text", "JSON lines", "Parquet"
SUFFIXES = {".jsonl": JSON, ".ndjson": JSON, ".parquet": PARQUET}  # all others are text


class Format(Protocol):
    """A kind of files. A shard is what `shards` yields of one."""

    def count(self, path: Path) -> int:
        """Lines or rows of a file."""

    def shards(self, path: Path, size: int) -> Iterator[Any]:
        """All of a file, so many lines at a time. Raises ValueError where the file is damaged."""

    def digest(self, shard: Any) -> str:
        """The SHA-256 of what is in a shard."""

    def rows(self, shard: Any) -> list[Row]:
        """What the task reads of it."""

    def write(self, path: Path, shard: Any, rows: list[Row], results: list[Any]) -> None:
        """A file with the results of one shard."""

    def join(self, parts: Iterable[Path], path: Path) -> None:
        """A file of those that `write` has written, one after the other."""


def kind_of(path: Path) -> str:
    """By its name, without .gz, .bz2 or .xz.

    Raises:
        UsageError: for Parquet with one of these, which has compression of its own.
    """
    name = without_compression(path.name)
    kind = SUFFIXES.get(Path(name).suffix, TEXT)
    if kind == PARQUET and name != path.name:
        raise UsageError(f"{path} is compressed Parquet, expected a name without {path.suffix}")
    return kind


def output_name(path: Path, result: str) -> str:
    """Of the results of a file: its own name, with .jsonl where those of a text are JSON."""
    name = without_compression(path.name)
    return f"{name}.jsonl" if kind_of(path) == TEXT and result != "translation" else name


def format_of(path: Path, fields: Fields, result: str, output_field: str | None = None) -> Format:
    """For the file `path`; `result` is what comes out: translation, prediction or embedding. It is
    written to the field `output_field`, by default of the same name.

    Raises:
        ImportError: for Parquet without pyarrow.
        ValueError: for a table with two columns of one name, a compression that cannot be read, and
            a git-lfs pointer.
        UsageError: for a table without what the task reads, and for lines of text where it reads
            several; for records that have the output field already.
    """
    check_lines(path)
    name = output_field or result
    match kind_of(path):
        case "Parquet":
            from .parquet import Parquet

            return Parquet(fields, result, name).checked(path)
        case "JSON lines":
            check_output_field(path, name)
            read = lambda line: without_field(fields.of_json(line), name)  # noqa: E731
            return Lines(read, lambda row, found: json_line(row, found, name))
    if len(keys := fields.forms[0]) > 1:
        found = f"{path} has one text on each line, and the task reads {' and '.join(keys)}"
        raise UsageError(f"{found}: expected JSON lines, a name with .jsonl")
    for option, value in {"field": fields.field, "output_field": output_field}.items():
        if value is not None:
            raise UsageError(
                f"{option} is {value!r}, expected None for {path}: lines of text have no fields"
            )
    return Lines(
        fields.of_text, text_line if result == "translation" else lambda row, found: to_json(found)
    )


def check_output_field(path: Path, name: str) -> None:
    """Raise UsageError if a JSON object of the file has the field `name` already: it would be
    overwritten."""
    if number := first_line_with(path, name):
        found = f"line {number} of {path} has a field {name} already"
        raise UsageError(f"{found}: expected another name for the results, --output-field NAME")


def first_line_with(path: Path, name: str) -> int | None:
    """Return the number, from 1, of the first JSON object with the field `name`. A damaged file is
    searched to the damage."""
    key = to_json(name).encode()
    with contextlib.suppress(ValueError), open_lines(path) as file:
        for number, line in enumerate(raw_lines(file, str(path)), 1):
            if key in line and name in (Fields(()).of_json(line).record or ()):
                return number
    return None


def without_field(row: Row, name: str) -> Row:
    """Return `row`, or a bad one if its record has the field `name` by an escaped name, which no
    search finds."""
    if row.record is None or name not in row.record:
        return row
    return Row(
        fault=(
            f"it has a field {name} already, expected another name for the results, "
            f"--output-field NAME"
        )
    )


@dataclass(frozen=True)
class Lines:
    """A shard is a list of lines in bytes, without their ends; `read` and `written` are for one."""

    read: Callable[[bytes], Row]
    written: Callable[[Row, Any], str]

    def count(self, path: Path) -> int:
        """As `Format`."""
        with open_lines(path) as file:
            return sum(1 for _ in raw_lines(file, str(path)))

    def shards(self, path: Path, size: int) -> Iterator[list[bytes]]:
        """As `Format`."""
        with open_lines(path) as file:
            lines = raw_lines(file, str(path))
            while shard := list(itertools.islice(lines, size)):
                yield shard

    def digest(self, shard: list[bytes]) -> str:
        """As `Format`."""
        return hashlib.sha256(b"\n".join(shard)).hexdigest()

    def rows(self, shard: list[bytes]) -> list[Row]:
        """As `Format`."""
        return [self.read(line) for line in shard]

    def write(self, path: Path, shard: list[bytes], rows: list[Row], results: list[Any]) -> None:
        """As `Format`."""
        with open(path, "wb") as file:
            lines = (
                self.written(row, result) + "\n" for row, result in zip(rows, results, strict=True)
            )
            # half a pair, as JSON has it
            file.writelines(line.encode(errors="backslashreplace") for line in lines)

    def join(self, parts: Iterable[Path], path: Path) -> None:
        """As `Format`."""
        with open(path, "wb") as whole:
            for part in parts:
                with open(part, "rb") as file:
                    shutil.copyfileobj(file, whole)


def text_line(row: Row, result: str | None) -> str:
    return LINE_BREAKS.sub(" ", result or "")


def json_line(row: Row, result: Any, name: str) -> str:
    """The object that was read with the result in it, or null."""
    return to_json(None if row.record is None else {**row.record, name: result})


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
