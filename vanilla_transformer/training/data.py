"""Text from files, plain or compressed (.gz, .bz2, .xz), one example a line, and from `datasets`.

A file is UTF-8 unless another encoding is given. A byte order mark at its start and line ends (LF
or CRLF) are removed; everything else is unchanged.
"""

import io
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compression import decompression_errors, open_lines, without_compression
from ..errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

LONGEST = 1_000_000  # maximum bytes of a line in UTF-8
PART = LONGEST + 3  # characters per read: the longest line, its end, and a byte order mark
# maximum ratio of unpacked characters to compressed bytes; text has 3 to 10
MAX_EXPANSION = 100
ALWAYS_READ = 1 << 24  # unpacked characters that are always accepted
NO_TEXT = re.compile("[\udc80-\udcff]")  # surrogates stand for bytes that are not text
REPORTED = 3  # bad rows that a report describes


def parts(path: str | Path, encoding: str, how: str) -> Iterator[str]:
    """Yield the text of a file in parts of at most `PART` characters.

    `how` is the method that reads a part, "read" or "readline". Bytes that are not text become lone
    surrogates.

    Raises:
        UsageError: for an unknown encoding.
        FileNotFoundError: if it is missing.
        ValueError: for a damaged compressed file, one that unpacks to more than text does, a
            compression that is not read here, and a git-lfs pointer.
    """
    if not is_encoding(encoding):
        raise UsageError(f"encoding is {encoding!r}, expected one that Python knows, such as UTF-8")
    path, size = Path(path), 0
    with (
        open_lines(path) as content,
        io.TextIOWrapper(content, encoding, "surrogateescape", "\n") as file,
        decompression_errors(str(path)),
    ):
        is_packed = without_compression(path.name) != path.name
        limit = max(ALWAYS_READ, MAX_EXPANSION * path.stat().st_size) if is_packed else math.inf
        try:
            while part := getattr(file, how)(PART):
                size += len(part)
                if size > limit:
                    raise ValueError(
                        f"{path} unpacks to {size:,} characters and more, expected at most "
                        f"{MAX_EXPANSION} for each of its bytes"
                    )
                yield part
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not {encoding} text: {error}") from None


def is_encoding(name: Any) -> bool:
    """Return True if `name` is the name of an encoding of text."""
    try:
        "".encode(name)
    except (LookupError, TypeError, ValueError):  # a ValueError for half of a surrogate pair
        return False
    return True


def read_text(path: str | Path, encoding: str = "UTF-8") -> str:
    """Return the whole text of a file, plain or compressed, with LF line ends.

    Lines may have any length. A byte order mark is dropped.

    Raises:
        UsageError: for an unknown `encoding`.
        FileNotFoundError: if the file is missing.
        ValueError: if it is not text of that `encoding`, and for a compressed file that is damaged
            or cannot be read.
    """
    text = "".join(parts(path, encoding, "read")).removeprefix("\ufeff").replace("\r\n", "\n")
    if byte := NO_TEXT.search(text):
        raise ValueError(
            f"{path}: line {1 + text.count(chr(10), 0, byte.start())} {no_text(byte, encoding)}"
        )
    return text


def no_text(byte: re.Match, encoding: str) -> str:
    return f"is not {encoding} text: it has the byte 0x{ord(byte[0]) - 0xDC00:02x}"


class Fault(str):
    """The description of a bad line, returned instead of the line."""


Check = Callable[[str], str | None]  # a line -> its fault, or `None`


def empty(line: str) -> str | None:
    return None if line.strip() else "is empty, expected one sentence on every line"


def lines(
    path: str | Path, encoding: str = "UTF-8", fault: Check | None = None
) -> Iterator[str | Fault]:
    """Yield the lines of a file without their ends, with a `Fault` instead of each bad line.

    A byte order mark is dropped. A line is bad if it is not text in `encoding`, has more than
    `LONGEST` bytes, or if `fault(line)` says what is wrong. An empty file is one empty line.

    Raises:
        UsageError: for an unknown `encoding`.
        FileNotFoundError: if the file is missing.
        ValueError: for a compressed file that is damaged or cannot be read, and a git-lfs pointer.
    """
    mark, is_open = "\ufeff", False
    for part in parts(path, encoding, "readline"):
        if not is_open:  # otherwise the rest of a line that is too long
            yield checked(part.removeprefix(mark), encoding, fault)
        mark, is_open = "", not part.endswith("\n")
    if mark:
        yield checked("", encoding, fault)


def checked(line: str, encoding: str, fault: Check | None) -> str | Fault:
    line = line.removesuffix("\r\n") if line.endswith("\r\n") else line.removesuffix("\n")
    if not line.isascii() and (byte := NO_TEXT.search(line)):
        return Fault(no_text(byte, encoding))
    if len(line if line.isascii() else line.encode(errors="surrogatepass")) > LONGEST:
        return Fault(f"is longer than {LONGEST:,} bytes, expected at most {LONGEST:,}")
    what = fault and fault(line)
    return Fault(what) if what else line


def shorten(line: str) -> str:
    """Return the predicate of an error about `line`: "is LINE", or "begins with" its first 80
    characters."""
    return f"is {line!r}" if len(line) <= 80 else f"begins with {line[:80]!r}"


class BadRows:
    """A counter of rows that cannot be used.

    The first bad row is an error. With `skip_bad_rows = true` in `data`, bad rows of the training
    text are left out, counted and reported. Text for validation and test is never changed.
    """

    def __init__(self, data: dict | None = None, split: str = "train"):
        self.are_skipped = (data or {}).get("skip_bad_rows", False) and split == "train"
        self.count = 0
        self.first = []

    def add(self, what: str) -> None:
        """Count a bad row; raise ValueError with the message `what` unless bad rows are skipped."""
        if not self.are_skipped:
            raise ValueError(what)
        self.count += 1
        if self.count <= REPORTED:
            self.first.append(what)

    def report(self, kept: int) -> None:
        """Print how many rows were skipped and the first faults, if any rows were skipped.

        `kept` is the number of good rows. Raises ValueError if rows were skipped and `kept` is 0.
        """
        if not self.count:
            return
        seen = f"{self.count:,} of {kept + self.count:,} rows of the training text are bad"
        seen += f" ({'; '.join(self.first)}{'; ...' if self.count > REPORTED else ''})"
        if not kept:
            raise ValueError(f"{seen}, expected at least one good row")
        from accelerate import PartialState  # imported here, because reading lines does not need it

        if PartialState().is_main_process:
            print(f"{seen}: they are left out, because data.skip_bad_rows is true")


def read_lines(path: str | Path, encoding: str = "UTF-8") -> list[str]:
    """Return the lines of a text file, plain or compressed, without their ends.

    Raises:
        UsageError: for an unknown `encoding`.
        FileNotFoundError: if the file is missing.
        ValueError: for an empty file, and a line that is blank, too long or not text of that
            `encoding`. Also for a compressed file that is damaged or cannot be read.
    """
    return read_all_lines([path], encoding)


def read_all_lines(
    paths: Iterable[str | Path],
    encoding: str = "UTF-8",
    bad: BadRows | None = None,
    fault: Check | None = empty,
) -> list[str]:
    """Return the lines of all files, one after the other.

    `fault` returns what is wrong with a line, or None; by default empty lines are wrong. With
    `fault=None`, only lines that are too long or no text in `encoding` are bad. A bad line raises
    ValueError, or is counted and left out if `bad` skips it. By default nothing is skipped.
    """
    return [line for path in paths for line in read_files([path], encoding, bad, fault)[0]]


def read_files(
    paths: Sequence[str | Path],
    encoding: str = "UTF-8",
    bad: BadRows | None = None,
    fault: Check | None = empty,
) -> list[list[str]]:
    """Return a list of lines for each file. They must be parallel: line n of all files is one row.

    A row with a bad line raises ValueError, or is counted and left out of all lists if `bad` skips
    it. By default nothing is skipped. `fault` returns what is wrong with a line, or None; by
    default empty lines are wrong.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: for a bad line, and if the files have different numbers of lines.
    """
    bad = bad or BadRows()
    columns = [[] for _ in paths]
    files = [lines(path, encoding, fault) for path in paths]
    for number, row in enumerate(zip_longest(*files), 1):
        if None in row:
            counts = [
                number - 1 if line is None else number + sum(1 for _ in file)
                for line, file in zip(row, files)
            ]
            has = ", ".join(f"{path} has {count}" for path, count in zip(paths, counts))
            raise ValueError(f"parallel files must have the same number of lines: {has}")
        if Fault in map(type, row):
            index = [*map(type, row)].index(Fault)
            bad.add(f"{paths[index]}: line {number} {row[index]}")
        else:
            for column, line in zip(columns, row):
                column.append(line)
    return columns


# keys of a recipe's [data] besides the splits
SOURCES = ("directory", "dataset", "config", "columns", "skip_bad_rows")


def read_columns(
    data: dict, split: str, names: tuple[str, ...]
) -> "Dataset | IterableDataset | None":
    """Return a split of a recipe's `data` as a `datasets.Dataset` with text columns `names`.

    `split` is "train", "validation" or "test"; the result is `None` if `data` has no such split.
    `data[split]` is a file for each column, relative to `data["directory"]`.

    Instead of files there may be `data["dataset"]`, a name on the Hub (with `data["config"]`) or a
    directory that `save_to_disk` wrote. `data["columns"]` are the names of its columns; "a.b" is
    field b of column a. With `data["streaming"]` the training split is a
    `datasets.IterableDataset`, read as it is needed. A row of a data set with a missing value or
    blank text is bad, also in a stream. With `data["skip_bad_rows"]` bad rows are left out.

    Raises:
        FileNotFoundError: if a file is missing.
        UsageError: for another number of files than columns, and for bad rows that are to be
            skipped in a stream, where they cannot be counted beforehand.
        ValueError: for files with different numbers of lines, a bad line or row, and a column or
            field that does not exist.
    """
    from datasets import Dataset  # imported here, because reading lines does not need it

    if "dataset" in data:
        return read_data_set(data, split, names)
    if split not in data:
        return None
    check_files(data, split, names)
    bad = BadRows(data, split)
    columns = read_files(split_files(data, split), bad=bad)
    bad.report(len(columns[0]))
    return Dataset.from_dict(dict(zip(names, columns, strict=True)))


def read_data_set(
    data: dict,
    split: str,
    names: tuple[str, ...],
    columns: tuple[str, ...] = (),
    fault: Callable[[dict], str | None] | None = None,
) -> "Dataset | IterableDataset | None":
    """Return a split of the data set in `data["dataset"]` with the columns `names`, see
    `read_columns`.

    Their names in the data set are `data["columns"]`, by default `columns` or else `names`.
    `fault(row)` says what is wrong with a row, or returns None; the default is `lacking`.
    """
    streams = data.get("streaming", False) and split == "train"
    if streams and BadRows(data, split).are_skipped:
        raise UsageError(
            "data.skip_bad_rows is true, expected false with data.streaming: rows of a stream "
            "are not counted"
        )
    splits = data_set(data, streams)
    if split not in splits:
        return None
    rows = select_columns(splits[split], data.get("columns", columns or names), names)
    if streams:
        return rows.map(check_row, with_indices=True, features=rows.features)
    return valid_rows(rows, fault or lacking, BadRows(data, split))


def valid_rows(rows: "Dataset", fault: Callable[[dict], str | None], bad: "BadRows") -> "Dataset":
    """Return the rows without a fault, see `valid_positions`."""
    kept = valid_positions(rows, fault, bad)
    return rows.select(kept) if bad.count else rows


def check_files(data: dict, split: str, names: tuple[str, ...]) -> None:
    """Raise UsageError unless `data[split]` has one file for each of the columns `names`."""
    if len(split_files(data, split)) != len(names):
        raise UsageError(
            f"data.{split} is {data[split]!r}, expected a file for each of {', '.join(names)}"
        )


def valid_positions(
    rows: Iterable[dict], fault: Callable[[dict], str | None], bad: BadRows
) -> list[int]:
    """Return the positions of the rows without a fault.

    `fault(row)` says what is wrong, or returns None. The first bad row raises ValueError. If `bad`
    skips bad rows, they are counted and their number is printed; ValueError if all are bad.
    """
    kept = []
    for index, row in enumerate(rows):
        if what := fault(row):
            bad.add(f"row {index}: {what}")
        else:
            kept.append(index)
    bad.report(len(kept))
    return kept


def check_row(row: dict, index: int) -> dict:
    """Return a row of a stream. Raise ValueError if it is bad, see `lacking`."""
    if what := lacking(row):
        raise ValueError(f"row {index}: {what}")
    return row


def lacking(row: dict) -> str | None:
    """Return "no NAME" for the first value of `row` that is `None` or blank text, else `None`.

    Text is blank if it is empty or only white space.
    """
    names = [
        name
        for name, value in row.items()
        if value is None or (isinstance(value, str) and not value.strip())
    ]
    return f"no {names[0]}" if names else None


def data_set(data: dict, streams: bool = False) -> dict:
    """Return {split: rows} of the data set that `data["dataset"]` names, on the Hub or in a
    directory.

    The rows are a `datasets.IterableDataset` if it `streams`.
    """
    from datasets import load_dataset, load_from_disk

    path = Path(data["dataset"])
    if not (path / "dataset_dict.json").is_file():
        return load_dataset(str(path), data.get("config"), streaming=streams)
    splits = load_from_disk(path)
    return (
        {split: rows.to_iterable_dataset() for split, rows in splits.items()} if streams else splits
    )


def select_columns(
    rows: "Dataset | IterableDataset", columns: Sequence[str], names: tuple[str, ...]
) -> "Dataset | IterableDataset":
    """Return only the `columns` of a data set, with the new `names`; "a.b" is field b of column a.

    Raises ValueError for a column that it does not have, and UsageError for another number of
    columns.
    """
    from datasets import Features, IterableDataset, Value

    if len(columns) != len(names):
        raise UsageError(
            f"data.columns is {[*columns]}, expected a column for each of {', '.join(names)}"
        )
    streams = isinstance(rows, IterableDataset)
    new_names = dict(zip(columns, names, strict=True))
    if not streams and len(new_names) == len(names) and "." not in "".join(columns):
        for column in columns:
            check_column(column, rows.column_names)
        return rows.select_columns(list(columns)).rename_columns(new_names)

    def take(rows: dict) -> dict:
        return {name: values(rows, column) for name, column in zip(names, columns, strict=True)}

    known = {"features": Features(dict.fromkeys(names, Value("string")))} if streams else {}
    return rows.map(take, batched=True, remove_columns=rows.column_names, **known)


def check_column(name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(f"the data set has no column {name!r}, expected one of {sorted(known)}")


def values(rows: dict, column: str) -> list:
    name, dot, key = column.partition(".")
    check_column(name, rows)
    if not dot:
        return rows[name]
    for value in rows[name]:
        if value is not None and (not isinstance(value, dict) or key not in value):
            raise ValueError(
                f"the data set's column {name!r} has the value {reprlib.repr(value)}, expected a "
                f"field {key!r} in it"
            )
    return [value and value[key] for value in rows[name]]


def find_line(data: dict, row: dict) -> str | None:
    """Return the file and line of the training text with the longest text of `row`, such as
    "train.en: line 3". None for data sets, and for a row that is not of one line.

    `data` is the [data] of the recipe.
    """
    text = max((value for value in row.values() if isinstance(value, str)), key=len, default="")
    for path in split_files(data, "train") if text and "train" in data else ():
        for number, line in enumerate(lines(path, data.get("encoding", "UTF-8")), 1):
            if line.endswith(text):
                return f"{path}: line {number}"
    return None


def split_key(data: dict, split: str) -> str:
    """Return the key of a recipe's `data` that the text of `split` comes from, such as
    "data.validation". The part of a fold comes from data.train."""
    source = split if split in data else "dataset" if "dataset" in data else "train"
    return f"data.{source}"


def check_exist(data: dict, split: str) -> None:
    """Raise FileNotFoundError or IsADirectoryError, with the key, unless the files of `split`
    exist."""
    for path in split_files(data, split):
        if path.is_dir():
            raise IsADirectoryError(f"data.{split}: {path} is a directory, expected a text file")
        if not path.exists():
            raise FileNotFoundError(f"data.{split}: {path} does not exist, expected a text file")


def split_files(data: dict, split: str) -> list[Path]:
    """Return the paths of a recipe's `data[split]`, which is one file or a list, in
    `data["directory"]`, by default the working directory.

    Raises UsageError for another value. Whether they exist is not checked.
    """
    files = [data[split]] if isinstance(data[split], str) else data[split]
    if not files or not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise UsageError(f"data.{split} is {data[split]!r}, expected a file or a list of files")
    return [Path(data.get("directory", ".")) / file for file in files]
