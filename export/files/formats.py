"""Formats of files: text, JSON lines and Parquet. How a file is read in shards, and how their
results are written and joined."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UsageError
from ..shared.compression import check_lines, open_lines, without_compression
from .predictions import Predictions
from .rows import RecordFields, Row
from .shards import FileFormat, Shard, split_lines
from .text_lines import LINE_BREAKS, hash_lines, raw_lines

TEXT, JSON, PARQUET = "text", "JSON lines", "Parquet"
SUFFIXES = {".jsonl": JSON, ".ndjson": JSON, ".parquet": PARQUET}  # all others are text


def format_name(path: Path) -> str:
    """Return the format of a file by its name, with or without .gz, .bz2 or .xz: "text", "JSON
    lines" or "Parquet".

    Raises:
        UsageError: for compressed Parquet, which has compression of its own.
    """
    name = without_compression(path.name)
    kind = SUFFIXES.get(Path(name).suffix, TEXT)
    if kind == PARQUET and name != path.name:
        raise UsageError(f"{path} is compressed Parquet, expected a name without {path.suffix}")
    return kind


def output_kind(path: Path, predictions: Predictions) -> str:
    """Return the format of the results of the file `path`: "text", "JSON lines" or "Parquet".

    It is the format of `path`, but results of text lines are JSON lines unless they are generated
    texts. Raises UsageError for compressed Parquet.
    """
    kind = format_name(path)
    return JSON if kind == TEXT and not predictions.generates else kind


def select_format(
    path: Path, predictions: Predictions, field: str | None = None, output_field: str | None = None
) -> FileFormat:
    """Return the format that reads the file `path` and writes its results.

    In JSON objects and tables the texts are in `field`, and the results go to `output_field`; None
    selects the defaults of the task. Lines of text have no fields, so both must be None for them.

    Raises:
        ImportError: for Parquet without pyarrow.
        ValueError: for a damaged table, one with two columns of one name, a compression that cannot
            be read, and a git-lfs pointer.
        UsageError: for a table without the columns that the task reads, lines of text for a task
            that reads several fields, and `field` or `output_field` for lines of text. Also for
            `field` if the task reads several, compressed Parquet, and records that have the output
            field already.
    """
    check_lines(path)
    task = predictions.kind
    fields = RecordFields(task.forms, field, task.takes_blank)
    name = output_field or predictions.field
    match format_name(path):
        case "Parquet":
            from .parquet import Parquet

            return Parquet(fields, predictions.vector_type, name).checked(path)
        case "JSON lines":
            # a pipe is read only once
            number = first_line_with(path, name) if path.is_file() else None
            if number is not None:
                problem = f"line {number} of {path} has a field {name} already"
                raise UsageError(f"{problem}: expected another --output-field NAME for the results")
            # which also finds names with escaped characters
            fault = f"it has a field {name} already, expected another name for the results"

            def read(line: bytes) -> Row:
                row = fields.parse_json(line)
                if row.record is None or name not in row.record:
                    return row
                return Row(fault=f"{fault}, --output-field NAME")

            return Lines(
                read, lambda number, line, row, result: with_result(line, row, name, result)
            )
    keys = fields.forms[0]
    if len(keys) > 1:
        seen = f"{path} has one text per line, and the task needs {' and '.join(keys)}"
        raise UsageError(f"{seen}: expected a .jsonl file")
    for option, value in {"field": field, "output_field": output_field}.items():
        if value is not None:
            raise UsageError(
                f"{option} is {value!r}, expected None for {path}, whose lines have no fields: "
                f"leave out {option}, or use a .jsonl or .parquet file"
            )
    return text_format(predictions, fields.parse_text)


def line_format(predictions: Predictions) -> "Lines":
    """Return the format of arguments of the command line and of lines of standard input, one
    example each.

    An argument or line is a text. If the task does not generate, a line that begins with { is a
    JSON object.
    """
    task = predictions.kind
    fields = RecordFields(task.forms, takes_blank=task.takes_blank)
    return text_format(
        predictions, fields.parse_text if predictions.generates else fields.parse_line
    )


def text_format(predictions: Predictions, read: Callable[[bytes], Row]) -> "Lines":
    """Return the format of lines of text, each of which `read` turns into a row.

    Results are written as text if they are generated texts, else as JSON.
    """
    if not predictions.generates:
        return Lines(read, lambda number, line, row, result: to_json(result))
    # no runtime in the function: Ray pickles the formats
    n_best = predictions.n_best
    return Lines(read, lambda number, line, row, result: generated_text(number, result, n_best))


def first_line_with(path: Path, name: str) -> int | None:
    """Return the line number, from 1, of the first JSON object with the field `name`, or None.

    A damaged file is searched up to the damage. Names with escaped characters are missed.
    """
    key = to_json(name).encode()
    with contextlib.suppress(ValueError), open_lines(path) as file:
        for number, line in enumerate(raw_lines(file, str(path)), 1):
            if key in line and name in (RecordFields(()).parse_json(line).record or ()):
                return number
    return None


@dataclass(frozen=True)
class Lines:
    """The `FileFormat` of lines. The content of a shard is a list of lines in bytes, without their
    ends. `read` returns the row of a line, with a fault if it is bad. `written` returns the output
    of a line, one or several lines without the last line break, from the number of the line (from
    0), the line itself, its row and its result."""

    read: Callable[[bytes], Row]
    written: Callable[[int, bytes, Row, Any], str]

    def count(self, path: Path) -> int:
        with open_lines(path) as file:
            return sum(1 for _ in raw_lines(file, str(path)))

    def shards(self, path: Path, size: int) -> Iterator[list[bytes]]:
        with open_lines(path) as file:
            yield from split_lines(raw_lines(file, str(path)), size)

    def digest(self, content: list[bytes]) -> str:
        return hash_lines(content)

    def rows(self, content: list[bytes]) -> list[Row]:
        return [self.read(line) for line in content]

    def lines(self, shard: Shard, rows: list[Row], results: list[Any]) -> Iterator[bytes]:
        """Yield the output of each of `results` in bytes: one line or several, with line ends.

        `rows` and `results` have an item for each line of `shard`. Halves of surrogate pairs, which
        JSON may have, are escaped.
        """
        lines = zip(shard.content, rows, results, strict=True)
        for number, (line, row, result) in enumerate(lines, shard.first):
            yield self.written(number, line, row, result).encode(errors="backslashreplace") + b"\n"

    def write(self, file: BinaryIO, shard: Shard, rows: list[Row], results: list[Any]) -> None:
        file.writelines(self.lines(shard, rows, results))

    def join(self, parts: Iterable[Path], file: BinaryIO) -> None:
        for part in parts:
            with open(part, "rb") as lines:
                shutil.copyfileobj(lines, file)


def with_result(line: bytes, row: Row, name: str, result: Any) -> str:
    """Return the JSON object `line` with the field `name` for its result, or null if `row` could
    not be read.

    All else stays as it was read, also the digits of numbers.
    """
    if row.record is None:
        return "null"
    fields = line.decode().strip().removesuffix("}").rstrip()
    separator = ", " if row.record else ""
    return f"{fields}{separator}{to_json(name)}: {to_json(result)}}}"


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def generated_text(number: int, result: Any, n_best: int | None) -> str:
    """Return the output for the `result` of line `number`, from 0, without the last line break.

    With `n_best` it has a line "number ||| text ||| score" for each {"text", "score"} of `result`.
    Otherwise `result` is a text, or a dict whose values are separated by tabs: the text, then its
    score or its alignments. A `result` of None gives an empty line, or with `n_best` that many
    empty texts with score 0.
    """
    if n_best is not None:
        pairs = result or [{"text": "", "score": 0.0}] * n_best
        return "\n".join(
            f"{number} ||| {in_one_line(pair['text'])} ||| {pair['score']:.6f}" for pair in pairs
        )
    if result is None:
        return ""
    if isinstance(result, str):
        return in_one_line(result)
    text, value = result.values()
    if not isinstance(value, str):
        value = f"{value:.6f}" if isinstance(value, float) else to_json(value)
    return f"{in_one_line(text)}\t{value}"


def in_one_line(text: str) -> str:
    """Return `text` with a space in place of each sequence of CR and LF."""
    return LINE_BREAKS.sub(" ", text)
