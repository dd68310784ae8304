"""A run over lines: in shards, in order, one shard at a time in memory. Shards of files that an
earlier call completed are kept."""

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..shared.compression import without_compression
from ..shared.files import file_stamp
from .formats import (
    JSON,
    PARQUET,
    TEXT,
    Lines,
    format_name,
    line_format,
    output_kind,
    select_format,
)
from .predictions import Predictions
from .progress_bar import Progress, show_progress, skip
from .results import Results, compute
from .resumable_output import (
    BAD_LINES,
    MANIFEST,
    PARTS,
    Directory,
    Output,
    check_name,
    check_output,
    check_outside,
    partial_directory,
)
from .rows import Row
from .shards import Input, Shard, number_shards, split_lines

SHARD_LINES = 4096
# Computes the rows of a shard of the input with this number.
Work = Callable[[int, Shard, list[Row], Progress], Results]
# What has no effect on lines, and what has.
OF_TEXTS = {
    "num_return_sequences": "n_best",
    "target_prefix": "--target-prefix FILE",
    "seeds": "seed, from which each line derives its own",
}


@dataclass(frozen=True)
class Runner:
    """A runner of `predictions` over lines, `shard_lines` at a time.

    In JSON objects and tables the text is in `field`, and the results go to `output_field`, which
    is by default "translation", "prediction" or "embedding". The file `target_prefix` has the
    beginning of the translation of each line. Bad lines stop the run, or with `skips_bad_lines`
    they have no result.

    Raises:
        UsageError: for options that have no effect on lines, and for a `target_prefix` and a task
            that takes none.
    """

    predictions: Predictions
    field: str | None = None
    output_field: str | None = None
    target_prefix: Path | None = None
    shard_lines: int = SHARD_LINES
    skips_bad_lines: bool = True

    def __post_init__(self) -> None:
        for name, expected in OF_TEXTS.items():
            if self.predictions.generates and name in self.predictions.options:
                raise UsageError(f"{name} has no effect on files of lines: expected {expected}")
        if self.target_prefix is None:
            return
        seen = f"target_prefix is {self.target_prefix}"
        method = self.predictions.kind.method
        if method != "generate":
            raise UsageError(f"{seen}, expected the task generate, got {method}")
        if "encoder" not in self.predictions.runtime.runtime.specs:
            raise UsageError(
                f"{seen}, expected an encoder-decoder model: a decoder continues its prompt"
            )

    # ------------------------------------------------------------------------ to standard output

    def lines(self, lines: Iterable[bytes], unit: str) -> Iterator[str]:
        """Yield the text to print for each shard of `lines`: arguments or standard input.

        `unit` is what errors call a line, with {} for its number. Raises ValueError for a bad line
        unless these are skipped. Then each causes a warning and has the result of a blank line.
        """
        contents = split_lines(lines, self.shard_lines)
        yield from self.printed(number_shards(contents, line_format(self.predictions)), unit)

    def file(self, path: Path) -> Iterator[str]:
        """Yield the text to print for each shard of the file `path`.

        Raises:
            UsageError: for a Parquet table.
            ValueError: for a damaged file, and for a bad line unless these are skipped.
            Exception: the errors of `inputs`.
        """
        [source] = self.inputs([path])
        if not isinstance(source.format, Lines):
            raise UsageError(f"{path} is a Parquet table, expected --output FILE for the results")
        yield from self.printed(source.shards(self.shard_lines), f"line {{}} of {path}")

    def printed(self, shards: Iterator[Shard], unit: str) -> Iterator[str]:
        for shard in shards:
            run = functools.partial(compute, self.predictions, first=shard.first)
            rows, results = self.results(shard, unit, run)
            for message in (*bad_messages(results.bad, unit), *results.warnings):
                warnings.warn(message, stacklevel=1)
            assert isinstance(shard.format, Lines)
            yield b"".join(shard.format.lines(shard, rows, results.values)).decode()

    def results(
        self, shard: Shard, unit: str, run: Callable[[list[Row]], Results]
    ) -> tuple[list[Row], Results]:
        """Return the rows of `shard` and their results, which `run` computes.

        `unit` is what errors call a line. Raises ValueError for a bad line unless they are skipped.
        """
        rows = shard.rows()
        faults = [(number, row.fault) for number, row in enumerate(rows, shard.first) if row.fault]
        self.check_bad(faults, unit)
        results = run(rows)
        self.check_bad(results.bad, unit)
        return rows, results

    def check_bad(self, bad: Sequence[tuple[int, str]], unit: str) -> None:
        """Raise ValueError for the first of the bad lines, unless they are skipped. `bad` has
        (number from 0, fault).

        `unit` is what the message calls a line, with {} for its number.
        """
        if bad and not self.skips_bad_lines:
            raise ValueError(next(bad_messages(bad, unit)))

    # ---------------------------------------------------------------------------------- to files

    def inputs(self, paths: Sequence[Path]) -> list[Input]:
        """Return the inputs `paths` with their formats, checked.

        Raises:
            FileNotFoundError, IsADirectoryError: for an input that is no file.
            UsageError: for target prefixes and several inputs, and for fields that are missing or
                do not suit the task (see `select_format`).
            ValueError: if the numbers of prefixes and lines differ, and for a table or a
                compression that cannot be read.
        """
        for path in paths:
            if path.is_dir():
                raise IsADirectoryError(f"{path} is a directory, expected a file")
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist, expected a file")
        if self.target_prefix is not None and len(paths) > 1:
            raise UsageError(
                f"target_prefix is {self.target_prefix}, expected one input, got {len(paths)}"
            )
        inputs = []
        for path in paths:
            form = select_format(path, self.predictions, self.field, self.output_field)
            inputs.append(Input(path, form, self.target_prefix))
            inputs[-1].check_prefixes()
        return inputs

    def to_directory(self, paths: Sequence[Path], output: Path, ray: str | None = None) -> dict:
        """Write a file for each of `paths` into the directory `output`, with the results of its
        lines in the same order.

        Returns {"lines": number, "bad": number, "files": {path: numbers of lines, bad, warnings}},
        with the paths of the outputs.
        An interrupted call resumes where it stopped, with the same result byte for byte. After
        lines were repaired, only the changed shards are computed again. With the address `ray`, the
        workers of that cluster compute the missing shards.

        Raises:
            ImportError: for `ray` without Ray Data.
            ConnectionError: for `ray` where no cluster answers.
            FileNotFoundError, IsADirectoryError: for an input that is not a file.
            FileExistsError: for an `output` that holds anything else, that another process writes,
                or that has results of other arguments or other lines.
            ValueError: for an input that is damaged, or changes meanwhile, and for a bad line
                unless these are skipped.
            UsageError: for two inputs of one name, an input within `output`, an `output` within the
                export, and options that the task does not take.
            OSError: for a full disk, too little memory, and errors of a cluster.
        """
        names = unique_names(paths, output, self.predictions)
        check_outside(output, paths, self.export)
        inputs = self.inputs(paths)
        directory = Directory(output, self.facts(paths))
        outputs = [output / name for name in names]
        with contextlib.ExitStack() as stack:
            work: Work = self.work
            if ray is not None:
                from .ray import cluster

                on_cluster = cluster(ray, self.predictions, inputs, self.shard_lines)
                work = stack.enter_context(on_cluster)
            facts = self.finish(inputs, outputs, directory, work)
        return report(dict(zip(outputs, facts)))

    def to_file(self, path: Path, output: Path, force: bool = False) -> dict:
        """Write the results of the file `path` to the file `output`, and return a report.

        The report is {"lines": number, "bad": number, "files": {path: numbers of lines, bad,
        warnings}}. An interrupted call resumes: until the file is finished, its parts are in
        `.OUTPUT.partial`. `force` replaces an existing `output`.

        Raises:
            FileExistsError: if `output` or the file of its bad lines exists without `force`, if it
                is no file, and if another process or another command has begun it.
            UsageError: if the name of `output` is not that of its format, and if it is an input or
                in the export.
            FileNotFoundError, ValueError: for a `path` that is missing or damaged, and for a bad
                line unless these are skipped.
            OSError: for a full disk or too little memory.
        """
        out = check_output(output, [path, self.target_prefix], self.export, force)
        check_suffix(output, path, self.predictions)
        inputs = self.inputs([path])
        directory = Directory(partial_directory(out), self.facts([path]), is_temporary=True)
        [facts] = self.finish(inputs, [out], directory, self.work, force)
        return report({output: facts})

    def finish(
        self,
        inputs: Sequence[Input],
        paths: Sequence[Path],
        directory: Directory,
        work: Work,
        force: bool = False,
    ) -> list[dict]:
        """Write the results of `inputs` to the files `paths`, computed by `work`, and return the
        facts of each file.

        `directory` has their parts until they are finished. `force` replaces existing files.
        """
        count = count_lines(inputs)
        with contextlib.ExitStack() as stack:
            finished = stack.enter_context(directory.open())
            bar = stack.enter_context(show_progress(count))
            outputs = [
                Output.find(path, directory.path, force or path.name in finished) for path in paths
            ]
            for number, (source, output) in enumerate(zip(inputs, outputs, strict=True)):
                name = output.path.name
                before = finished.get(name)
                finished[name] = File(self, number, source, output, work).finish(before, bar)
                if finished[name] is not before:
                    directory.note(finished)
                output.remove()
        return [finished[path.name] for path in paths]

    @property
    def export(self) -> Path:
        return self.predictions.runtime.info.directory

    def facts(self, paths: Sequence[Path]) -> dict:
        """Return the settings and versions that the results depend on, by name.

        Of the input files `paths` only the paths are recorded, not the lines.
        """
        return self.predictions.facts() | {
            "field": self.field,
            "output_field": self.output_field,
            "target_prefix": None if self.target_prefix is None else str(self.target_prefix),
            "shard_lines": self.shard_lines,
            "inputs": [str(path) for path in paths],
        }

    def work(self, number: int, shard: Shard, rows: list[Row], bar: Progress) -> Results:
        """Return the results of a shard, computed in this process. The number of its file is not
        used.

        `rows` are the lines of `shard`, and `bar` shows the progress.
        """
        return compute(self.predictions, rows, shard.first, bar.update)


@dataclass(frozen=True)
class File:
    """The input with this `number`, and its output."""

    runner: Runner
    number: int
    source: Input
    output: Output
    work: Work

    def finish(self, before: dict | None, bar: Progress) -> dict:
        """Compute the missing shards and join them. Return the facts of the file.

        They are lines, bad and warnings (numbers) and input (a hash). `bar` shows the progress.

        `before` are the facts of an earlier call that finished the file, or None. If the output of
        that call still exists, nothing is computed and `before` is returned.

        Raises:
            FileExistsError: if the input is not that of `before`, or if anyone else wrote a file
                of the output meanwhile.
            ValueError: if the input is damaged or changed while it was read.
        """
        stamps = self.stamps()
        before = before if self.output.path.exists() else None
        digest = hashlib.sha256()
        total = {"lines": 0, "bad": 0, "warnings": 0}
        texts: list[str] = []  # of the first warning of each shard
        count = 0
        for shard in self.source.shards(self.runner.shard_lines):
            count += 1
            digest.update(shard.digest.encode())
            if before is not None:
                skip(bar, len(shard))
                continue
            facts = self.shard_facts(shard, bar)
            total = {key: value + facts[f"{key}_count"] for key, value in total.items()}
            texts += facts["warnings"]
        if self.stamps() != stamps:
            raise ValueError(
                f"{self.source.path} changed while it was read, expected an unchanged file"
            )
        if before is not None:
            if before["input"] != digest.hexdigest():
                seen = f"{self.output.path} was computed from other lines than {self.source.path}"
                expected = "expected an unchanged input, or a new output directory"
                raise FileExistsError(f"{seen} has now, {expected}")
            return before
        self.output.publish(count, self.source.format.join)
        if texts:
            seen = f"warnings of {self.output.path}: {total['warnings']}"
            warnings.warn(f"{seen}, the first: {texts[0]}", stacklevel=1)
        return {**total, "input": digest.hexdigest()}

    def stamps(self) -> list:
        paths = (self.source.path, self.source.target_prefix)
        return [file_stamp(path.stat()) for path in paths if path is not None]

    def shard_facts(self, shard: Shard, bar: Progress) -> dict:
        """Return the recorded facts of a shard. Compute and write its results if they are missing.

        `bar` shows the progress. Raises ValueError for a bad line unless these are skipped.
        """
        unit = f"line {{}} of {self.source.path}"
        facts = self.output.facts(shard.number, shard.digest)
        if facts is not None:
            self.runner.check_bad(facts["bad"], unit)
            skip(bar, len(shard))
            return facts
        rows, results = self.runner.results(
            shard, unit, lambda rows: self.work(self.number, shard, rows, bar)
        )
        facts = {
            "input": shard.digest,
            "bad": results.bad,
            "bad_count": len(results.bad),
            "lines_count": len(rows),
            "warnings": results.warnings[:1],
            "warnings_count": len(results.warnings),
        }
        with self.output.new(shard.number, facts) as file:
            shard.format.write(file, shard, rows, results.values)
        return facts


def bad_messages(bad: Iterable[tuple[int, str]], unit: str) -> Iterator[str]:
    """Yield a message for each of the bad lines, (number from 0, fault). `unit` is the name of a
    line in the messages, with {} for its number, there from 1."""
    return (f"{unit.format(number + 1)}: {reason}" for number, reason in bad)


def report(facts: dict[Path, dict]) -> dict:
    """Return {"lines": number, "bad": number, "files": {path: numbers of lines, bad, warnings}}.

    `facts` are the results of `File.finish` by the path of the output.
    """
    files = {
        str(path): {key: counts[key] for key in ("lines", "bad", "warnings")}
        for path, counts in facts.items()
    }
    totals = {key: sum(counts[key] for counts in files.values()) for key in ("lines", "bad")}
    return totals | {"files": files}


def unique_names(paths: Sequence[Path], output: Path, predictions: Predictions) -> list[str]:
    """Return the names of the outputs of `paths` in the directory `output`, without .gz, .bz2 and
    .xz. Results in another format than the input get .jsonl appended.

    Raises UsageError if two are the same, if one is too long or the name of another file of the
    run, and for compressed Parquet."""
    names: dict[str, Path] = {}
    for path in paths:
        name = without_compression(path.name)
        if output_kind(path, predictions) != format_name(path):
            name = f"{name}.jsonl"
        if name in names:
            raise UsageError(
                f"{names[name]} and {path} would both become {output / name}, expected "
                "different file names"
            )
        check_name(output / name)
        names[name] = path
    others = [MANIFEST, *(f"{name}{ending}" for name in names for ending in (BAD_LINES, PARTS))]
    for name in names.keys() & others:
        raise UsageError(
            f"{names[name]} would become {output / name}, which the run itself writes, expected "
            "another file name"
        )
    return list(names)


def check_suffix(output: Path, path: Path, predictions: Predictions) -> None:
    """Raise UsageError if the ending of `output` stands for another format than the results of
    `path` have. JSON lines may have the ending of a text."""
    kind, suffix_kind = output_kind(path, predictions), format_name(output)
    if suffix_kind != kind and (kind, suffix_kind) != (JSON, TEXT):
        expected = {PARQUET: "a name with .parquet", JSON: "a name with .jsonl"}.get(
            kind, f"a name without {output.suffix}"
        )
        raise UsageError(f"the output is {output}, and the results are {kind}: expected {expected}")


def count_lines(inputs: Sequence[Input]) -> int:
    """Return the number of lines of all inputs. Damaged files count nothing; they are reported when
    they are read.

    Raises:
        UsageError: for a pipe, which cannot be read twice.
    """
    total = 0
    for source in inputs:
        if not source.path.is_file():
            expected = "expected a file, or its lines on standard input"
            raise UsageError(f"{source.path} is a pipe or a device, {expected}")
        with contextlib.suppress(ValueError):
            total += source.format.count(source.path)
    return total
