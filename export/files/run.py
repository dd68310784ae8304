"""A run over files: each in shards, in order, a shard at a time in memory; what an earlier call
made whole is kept."""

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..inference.export_info import stamp_of
from .formats import Format, format_of, output_name
from .outputs import Directory, Parts, written
from .predictions import Predictions
from .progress import Drawn, Told, progress
from .results import Found, Place, results_of
from .rows import Fields, Row
from .text_lines import Batches

SHARD_LINES = 4096
Work = Callable[[Place, list[Row], Told | Drawn], Found]  # on the rows of a shard
# Options of the text runtime that `Runtime.generate` does not have.
OF_TEXTS = (
    "split",
    "copy_letterless",
    "src_lang",
    "tgt_lang",
    "target_prefix",
    "num_return_sequences",
)


@dataclass(frozen=True)
class Bulk:
    """What is done with files: `predictions` for each line, named `result` ("translation",
    "prediction" or "embedding"), of the `field` of JSON objects and tables, so many `shard_lines`
    at a time. There `output_field` is the field of the results, by default `result`.

    Raises:
        UsageError: for a `field` where the task reads several, and options of generation that do
            not fit the model.
    """

    predictions: Predictions
    result: str
    field: str | None = None
    shard_lines: int = SHARD_LINES
    output_field: str | None = None

    def __post_init__(self) -> None:
        assert self.fields  # which checks itself
        if self.predictions.kind.method in ("generate", "translate"):
            given = {
                name: value
                for name, value in self.predictions.options.items()
                if name not in OF_TEXTS
            }
            source, target = (
                self.predictions.options.get(name) for name in ("src_lang", "tgt_lang")
            )
            Batches(self.predictions.runtime, given, src_lang=source, tgt_lang=target)

    @property
    def fields(self) -> Fields:
        return Fields(self.predictions.kind.forms, self.field)

    def run(self, inputs: Sequence[Path], output: Path, ray: str | None = None) -> dict:
        """Writes into the directory `output` a file for each of `inputs`, with as many lines in the
        same order; and returns how many `lines` there were, how many of them `bad`, and the same of
        each of the `files` that were written.

        A call that was stopped, in whatever way, goes on where it was: the result is the same, byte
        for byte. So it does after lines were repaired: shards of other lines are made again. With
        the address `ray` the workers of that cluster compute the results, whatever computed those
        that are there.

        Raises:
            ImportError: for `ray` without Ray Data.
            ConnectionError: for `ray` where no cluster answers.
            FileNotFoundError, IsADirectoryError: for an input that is none.
            FileExistsError: for an `output` that holds anything else, that another process writes,
                or that a call began with other arguments, or finished with other lines.
            ValueError: for an input that is damaged, or changes meanwhile.
            UsageError: for two inputs of one name, one within `output`, an `output` within the
                export, and options that the task does not take.
            OSError: for a full disk, where memory is short, and for what a cluster cannot do.
        """
        names = checked_names(inputs, output, self.result)
        check_outside(output, inputs, self.predictions.runtime.info.directory)
        formats = [format_of(path, self.fields, self.result, self.output_field) for path in inputs]
        facts = self.predictions.facts() | {
            "verb": self.result,
            "field": self.field,
            "output_field": self.output_field,
            "shard_lines": self.shard_lines,
            "inputs": [str(path) for path in inputs],
        }
        directory = Directory(output, facts)
        with contextlib.ExitStack() as stack:
            work = (
                self.work
                if ray is None
                else stack.enter_context(self.on_cluster(ray, inputs, formats))
            )
            finished = stack.enter_context(directory.begun())
            stack.enter_context(kept(output))
            told = stack.enter_context(progress(total_of(inputs, formats)))
            for number, (path, name, form) in enumerate(zip(inputs, names, formats, strict=True)):
                File(self, number, path, form, directory, Parts(output / name), work).finish(
                    finished, told
                )
        found = {str(output / name): finished[name] for name in names}
        files = {
            name: {key: facts[key] for key in ("lines", "bad", "warnings")}
            for name, facts in found.items()
        }
        return {key: sum(facts[key] for facts in files.values()) for key in ("lines", "bad")} | {
            "files": files
        }

    def work(self, place: Place, rows: list[Row], told: Told | Drawn) -> Found:
        """In this process."""
        return results_of(self.predictions, rows, place.first, told.update)

    def on_cluster(self, address: str, inputs: Sequence[Path], formats: Sequence[Format]) -> Any:
        """A context that yields `Work`."""
        from .ray import Source, cluster

        return cluster(
            address,
            self.predictions,
            Source([*map(Path.absolute, inputs)], formats, self.shard_lines),
        )


@dataclass(frozen=True)
class File:
    """An input, the `number`th, and what becomes of it."""

    bulk: Bulk
    number: int
    path: Path
    form: Format
    directory: Directory
    parts: Parts
    work: Work

    def finish(self, finished: dict[str, dict], told: Told | Drawn) -> None:
        """Makes what is not whole yet, and notes it among what is `finished`."""
        stamp = stamp_of(self.path.stat())
        before = finished.get(self.parts.path.name)
        digest = hashlib.sha256()
        total = {"lines": 0, "bad": 0, "warnings": 0}
        count = 0
        for place, shard in shards_of(self.number, self.path, self.form, self.bulk.shard_lines):
            count = place.number + 1
            digest.update(place.digest.encode())
            if before is not None:
                total["lines"] += len(shard)
                told.skip(len(shard))
                continue
            facts = self.parts.whole(place.number, place.digest)
            if facts is None:
                facts = self.make(place, shard, told)
            else:
                told.skip(len(shard))
            total = {key: value + facts[f"{key}_count"] for key, value in total.items()}
        if stamp_of(self.path.stat()) != stamp:
            raise ValueError(f"{self.path} changed while it was read: expected it to stay as it is")
        if before is None:
            self.join(count)
            finished[self.parts.path.name] = {**total, "input": digest.hexdigest()}
            self.directory.note(finished)
        elif before["input"] != digest.hexdigest():
            found = f"{self.parts.path} was made of other lines than {self.path} has now"
            raise FileExistsError(f"{found}: expected the same lines, or a new directory")
        self.parts.remove()

    def make(self, place: Place, shard: Any, told: Told | Drawn) -> dict:
        """The results of a shard; returns its facts."""
        rows = self.form.rows(shard)
        results, bad, warned = self.work(place, rows, told)
        facts = {
            "input": place.digest,
            "bad": bad,
            "bad_count": len(bad),
            "lines_count": len(rows),
            "warnings_count": warned,
        }
        with self.parts.new(place.number, facts) as path:
            self.form.write(path, shard, rows, results)
        return facts

    def join(self, count: int) -> None:
        """Of so many shards."""
        self.parts.write_bad(count)
        with written(self.parts.path) as place:
            self.form.join((self.parts.place(number) for number in range(count)), place)


def shards_of(file: int, path: Path, form: Format, size: int) -> Iterator[tuple[Place, Any]]:
    """Of the `file`th input, each with its place."""
    first = 0
    for number, shard in enumerate(form.shards(path, size)):
        yield Place(file, number, first, f"{first} {form.digest(shard)}"), shard
        first += len(shard)


def checked_names(inputs: Sequence[Path], output: Path, result: str) -> list[str]:
    """Of the outputs. Raises UsageError for two that are one."""
    names: dict[str, Path] = {}
    for path in inputs:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory, expected a file")
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist, expected a file")
        name = output_name(path, result)
        if name in names:
            raise UsageError(
                f"{names[name]} and {path} would both become {output / name}: expected other names"
            )
        names[name] = path
    return list(names)


def check_outside(output: Path, inputs: Sequence[Path], export: Path) -> None:
    out = Path(os.path.realpath(output))
    if out.is_relative_to(export):
        raise UsageError(f"the output is {output}, inside the export: expected a place outside")
    for path in inputs:
        if Path(os.path.realpath(path)).is_relative_to(out):
            raise UsageError(
                f"the input {path} is inside the output {output}: expected another directory"
            )


def total_of(inputs: Sequence[Path], formats: Sequence[Format]) -> int:
    """Lines of all; what is damaged is found when its turn comes."""
    total = 0
    for path, form in zip(inputs, formats):
        with contextlib.suppress(ValueError):
            total += form.count(path)
    return total


@contextlib.contextmanager
def kept(output: Path) -> Iterator[None]:
    """An error while a run goes on says that what is whole is not lost."""
    remedy = f"the shards that are whole stay in {output}, and the same call goes on from there"
    try:
        yield
    except MemoryError as error:
        raise OSError(errno.ENOMEM, f"not enough memory: {error}; {remedy}") from error
    except (UsageError, FileExistsError):
        raise
    except OSError as error:
        raise OSError(f"{error}; {remedy}") from error
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from error
