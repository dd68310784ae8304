"""The output of a run, from which a later run resumes. Each file appears complete or not at all.

manifest.json      what the results depend on, and which files are finished
NAME.parts/        while NAME grows: the results of each shard, and then `N.facts` with the hashes
                   of its lines and results
NAME               the results of a file, in order
NAME.bad.jsonl     its bad lines, if it has any

The manifest and the parts of a single file NAME are in `.NAME.partial` until it is finished.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .compression import without_compression

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST = "manifest.json"
KIND = "files"  # kind of our manifests
BAD_LINES, PARTS = ".bad.jsonl", ".parts"  # after the name of the output


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, to which the block must write a file.

    It is renamed to `path`, also if that exists, when the block ends without an error. After an
    error it is removed.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        yield new
        with open(new, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` to a JSON file, which appears complete or not at all."""
    with atomic_write(path) as new:
        new.write_text(json.dumps(value), encoding="utf-8")


def read_json(path: Path) -> dict | None:
    """Return the JSON object in a file, or None if the file is missing, unreadable or holds
    anything else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


@dataclass(frozen=True)
class Directory:
    """The directory with the manifest of a run.

    Only one process at a time can open it (not checked on Windows). It must have the same `facts`,
    the settings and versions, as the call that created the directory.
    """

    path: Path
    facts: dict

    @contextlib.contextmanager
    def open(self) -> Iterator[dict[str, dict]]:
        """Create the directory if needed, lock it for the block (not on Windows), and yield {name:
        facts} of the finished files.

        A new or empty directory gets a manifest with these facts.

        Raises:
            FileExistsError: if the directory holds files without a manifest of a run, was started
                with other facts, or is in use by another process.
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
        manifest = read_json(self.path / MANIFEST)
        if manifest is None or manifest.get("kind") != KIND:
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
        check_same(str(self.path), manifest["facts"], self.facts)
        return manifest["finished"]

    def note(self, finished: dict[str, dict]) -> None:
        """Replace the manifest by one with `finished`, {name: facts} of the finished files."""
        write_json(self.path / MANIFEST, {"kind": KIND, "facts": self.facts, "finished": finished})

    @property
    def is_started(self) -> bool:
        """True if the directory has any file besides the manifest."""
        return any(path.name != MANIFEST for path in self.path.rglob("*") if path.is_file())


@contextlib.contextmanager
def remove_unless_started(directory: Directory) -> Iterator[None]:
    """Remove the directory after an error in the block, if no shard is written yet."""
    try:
        yield
    except BaseException:
        if not directory.is_started:
            shutil.rmtree(directory.path, ignore_errors=True)
        raise


@contextlib.contextmanager
def remedies(directory: Directory) -> Iterator[None]:
    """Add to errors of a run where the finished shards are and how to resume, if there are any.

    UsageError and FileExistsError stay as they are. A MemoryError and every other OSError become a
    plain OSError, and subclasses of ValueError a plain ValueError.
    """
    try:
        yield
    except (UsageError, FileExistsError):
        raise
    except (MemoryError, OSError, ValueError) as error:
        kept = f"the finished shards stay in {directory.path}, and the same command resumes there"
        remedy = f"; {kept}" if directory.is_started else ""
        if isinstance(error, MemoryError):
            raise OSError(errno.ENOMEM, f"not enough memory: {error}{remedy}") from error
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{error}{remedy}") from error


def lock(handle: int, path: Path) -> None:
    """Lock an open directory until it is closed.

    `handle` is its file descriptor and `path` its name for the message. Raises FileExistsError if
    another process has the lock.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(
            f"{path} is being written by another process, expected no other writer"
        ) from None


def check_same(path: str, before: dict, facts: dict) -> None:
    """Raise FileExistsError with the names and values of `facts` that differ from `before`. `path`
    is the output, for the message."""
    facts = json.loads(json.dumps(facts))
    names = sorted(
        name for name in before.keys() | facts.keys() if before.get(name) != facts.get(name)
    )
    if names:
        values = [
            name if name == "export" else f"{name} {before.get(name)!r}, now {facts.get(name)!r}"
            for name in names
        ]
        seen = f"{path} was started with another {', '.join(values)}"
        raise FileExistsError(f"{seen}: expected the same command, or a new output")


@dataclass(frozen=True)
class Parts:
    """The shards of the output `path`, by number from 0, in a folder within `directory`."""

    path: Path
    directory: Path

    @property
    def folder(self) -> Path:
        return self.directory / f"{self.path.name}{PARTS}"

    @property
    def bad_lines(self) -> Path:
        return self.path.with_name(f"{self.path.name}{BAD_LINES}")

    def part_path(self, number: int) -> Path:
        """Return the path of the results of the shard `number`."""
        return self.folder / f"{number:06}{self.path.suffix}"

    def facts_path(self, number: int) -> Path:
        return self.folder / f"{number:06}.facts"

    def facts(self, number: int, digest: str) -> dict | None:
        """Return the recorded facts of the shard `number`.

        It is None if the shard is missing, damaged (with a warning), or was computed from lines
        with another `digest`.
        """
        facts = read_json(self.facts_path(number))
        if facts is None or facts.get("input") != digest:
            return None
        if facts.get("output") != sha256_or_none(self.part_path(number)):
            warnings.warn(
                f"{self.part_path(number)} is damaged, its shard is computed again",
                stacklevel=2,
            )
            return None
        return facts

    @contextlib.contextmanager
    def new(self, number: int, facts: dict) -> Iterator[Path]:
        """Yield a temporary path for the results of the shard `number`.

        When the block ends without an error, the file replaces earlier results, and `facts` is
        written next to it, with the file's hash as `facts["output"]`. After an exception the shard
        counts as missing.
        """
        self.folder.mkdir(exist_ok=True)
        self.facts_path(number).unlink(missing_ok=True)
        with atomic_write(self.part_path(number)) as part_file:
            yield part_file
            facts["output"] = sha256_or_none(part_file)
        write_json(self.facts_path(number), facts)

    def write_bad(self, count: int) -> None:
        """Write the bad lines of the first `count` shards to `bad_lines`, as JSON lines.

        Each has `line`, a number from 1, and `reason`. Without bad lines there is no file, and an
        earlier one is removed.
        """
        all_facts = (read_json(self.facts_path(number)) or {} for number in range(count))
        bad = (pair for facts in all_facts for pair in facts["bad"])
        with atomic_write(self.bad_lines) as new, open(new, "w", encoding="utf-8") as file:
            for number, reason in bad:
                line = {"line": number + 1, "reason": reason}
                file.write(json.dumps(line, ensure_ascii=True) + "\n")
        if not self.bad_lines.stat().st_size:
            self.bad_lines.unlink()

    def remove(self) -> None:
        """Remove the files of shards from the folder, and the folder if nothing else is in it."""
        for part_file in self.folder.glob("[0-9]*"):
            if part_file.stem.isdecimal() and part_file.suffix in (".facts", self.path.suffix):
                part_file.unlink()
        for part_file in self.folder.glob(".[0-9]*.new"):
            part_file.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def sha256_or_none(path: Path) -> str | None:
    """Return the SHA-256 of a file in hexadecimal, None if there is no file."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def check_outside(output: Path, paths: Sequence[Path], export: Path) -> None:
    """Raise UsageError if the directory `output` is in the directory `export`, is `export` itself,
    or contains one of the inputs `paths`.

    Symbolic links in `output` and `paths` are resolved. `export` is an absolute path without any.
    """
    out = Path(os.path.realpath(output))
    if out.is_relative_to(export):
        raise UsageError(f"the output is {output}, inside the export: expected a place outside")
    for path in paths:
        if Path(os.path.realpath(path)).is_relative_to(out):
            raise UsageError(
                f"the input {path} is inside the output {output}: expected another directory"
            )


def check_output(output: Path, inputs: Sequence[Path | None], export: Path, force: bool) -> Path:
    """Return the path of the file `output`, with symbolic links resolved.

    Raises:
        UsageError: if `output` has the ending of a compressed file, is inside `export` (a path
            without symbolic links), or if it or the file of its bad lines is one of `inputs`.
        FileExistsError: for something other than a file. Without `force` also if `output` or the
            file of its bad lines exists.
    """
    out = Path(os.path.realpath(output))
    if without_compression(out.name) != out.name:
        raise UsageError(
            f"the output is {output}, expected a name without {out.suffix}: it is written as "
            "plain text"
        )
    if out.is_relative_to(export):
        raise UsageError(f"the output is {output}, inside the export: expected a place outside")
    if out.exists() and not out.is_file():
        raise FileExistsError(f"{output} is not a file, expected a file or a new path")
    for written in filter(Path.exists, (out, out.with_name(f"{out.name}{BAD_LINES}"))):
        for path in inputs:
            if path is not None and path.exists() and written.samefile(path):
                raise UsageError(f"the output {written} is also an input, expected another file")
        if not force:
            raise FileExistsError(
                f"{written} exists already, expected a new path, or --force to replace it"
            )
    return out
