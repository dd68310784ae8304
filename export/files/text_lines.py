"""Lines in, lines out, in constant memory; and a file of them that a killed run goes on with.

While OUT grows it is `.OUT.partial`, beside which `.OUT.partial.state` has what the run depends on,
and after each window of lines how many lines have been read and how long the partial file is. The
same call goes on from there.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from tqdm import tqdm

from ..errors import UsageError
from ..inference import options as option_fields
from ..inference.export_info import stamp_of
from ..runtime import Runtime
from ..text_runtime import TextRuntime
from .compression import READABLE, decompression_errors, open_lines

if TYPE_CHECKING:
    from .predictions import Predictions

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LONGEST = 1_000_000  # bytes of a line
WINDOW = 16  # batches that are read, sorted by length and written together
HASHED = ("input", "target_prefix", "export")  # of which the state has a hash
LINE_BREAKS = re.compile(r"[\r\n]+")


def raw_lines(file: BinaryIO | io.BufferedIOBase, name: str) -> Iterator[bytes]:
    """Lines without a byte order mark at the start and their ends, LF or CRLF; of one with more
    than `LONGEST` bytes the beginning, which has more too.

    Raises:
        ValueError: for a damaged compressed file.
    """
    most = LONGEST + 5  # with a byte order mark and the end
    with decompression_errors(name):
        for number in itertools.count(1):
            if not (line := file.readline(most)):
                return
            is_cut = len(line) == most and not line.endswith(b"\n")
            line = (
                line.removesuffix(b"\r\n") if line.endswith(b"\r\n") else line.removesuffix(b"\n")
            )
            yield line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            while is_cut and (rest := file.readline(most)):
                is_cut = not rest.endswith(b"\n")


def lines_of(file: BinaryIO | io.BufferedIOBase, name: str) -> Iterator[str]:
    """As `raw_lines`, of UTF-8 text.

    Raises:
        ValueError: for a line that is not UTF-8 or has more than `LONGEST` bytes, and for a damaged
            compressed file.
    """
    for number, line in enumerate(raw_lines(file, name), 1):
        yield text_of(line, f"line {number} of {name}")


def text_of(line: bytes, name: str) -> str:
    """Raises ValueError for one that is not UTF-8 or has more than `LONGEST` bytes; `name` is for
    errors."""
    if len(line) > LONGEST:
        raise ValueError(f"{name} has more than {LONGEST:,} bytes, expected at most that")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from None


def read_lines(path: Path) -> Iterator[str]:
    """As `lines_of`, of a file, plain or compressed."""
    with open_lines(path) as file:
        yield from lines_of(file, str(path))


def survey(path: Path) -> tuple[int, str]:
    """How many lines a file has, all of which are text, and their SHA-256."""
    count = 0
    digest = hashlib.sha256()
    for line in read_lines(path):
        digest.update(line.encode() + b"\n")
        count += 1
    return count, digest.hexdigest()


@dataclass(frozen=True)
class Batches:
    """How `runtime` generates from lines, and what it writes for each: the text, and with `scores`
    its score after a tab; or with `n_best` so many lines `line ||| text ||| score`, the best first,
    lines numbered from 0. `options` as `TextRuntime.generate`, and so are `src_lang` and
    `tgt_lang`, of all lines.

    A line without words gives an empty one (with `n_best` one with an empty text), and line breaks
    within a result become spaces. With a `seed` each batch draws from one of its own, which follows
    from `seed` and a line of it.

    Raises:
        ValueError: for a model that cannot generate.
        UsageError: for options that `Runtime.generate` does not take, or that do not go with lines.
    """

    runtime: TextRuntime
    options: dict
    batch_size: int = 32
    n_best: int | None = None
    scores: bool = False
    src_lang: str | None = None
    tgt_lang: str | None = None

    def __post_init__(self) -> None:
        if "num_return_sequences" in self.options:
            raise UsageError("num_return_sequences has no effect on lines: expected n_best")
        self.runtime.runtime.check_options(self.given)
        self.runtime.target_options(self.tgt_lang, 1, self.options)
        if self.src_lang is not None:
            self.runtime.languages.ids("src_lang", self.src_lang, 1)

    @property
    def given(self) -> dict:
        return option_fields.check(self.options | {"num_return_sequences": self.n_best or 1})

    def windows(
        self,
        lines: Iterable[str],
        prefixes: Iterable[str] | None = None,
        first: int = 0,
        told: Callable[[int], object] | None = None,
    ) -> Iterator[list[str]]:
        """What is written for each `WINDOW` batches of `lines`, whose translations begin with
        `prefixes`; the number of the first line is `first`. `told` is called with the number of
        lines that are done, batch by batch."""
        pairs = zip(lines, itertools.repeat("") if prefixes is None else prefixes)
        size = WINDOW * self.batch_size
        while window := list(itertools.islice(pairs, size)):
            results = self.results(first, window, told or (lambda count: None))
            yield [
                line
                for place, found in enumerate(results)
                for line in self.written(first + place, found)
            ]
            first += len(window)

    def results(
        self, first: int, pairs: list[tuple[str, str]], told: Callable[[int], object]
    ) -> list[list[tuple[str, float]]]:
        """Of each line, which has its prefix with it, its texts and their scores; none of a line
        without words."""
        results: list[list[tuple[str, float]]] = [[] for _ in pairs]
        places = [place for place, (line, _) in enumerate(pairs) if line.strip()]
        told(len(pairs) - len(places))
        if not places:
            return results
        with errors_in(first, places):
            rows = dict(
                zip(places, self.runtime.rows([pairs[place][0] for place in places], self.src_lang))
            )
            begun = dict(
                zip(
                    places,
                    self.runtime.prefixes([pairs[place][1] for place in places], len(places)),
                )
            )
        places.sort(key=lambda place: (len(begun[place]), len(rows[place])))
        size = self.runtime.runtime.rows_together(
            len(places), self.batch_size, self.given, self.is_scored
        )
        for start in range(0, len(places), size):
            chosen = places[start : start + size]
            options = self.given
            if options.get("seed") is not None:
                options["seed"] = seed_of(options["seed"], first + chosen[0])
            targets = self.runtime.target_options(self.tgt_lang, len(chosen), self.options)
            with errors_in(first, chosen):
                texts, scores = self.runtime.generate_rows(
                    [rows[place] for place in chosen],
                    [begun[place] for place in chosen],
                    targets,
                    self.is_scored,
                    **options,
                )
            count = self.n_best or 1
            for index, place in enumerate(chosen):
                own = slice(index * count, (index + 1) * count)
                results[place] = list(zip(texts[own], scores[own].tolist()))
            told(len(chosen))
        return results

    @property
    def is_scored(self) -> bool:
        return self.scores or self.n_best is not None

    def written(self, number: int, found: list[tuple[str, float]]) -> list[str]:
        found = [(LINE_BREAKS.sub(" ", text), score) for text, score in found]
        if self.n_best is not None:
            # samples come in no order
            ranked = sorted(found, key=lambda pair: -pair[1]) or [("", 0.0)]
            return [f"{number} ||| {text} ||| {score:.6f}" for text, score in ranked]
        return [f"{text}\t{score:.6f}" if self.scores else text for text, score in found] or [""]

    def facts(self) -> dict:
        """What the result depends on, beside the lines."""
        return {
            **facts_of(self.runtime.runtime),
            "batch_size": self.batch_size,
            "n_best": self.n_best,
            "scores": self.scores,
            "src_lang": self.src_lang,
            "tgt_lang": self.tgt_lang,
            **option_fields.check(self.options),
        }


def facts_of(runtime: Runtime) -> dict:
    """What the results of `runtime` depend on."""
    import onnxruntime

    manifest = json.dumps(runtime.info.manifest, sort_keys=True).encode()
    return {
        "export": hashlib.sha256(manifest).hexdigest(),
        "dtype": runtime.dtype,
        "device": runtime.device,
        "threads": runtime.threads,
        "workers": runtime.workers,
        "onnxruntime": onnxruntime.__version__,
    }


def seed_of(seed: int, line: int) -> int:
    return int(np.random.SeedSequence([seed, line]).generate_state(1, np.uint64)[0])


@contextlib.contextmanager
def errors_in(first: int, places: list[int], unit: str = "line") -> Iterator[None]:
    """Name the lines of a batch in its ValueError, numbered from 1. `unit` is the word for what is
    numbered."""
    try:
        yield
    except ValueError as error:
        numbers = [first + place + 1 for place in sorted(places)]
        more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
        kind = UsageError if isinstance(error, UsageError) else ValueError
        raise kind(f"among the {unit}s {', '.join(map(str, numbers[:5]))}{more}: {error}") from None


def generate_file(
    batches: "Batches | Predictions",
    source: Path,
    output: Path,
    target_prefix: Path | None = None,
    force: bool = False,
) -> None:
    """Writes to the file `output` what `batches` gives for the lines of `source`, with those of
    `target_prefix`; both plain or compressed.

    A progress bar is drawn where standard error is a terminal. A call that was stopped, in whatever
    way, goes on where it was; the result is the same, byte for byte.

    Raises:
        FileNotFoundError, IsADirectoryError: for an input that is none.
        FileExistsError: if `output` exists and `force` is not given, if it is no file, if another
            process writes it, and if what was begun there depends on anything else than this call.
        ValueError: as `TextRuntime.generate`, with the lines; for an input that is no text or
            changes meanwhile, and for another number of prefixes than lines.
        UsageError: for an `output` that is an input, within the export or named as a compressed
            file.
    """
    if target_prefix is not None and "encoder" not in batches.runtime.info.specs:
        raise UsageError(
            "a target prefix is for seq2seq, and this export is a decoder: its prompt is what it "
            "goes on from"
        )
    inputs = [path for path in (source, target_prefix) if path is not None]
    out = checked_output(output, inputs, batches.runtime.info.directory, force)
    stamps = [stamp_of(path.stat()) for path in inputs]
    count = 0
    facts = batches.facts()
    for name, path in zip(("input", "target_prefix"), inputs):
        found, facts[name] = survey(path)
        if name == "target_prefix" and found != count:
            raise ValueError(f"{target_prefix} has {found} lines, expected {count} as {source}")
        count = found
    with (
        growing(out, facts, force) as partial,
        tqdm(total=count, initial=partial.done, unit=" lines", disable=None) as bar,
    ):
        lines, *prefixes = (
            itertools.islice(read_lines(path), partial.done, None) for path in inputs
        )
        for window in batches.windows(
            lines, prefixes[0] if prefixes else None, partial.done, bar.update
        ):
            partial.write(window, min(partial.done + WINDOW * batches.batch_size, count))
        if [stamp_of(path.stat()) for path in inputs] != stamps:
            raise ValueError(
                f"{source} or its prefixes changed while they were read: what was written is of "
                "both versions"
            )


def checked_output(output: Path, inputs: list[Path], export: Path, force: bool) -> Path:
    """The place that `output` leads to."""
    out = Path(os.path.realpath(output))
    if out.name.endswith(READABLE):
        raise UsageError(
            f"the output is {output}, but it is written as plain text: expected a name without "
            f"{out.suffix}"
        )
    if out.is_relative_to(export):
        raise UsageError(f"the output is {output}, inside the export: expected a place outside")
    if any(out.exists() and path.exists() and out.samefile(path) for path in inputs):
        raise UsageError(f"the output is {output}, an input: expected another file")
    if out.exists() and not out.is_file():
        raise FileExistsError(f"{output} is no file, expected one or a new path")
    if out.exists() and not force:
        raise FileExistsError(
            f"{output} exists already; expected a new path, or --force to replace it"
        )
    return out


class Partial:
    """The file that grows, and the `log` of how far it is; `done` lines of the input are in it.

    Raises:
        FileExistsError: if what was begun there depends on anything else than `facts`.
    """

    def __init__(self, file: BinaryIO, log: BinaryIO, facts: dict):
        self.file = file
        self.log = log
        log.seek(0)
        begun, self.done, size = progress(log.read().decode(), os.fstat(file.fileno()).st_size)
        if self.done:
            check_same(file.name, begun, facts)
        file.truncate(size)
        if not self.done:
            log.truncate(0)
            self.note(json.dumps(facts))

    def write(self, lines: list[str], done: int) -> None:
        """Adds `lines`; with them `done` lines of the input are."""
        self.file.write("".join(line + "\n" for line in lines).encode())
        self.file.flush()
        self.note(f"{done} {self.file.tell()}")
        self.done = done

    def note(self, line: str) -> None:
        self.log.write(line.encode() + b"\n")
        self.log.flush()


@contextlib.contextmanager
def growing(out: Path, facts: dict, force: bool) -> Iterator[Partial]:
    """Yields what grows beside `out` and takes its name when the block ends without an error.

    Raises:
        FileExistsError: as `Partial`; if another process is at it; and at the end, if `out` is
            there by then and `force` is not given.
    """
    path, state = (out.with_name(f".{out.name}.partial{end}") for end in ("", ".state"))
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = None
    try:
        with open(state, "a+b") as log, open(path, "a+b") as file:
            lock(log, out)
            partial = Partial(file, log, facts)
            yield partial
        if out.exists() and not force:
            raise FileExistsError(f"{out} was made meanwhile; the result is in {path}")
        os.replace(path, out)
        state.unlink()
    finally:
        if partial is not None and not partial.done:  # nothing to go on from
            path.unlink(missing_ok=True)
            state.unlink(missing_ok=True)


def lock(file: BinaryIO | int, out: Path) -> None:
    """Where the system has such locks, which end with their process."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(
            f"{out} is being written by another process: expected to be alone"
        ) from None


def progress(state: str, size: int) -> tuple[dict, int, int]:
    """What the run that wrote `state` depends on, how many lines of its input are done, and how
    much of its `size` bytes of output these are. A last line without an end was cut off; so may the
    output be, if the machine stopped."""
    facts, *records = state.split("\n")[:-1] or ["{}"]
    ends = [(int(done), int(end)) for done, end in map(str.split, records)]
    done, end = next((each for each in reversed(ends) if each[1] <= size), (0, 0))
    return json.loads(facts), done, end


def check_same(partial: str, begun: dict, facts: dict) -> None:
    facts = json.loads(json.dumps(facts))
    differ = sorted(
        name for name in begun.keys() | facts.keys() if begun.get(name) != facts.get(name)
    )
    if differ:
        hidden = [name for name in differ if name in HASHED]
        shown = [
            f"{name} {begun.get(name)!r}, now {facts.get(name)!r}"
            for name in differ
            if name not in HASHED
        ]
        found = f"{partial} was begun with another {', '.join([*hidden, *shown])}"
        raise FileExistsError(f"{found}: expected the same call, or that you remove it")
