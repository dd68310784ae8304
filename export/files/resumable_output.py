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
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any, BinaryIO, Self

from ..errors import UsageError
from ..shared.compression import without_compression
from ..shared.files import read_object, sha256
from ..shared.outputs import TEMPORARY, hold_lock, regular_file, remove_file, whole_file

MANIFEST = "manifest.json"
KIND = "files"  # kind of our manifests
BAD_LINES, PARTS = ".bad.jsonl", ".parts"  # after the name of the output
MAX_NAME = 255  # bytes of a file name


def write_json(path: Path, value: Any, folder: Path, before: os.stat_result | None) -> None:
    """Write `value` to a JSON file, which appears complete or not at all. `folder` and `before` are
    those of `whole_file`."""
    with whole_file(path, folder, before) as file:
        file.write(json.dumps(value).encode())


@dataclass(frozen=True)
class Directory:
    """The directory with the manifest of a run.

    Only one process at a time can open it (not checked on Windows). It must have the same `facts`,
    the settings and versions, as the call that created the directory. One that `is_temporary` is
    for its owner alone. It is removed at the end, and after an error before the first shard.
    """

    path: Path
    facts: dict
    is_temporary: bool = False

    @contextlib.contextmanager
    def open(self) -> Iterator[dict[str, dict]]:
        """Create the directory if needed, lock it for the block (not on Windows), and yield {name:
        facts} of the finished files.

        A new or empty directory gets a manifest with these facts. A temporary directory is removed
        after the block; after an error it stays if a shard is written. Then errors also say where
        the finished shards are and how to resume.

        Raises:
            FileExistsError: if the directory holds files without a manifest of a run, was started
                with other facts, or is in use by another process.
            NotADirectoryError: for a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"{self.path} is a file, expected a directory or a new path")
        self.path.mkdir(0o700 if self.is_temporary else 0o777, parents=True, exist_ok=True)
        with hold_lock(Path(os.path.realpath(self.path)), self.path):
            finished = self.finished()
            try:
                with self.remedies():
                    yield finished
            except BaseException:
                if self.is_temporary and not self.is_started:
                    self.remove()
                raise
            if self.is_temporary:
                self.remove()

    @contextlib.contextmanager
    def remedies(self) -> Iterator[None]:
        """Add to errors of a run where the finished shards are and how to resume, if there are any.

        UsageError and FileExistsError stay as they are, and interrupts keep their class. A
        MemoryError and every other OSError become a plain OSError, and subclasses of ValueError a
        plain ValueError.
        """
        try:
            yield
        except (UsageError, FileExistsError):
            raise
        except (KeyboardInterrupt, MemoryError, OSError, ValueError) as error:
            kept = f"the finished shards stay in {self.path}, and the same command resumes there"
            remedy = [kept] if self.is_started else []
            if isinstance(error, KeyboardInterrupt):
                raise type(error)(*remedy) from None
            if isinstance(error, MemoryError):
                raise OSError(
                    errno.ENOMEM, "; ".join([f"not enough memory: {error}", *remedy])
                ) from error
            kind = OSError if isinstance(error, OSError) else ValueError
            raise kind("; ".join([str(error), *remedy])) from error

    def finished(self) -> dict[str, dict]:
        manifest = self.manifest()
        if manifest is None:
            names = sorted(
                entry.name
                for entry in self.path.iterdir()
                if not TEMPORARY.fullmatch(entry.name)  # of a run killed at its start
            )
            if names:
                raise FileExistsError(
                    f"{self.path} holds {', '.join(names[:5])}: expected a new or an empty "
                    f"directory"
                )
            self.note({})
        else:
            check_same(str(self.path), manifest["facts"], self.facts)
        remove_temporary(self.path)
        return {} if manifest is None else manifest["finished"]

    def manifest(self) -> dict | None:
        """Return the manifest of the run, or None if no run wrote what is there."""
        path = self.path / MANIFEST
        manifest = {} if regular_file(path) is None else read_object(path)
        return manifest if manifest.get("kind") == KIND else None

    def note(self, finished: dict[str, dict]) -> None:
        """Replace the manifest by one with `finished`, {name: facts} of the finished files. Raises
        FileExistsError if anything else has its name."""
        path = self.path / MANIFEST
        before = None if self.manifest() is None else regular_file(path)
        manifest = {"kind": KIND, "facts": self.facts, "finished": finished}
        write_json(path, manifest, self.path, before)

    def remove(self) -> None:
        """Remove empty folders of shards and the manifest, and the directory if nothing else is in
        it."""
        for folder in self.path.glob(f"*{PARTS}"):  # of a run that stopped in its first shard
            with contextlib.suppress(OSError):
                folder.rmdir()
        if self.manifest() is not None:
            (self.path / MANIFEST).unlink()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    @property
    def is_started(self) -> bool:
        """True if the directory has any file besides the manifest."""
        return any(path.name != MANIFEST for path in self.path.rglob("*") if path.is_file())


def remove_temporary(folder: Path) -> None:
    """Remove the files that a killed run did not finish in `folder`."""
    for entry in folder.glob(".*.new"):
        if TEMPORARY.fullmatch(entry.name):
            entry.unlink()


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
class Output:
    """The output `path`, its shards by number from 0, in a folder within `directory`, and the file
    of its bad lines. The files may replace `before` and `bad_before`, but nothing else."""

    path: Path
    directory: Path
    before: os.stat_result | None = None
    bad_before: os.stat_result | None = None

    @classmethod
    def find(cls, path: Path, directory: Path, may_replace: bool) -> Self:
        """Return the output `path`, which may replace the files that are there now, or none.

        Raises FileExistsError if a file is there that it may not replace, unless a killed run may
        have written it, and for anything but a directory in place of the shards.
        """
        output = cls(path, directory)
        paths = (path, output.bad_lines)
        if output.folder.is_symlink() or not output.folder.is_dir():
            check_free(output.folder)
        if may_replace:
            return cls(path, directory, *map(regular_file, paths))
        if not output.folder.exists():
            for other in paths:
                check_free(other)
        return output

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
        facts, path = read_object(self.facts_path(number)), self.part_path(number)
        if facts.get("input") != digest or not path.is_file():
            return None
        if facts.get("output") != sha256(path):
            warnings.warn(
                f"{path} is damaged, its shard is computed again",
                stacklevel=2,
            )
            return None
        return facts

    @contextlib.contextmanager
    def new(self, number: int, facts: dict) -> Iterator[BufferedRandom]:
        """Yield a file to write the results of the shard `number` to.

        When the block ends without an error, the file replaces earlier results, and `facts` is
        written next to it, with the file's hash as `facts["output"]`. After an exception the shard
        counts as missing. Raises FileExistsError for a file of its name that has no facts.
        """
        self.folder.mkdir(0o700, exist_ok=True)
        path, facts_path = self.part_path(number), self.facts_path(number)
        known = regular_file(facts_path)
        if known is None:
            check_free(path)
        with whole_file(path, self.folder, regular_file(path)) as file:
            yield file
            file.seek(0)
            facts["output"] = hashlib.file_digest(file, "sha256").hexdigest()
            write_json(facts_path, facts, self.folder, known)  # without facts a part is not ours

    def remove(self) -> None:
        """Remove the files of shards from the folder, and the folder if nothing else is in it."""
        for facts_path in self.folder.glob("[0-9]*.facts"):
            if facts_path.stem.isdecimal() and read_object(facts_path):
                self.part_path(int(facts_path.stem)).unlink(missing_ok=True)
                facts_path.unlink()
        remove_temporary(self.folder)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def publish(self, count: int, join: Callable[[Iterable[Path], BinaryIO], None]) -> None:
        """Write the file of bad lines and the output from the first `count` shards, which `join`
        writes to a file one after the other.

        Raises FileExistsError, with the place of the results, for a file of anyone else.
        """
        self.folder.mkdir(0o700, exist_ok=True)
        try:
            self.write_bad(count)
            with whole_file(self.path, self.folder, self.before) as file:
                join(map(self.part_path, range(count)), file)
        except FileExistsError as error:
            raise FileExistsError(
                f"{error}, and the finished result is in {self.folder}; move it away, and "
                f"the same command puts the result there"
            ) from error

    def write_bad(self, count: int) -> None:
        """Write the bad lines of the first `count` shards as JSON lines.

        Each has `line`, a number from 1, and `reason`. Without bad lines there is no file, and an
        earlier one is removed.
        """
        facts = map(read_object, map(self.facts_path, range(count)))
        bad = (line for of_shard in facts for line in of_shard["bad"])
        first = next(bad, None)
        if first is None:
            remove_file(self.bad_lines, self.bad_before)
            return
        with whole_file(self.bad_lines, self.folder, self.bad_before) as file:
            for number, reason in itertools.chain([first], bad):
                line = {"line": number + 1, "reason": reason}
                file.write(f"{json.dumps(line)}\n".encode())


def check_free(path: Path) -> None:
    """Raise FileExistsError if anything is at `path`, which no run has written yet."""
    if os.path.lexists(path):
        raise FileExistsError(
            f"{path} was not written by this run, expected nothing there: move it away"
        )


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
        UsageError: if `output` has the ending of a compressed file or a name that is too long, is
            inside `export` (a path without symbolic links), or if it or the file of its bad lines
            is one of `inputs`.
        FileExistsError: for something other than a file, and for a link in place of the directory
            of the run. Without `force` also if `output` or the file of its bad lines exists, unless
            a run has begun `output`.
    """
    if output.exists() and not output.is_file():
        raise FileExistsError(f"{output} is not a file, expected a file or a new path")
    out = Path(os.path.realpath(output))
    if without_compression(out.name) != out.name:
        raise UsageError(
            f"the output is {output}, expected a name without {out.suffix}: it is written as "
            "plain text"
        )
    check_name(out)
    if out.is_relative_to(export):
        raise UsageError(f"the output is {output}, inside the export: expected a place outside")
    partial = partial_directory(out)
    if partial.is_symlink():
        raise FileExistsError(
            f"{partial} is a link to {os.readlink(partial)}, expected nothing there: move it away"
        )
    for written in filter(Path.exists, (out, out.with_name(f"{out.name}{BAD_LINES}"))):
        for path in inputs:
            if path is not None and path.exists() and written.samefile(path):
                raise UsageError(f"the output {written} is also an input, expected another file")
        if not force and not partial.exists():
            raise FileExistsError(
                f"{written} exists already, expected a new path, or --force to replace it"
            )
    return out


def partial_directory(out: Path) -> Path:
    """Return the directory of a run that writes the file `out`."""
    return out.with_name(f".{out.name}.partial")


def check_name(path: Path) -> None:
    """Raise UsageError if the name of the output `path` is too long for the files beside it."""
    longest = MAX_NAME - len(BAD_LINES)
    if (length := len(os.fsencode(path.name))) > longest:
        raise UsageError(
            f"the output is {path.name[:40]}..., a name of {length} bytes, expected at most "
            f"{longest}"
        )
