"""The Protocol of batches."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

WAIT_PER_PART = 0.00025  # seconds per running part, which waits for the prefill of a join


class Batch(Protocol):
    """A batch of parts of requests, which a worker steps. Each part has one or several rows."""

    running: list[Any]

    @property
    def prefilling(self) -> Collection[Any]:
        """Parts that have joined and whose prompts are not prefilled yet."""

    @property
    def join_delay(self) -> float:
        """Seconds that parts may wait so that more of them join together. Parts that join together
        cost less, and every join slows running rows down."""

    @property
    def num_free_rows(self) -> int:
        """Number of rows that can join now."""

    def fits(self, part: Any, beside: Sequence[Any]) -> bool:
        """Return whether `part` can join now together with the parts `beside` it."""

    def join(self, parts: list[Any]) -> None:
        """Add parts and prefill their prompts, as far as allowed between two steps."""

    def step(self) -> list[list[int]]:
        """Run all parts once. Return the new tokens of each row; rows whose prompt is still being
        read, and rows of an encoder, have none."""

    def remove(self, part: Any) -> None:
        """Remove a part and free its rows, whether it is finished or not."""
