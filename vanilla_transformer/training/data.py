"""Text from files, plain or gzip-compressed, one example a line, and from `datasets`."""

import gzip
import zlib
from pathlib import Path


def read_text(path: str | Path, encoding: str = "UTF-8") -> str:
    """Raises FileNotFoundError, and ValueError if the file is damaged or is not text of that `encoding`."""
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding=encoding) as file:
        try:
            return file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not {encoding} text: {error}") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is not a whole gzip file: {error}") from None


def read_lines(path: str | Path, encoding: str = "UTF-8") -> list[str]:
    """As `read_text`; also raises ValueError if the file is empty or has an empty line."""
    lines = read_text(path, encoding).removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise ValueError(f"{path}: line {number} of {len(lines)} is empty, expected one sentence on every line")
    return lines


def read_parallel(source: str | Path, target: str | Path) -> list[tuple[str, str]]:
    """Line i of `source` and of `target` are translations of each other.

    Raises:
        ValueError: if the files have different numbers of lines, and as `read_lines` does.
    """
    return list(zip(*read_files([source, target]), strict=True))


def read_files(paths: list[str | Path]) -> list[list[str]]:
    """The lines of each, of which all must have the same number."""
    lines = [read_lines(path) for path in paths]
    for path, found in zip(paths, lines):
        if len(found) != len(lines[0]):
            raise ValueError(
                f"parallel files must have the same number of lines: {paths[0]} has {len(lines[0])}, {path} has {len(found)}"
            )
    return lines


SOURCES = ("directory", "dataset", "config", "columns")  # keys of a recipe's [data] beside the splits


def read_columns(data: dict, split: str, names: tuple[str, ...]):
    """The `split` ("train", "validation" or "test") of a recipe's `data` as a `datasets.Dataset` with text columns `names`;
    `None` if it has none. `data[split]` is a file for each column, relative to `data["directory"]`. Instead of files there
    may be `data["dataset"]`, a name on the Hub (with `data["config"]`) or a directory that `save_to_disk` wrote, and
    `data["columns"]`, what the columns are called there; "a.b" is field b of column a. With `data["streaming"]` its training
    split is a `datasets.IterableDataset`, read as it is needed.

    Raises:
        FileNotFoundError, ValueError: as `read_parallel`; ValueError for files that are to be streamed.
    """
    from datasets import Dataset  # what only reads lines has no need of it

    if "dataset" in data:
        streams = data.get("streaming", False) and split == "train"
        return columns_of(data_set(data, streams), split, data.get("columns", names), names)
    if data.get("streaming"):
        raise ValueError("data.streaming goes with a data set, expected data.dataset")
    if split not in data:
        return None
    paths = paths_of(data, split)
    if len(paths) != len(names):
        raise ValueError(f"{split} is {data[split]}, expected a file for each of {', '.join(names)}")
    return Dataset.from_dict(dict(zip(names, read_files(paths), strict=True)))


def data_set(data, streams=False):
    """Its splits, as `datasets.IterableDataset` if it `streams`."""
    from datasets import load_dataset, load_from_disk

    path = Path(data["dataset"])
    if not (path / "dataset_dict.json").is_file():
        return load_dataset(str(path), data.get("config"), streaming=streams)
    splits = load_from_disk(path)
    return {split: rows.to_iterable_dataset() for split, rows in splits.items()} if streams else splits


def columns_of(splits, split, columns, names):
    from datasets import Features, IterableDataset, Value

    if split not in splits:
        return None

    def take(rows):
        return {name: values(rows, column) for name, column in zip(names, columns, strict=True)}

    rows = splits[split]
    known = {"features": Features(dict.fromkeys(names, Value("string")))} if isinstance(rows, IterableDataset) else {}
    return rows.map(take, batched=True, remove_columns=rows.column_names, **known)


def values(rows, column):
    name, dot, key = column.partition(".")
    if name not in rows:
        raise ValueError(f"the data set has no column {name!r}, expected one of {sorted(rows)}")
    return [value[key] for value in rows[name]] if dot else rows[name]


def paths_of(data: dict, split: str) -> list[Path]:
    """The files of a recipe's `data[split]`, one or a list."""
    files = [data[split]] if isinstance(data[split], str) else data[split]
    return [Path(data.get("directory", ".")) / file for file in files]
