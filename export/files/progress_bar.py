"""The progress of a run, on standard error."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

SECONDS = 30  # between two lines, where standard error is not a terminal


class ProgressLog:
    """A progress report for standard error that is a file or a pipe: a line every `SECONDS`."""

    def __init__(self, total: int):
        self.total = total
        self.done = self.kept = 0
        self.start = self.last = time.monotonic()

    def skip(self, count: int) -> None:
        """Add `count` lines whose results an earlier run has finished. The printed rate leaves them
        out."""
        self.kept += count
        self.done += count

    def update(self, count: int) -> None:
        """Add `count` lines that are done now."""
        self.done += count
        now = time.monotonic()
        if now - self.last >= SECONDS:
            self.last = now
            rate = (self.done - self.kept) / (now - self.start)
            left = tqdm.format_interval(max(self.total - self.done, 0) / rate) if rate else "?"
            print(
                f"{self.done:,} of {self.total:,} lines, {rate:,.1f} a second, {left} left",
                file=sys.stderr,
                flush=True,
            )


class Bar:
    """A bar, for a terminal."""

    def __init__(self, bar: tqdm):
        self.bar = bar

    def skip(self, count: int) -> None:
        self.bar.initial += count
        self.bar.update(count)

    def update(self, count: int) -> None:
        self.bar.update(count)


@contextmanager
def progress(total: int) -> Iterator[Bar | ProgressLog]:
    """Yield a counter of the finished lines of `total`: a bar if standard error is a terminal, else
    a log."""
    if not sys.stderr.isatty():
        yield ProgressLog(total)
        return
    with tqdm(total=total, unit=" lines") as bar:
        yield Bar(bar)
