"""How far a run is, on standard error."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

SECONDS = 30  # from one line to the next, where standard error is no terminal


class Told:
    """A line each `SECONDS`, of so many `total` lines, `found` of which an earlier call did."""

    def __init__(self, total: int):
        self.total = total
        self.done = self.found = 0
        self.start = self.last = time.monotonic()

    def skip(self, count: int) -> None:
        """As `update`, of lines that were done before: the rate is without them."""
        self.found += count
        self.done += count

    def update(self, count: int) -> None:
        """So many lines more are done."""
        self.done += count
        now = time.monotonic()
        if now - self.last >= SECONDS:
            self.last = now
            rate = (self.done - self.found) / (now - self.start)
            left = tqdm.format_interval(max(self.total - self.done, 0) / rate) if rate else "?"
            print(
                f"{self.done:,} of {self.total:,} lines, {rate:,.1f} a second, {left} left",
                file=sys.stderr,
                flush=True,
            )


class Drawn:
    """As `Told`, a bar in a terminal."""

    def __init__(self, bar: tqdm):
        self.bar = bar

    def skip(self, count: int) -> None:
        """As `Told`."""
        self.bar.initial += count
        self.bar.update(count)

    def update(self, count: int) -> None:
        """As `Told`."""
        self.bar.update(count)


@contextmanager
def progress(total: int) -> Iterator[Told | Drawn]:
    """What is told of lines that are done."""
    if not sys.stderr.isatty():
        yield Told(total)
        return
    with tqdm(total=total, unit=" lines") as bar:
        yield Drawn(bar)
