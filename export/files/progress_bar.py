"""The progress of a run, on standard error."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tqdm import tqdm

SECONDS = 30  # between two lines, where standard error is not a terminal


class ProgressLog:
    """A progress report for standard error that is a file or a pipe: a line every `SECONDS`. It has
    the names of a tqdm bar: `n` of `total` lines are done, `initial` of them before it began."""

    def __init__(self, total: int):
        self.total = total
        self.n = self.initial = 0
        self.start = self.last = time.monotonic()

    def update(self, count: int) -> None:
        """Add `count` lines that are done now."""
        self.n += count
        now = time.monotonic()
        if now - self.last >= SECONDS:
            self.last = now
            rate = (self.n - self.initial) / (now - self.start)
            left = tqdm.format_interval(max(self.total - self.n, 0) / rate) if rate else "?"
            print(
                f"{self.n:,} of {self.total:,} lines, {rate:,.1f} a second, {left} left",
                file=sys.stderr,
                flush=True,
            )


class Progress(Protocol):
    """A counter of lines: a `ProgressLog` or a bar of tqdm."""

    initial: int

    def update(self, count: int, /) -> object: ...


def skip(progress: Progress, count: int) -> None:
    """Add `count` lines whose results an earlier run has finished. The rate leaves them out."""
    progress.initial += count
    progress.update(count)


@contextmanager
def show_progress(total: int) -> Iterator[Progress]:
    """Yield a counter of the finished lines of `total`: a bar if standard error is a terminal, else
    a log."""
    if not sys.stderr.isatty():
        yield ProgressLog(total)
        return
    with tqdm(total=total, unit=" lines") as bar:
        yield bar
