"""The Protocol of batches."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

WAIT_PER_PART = 0.00025  # seconds per running part, which waits for the prefill of a join


class Batch(Protocol):
    """A batch of rows that a worker computes step by step. Parts of requests join and leave.

    Each part has one or several rows.
    """

    @property
    def running(self) -> list[Any]:
        """The parts that the next step computes."""

    @property
    def num_rows(self) -> int:
        """The number of rows that the next step computes."""

    @property
    def prefilling(self) -> Collection[Any]:
        """The parts that have joined and whose prompts are not read completely yet."""

    @property
    def join_delay(self) -> float:
        """The seconds that parts may wait, so that more of them join together.

        Parts that join together cost less, and every join slows running rows down.
        """

    @property
    def should_grow(self) -> bool:
        """True if parts should join the running ones instead of a smaller batch of another worker.

        A step of one batch then costs less than the steps of two batches half as large.
        """

    @property
    def num_free_rows(self) -> int:
        """Number of rows that can join now."""

    @property
    def num_spare_rows(self) -> int:
        """Number of further rows, for first parts of requests while larger requests wait."""

    def fits(self, part: Any, beside: Sequence[Any]) -> bool:
        """Return True if `part` can join now together with `beside`.

        `beside` are parts that were selected before it to join at the same time. They have not
        joined yet.
        """

    def join(self, parts: list[Any]) -> None:
        """Add `parts` and read their prompts, as much of them as one pause between two steps
        allows.

        It is called before each step, also without parts, to read on.
        """

    def step(self) -> int:
        """Compute the rows of all running parts and return the number of their new tokens.

        A step gives each row one token, or none while its prompt is read; a search in graphs runs
        several steps. Beams in graphs only count when they end. An encoder has no tokens.
        """

    def remove(self, parts: Sequence[Any]) -> None:
        """Remove `parts`, whether they are finished or not.

        Their rows become free at once, or when all parts have left if they started together.
        """
