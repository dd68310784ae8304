"""Parallel text from files, plain or gzip-compressed, one sentence a line."""

import gzip
import zlib
from pathlib import Path


def read_lines(path: str | Path) -> list[str]:
    """Raises FileNotFoundError, and ValueError if the file is damaged, empty, has an empty line or is not UTF-8."""
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as file:
        try:
            lines = file.read().removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is not a whole gzip file: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise ValueError(f"{path}: line {number} of {len(lines)} is empty, expected one sentence on every line")
    return lines


def read_parallel(source: str | Path, target: str | Path) -> list[tuple[str, str]]:
    """Line i of `source` and of `target` are translations of each other.

    Raises:
        ValueError: if the files have different numbers of lines, and as `read_lines` does.
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise ValueError(
            f"parallel files must have the same number of lines: {source} has {len(sources)}, {target} has {len(targets)}"
        )
    return list(zip(sources, targets, strict=True))


def encode_pairs(pairs: list[tuple[str, str]], tokenizer) -> list[dict[str, list[int]]]:
    """`input_ids` and `labels` of each pair, both ending with the tokenizer's end token."""
    sources, targets = (tokenizer(list(side))["input_ids"] for side in zip(*pairs, strict=True))
    return [{"input_ids": source, "labels": target} for source, target in zip(sources, targets, strict=True)]
