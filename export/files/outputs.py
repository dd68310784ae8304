"""The directory of a run, of which each file appears whole or not at all.

manifest.json      what the results depend on, and which files are finished
NAME.parts/        while NAME grows: of each shard its results, and then `N.facts` with what they
                   were made of
NAME               the results of a file, in order
NAME.bad.jsonl     its bad lines, if it has any
"""

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .text_lines import check_same, fcntl, lock

MANIFEST = "manifest.json"
KIND = "bulk"  # of a manifest that is ours


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yields the place to write the file `path` to, which takes its name when the block ends
    without an error."""
    new = path.with_name(f".{path.name}.new")
    try:
        yield new
        with open(new, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with written(path) as new:
        new.write_text(json.dumps(value), encoding="utf-8")


def read_json(path: Path) -> dict | None:
    """The object in a file; `None` where there is none, or a damaged one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class Directory:
    """Where a run writes: one for a process at a time, and for calls with the same `facts`."""

    path: Path
    facts: dict

    @contextlib.contextmanager
    def begun(self) -> Iterator[dict[str, dict]]:
        """Yields what is finished, by name.

        Raises:
            FileExistsError: for a directory that holds anything else, was begun with other facts,
                or is another process's.
            NotADirectoryError: for a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"{self.path} is a file, expected a directory or a new path")
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDONLY) if fcntl is not None else None
        try:
            if handle is not None:
                lock(handle, self.path)
            yield self.finished()
        finally:
            if handle is not None:
                os.close(handle)

    def finished(self) -> dict[str, dict]:
        place = self.path / MANIFEST
        found = read_json(place)
        if found is None or found.get("kind") != KIND:
            names = sorted(
                entry.name for entry in self.path.iterdir() if entry.name != f".{MANIFEST}.new"
            )
            if names:
                raise FileExistsError(
                    f"{self.path} holds {', '.join(names[:5])}: expected a new or an empty "
                    f"directory"
                )
            self.note({})
            return {}
        check_same(str(self.path), found["facts"], self.facts)
        return found["finished"]

    def note(self, finished: dict[str, dict]) -> None:
        """What is finished."""
        write_json(self.path / MANIFEST, {"kind": KIND, "facts": self.facts, "finished": finished})


@dataclass(frozen=True)
class Parts:
    """The shards of the output `path`, by number from 0."""

    path: Path

    @property
    def folder(self) -> Path:
        return self.path.with_name(f"{self.path.name}.parts")

    def place(self, number: int) -> Path:
        """Of the results of a shard."""
        return self.folder / f"{number:06}{self.path.suffix}"

    def place_of_facts(self, number: int) -> Path:
        return self.folder / f"{number:06}.facts"

    def whole(self, number: int, digest: str) -> dict | None:
        """The facts of a shard that is whole and was made of lines with this `digest`."""
        facts = read_json(self.place_of_facts(number))
        if facts is None or facts.get("input") != digest:
            return None
        if facts.get("output") != digest_of(self.place(number)):
            warnings.warn(
                f"{self.place(number)} is damaged, expected what was written there: it is "
                f"made again",
                stacklevel=2,
            )
            return None
        return facts

    @contextlib.contextmanager
    def new(self, number: int, facts: dict) -> Iterator[Path]:
        """Yields the place to write the results of a shard to."""
        self.folder.mkdir(exist_ok=True)
        self.place_of_facts(number).unlink(missing_ok=True)
        with written(self.place(number)) as place:
            yield place
            facts["output"] = digest_of(place)
        write_json(self.place_of_facts(number), facts)

    def write_bad(self, count: int) -> None:
        """The file of bad lines of so many shards, if there are any."""
        found = (read_json(self.place_of_facts(number)) or {} for number in range(count))
        bad = (pair for facts in found for pair in facts["bad"])
        place = self.path.with_name(f"{self.path.name}.bad.jsonl")
        with written(place) as new:
            write_bad_lines(new, bad)
        if not place.stat().st_size:
            place.unlink()

    def remove(self) -> None:
        """All that is ours in the folder, and the folder if nothing else is in it."""
        for place in self.folder.glob("[0-9]*"):
            if place.stem.isdecimal() and place.suffix in (".facts", self.path.suffix):
                place.unlink()
        for place in self.folder.glob(".[0-9]*.new"):
            place.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def write_bad_lines(path: Path, bad: Iterable[tuple[int, str]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for number, reason in bad:
            file.write(json.dumps({"line": number + 1, "reason": reason}, ensure_ascii=True) + "\n")


def digest_of(path: Path) -> str | None:
    """The SHA-256 of a file, `None` where there is none."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
