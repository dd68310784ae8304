"""What a target gives `one_graph`: what reads the source or the prompt, and a step of the decoder, as nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..graphs.ops import Ops


@dataclass(frozen=True)
class Inputs:
    """Of one run.

    Args:
        ops: the graph that the loop stands in.
        ids: int64 (B, S), the source; of a decoder the prompts, padded on the left. `mask` as these.
        beams: int64 (1,), K rows of each input; `None` for one.
        lengths: int64 (B, 1), tokens of each prompt of a decoder.
        positions: how many a learned table has; `None` without one.
    """

    ops: Ops
    ids: ir.Value
    mask: ir.Value
    beams: ir.Value | None = None
    lengths: ir.Value | None = None
    positions: int | None = None

    @property
    def batch(self) -> ir.Value:
        """(1,), B."""
        return self.ops.size(self.ids, 0)

    @property
    def rows(self) -> ir.Value:
        """(1,), B * K."""
        return self.batch if self.beams is None else self.ops("Mul", self.batch, self.beams)

    def repeated(self, value: ir.Value) -> ir.Value:
        """(B, ...) -> (B * K, ...), the rows of one input together."""
        if self.beams is None:
            return value
        ops = self.ops
        places = ops("Range", 0, ops("Squeeze", self.rows), 1)
        return ops("Gather", value, ops("Div", places, self.beams), axis=0)

    def reordered(self, ops: Ops, states: list[ir.Value], parents: ir.Value) -> list[ir.Value]:
        """Each of `states` (B * K, ...) with the rows of the beams (B, K) of their inputs."""
        first = self.ops("Mul", self.ops("Range", 0, self.ops("Squeeze", self.batch), 1), self.beams)
        rows = ops("Reshape", ops("Add", parents, self.ops("Unsqueeze", first, [1])), [-1])
        return [ops("Gather", state, rows, axis=0) for state in states]

    def known(self, ops: Ops, positions: ir.Value) -> ir.Value:
        """`positions` where the table has them: a row that has ended runs on beside longer ones."""
        return positions if self.positions is None else ops("Min", positions, self.positions - 1)


class Step(Protocol):
    """A decoder whose states go from one step of the loop to the next."""

    def begin(self, inputs: Inputs) -> list[ir.Value]:
        """The states before the first token; of a decoder, before the last one of each prompt.

        Nodes of what never changes go to `inputs.ops`.
        """

    def advance(self, ops: Ops, tokens: ir.Value, states: list[ir.Value], place: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
        """`tokens` (rows, t) after `place` (a scalar) others -> logits (rows, V) of the next one, and the new states."""

    def reorder(self, ops: Ops, states: list[ir.Value], parents: ir.Value, place: ir.Value) -> list[ir.Value]:
        """Each row's states after the step at `place` become those of the beam (B, K) of its input that it continues."""


def own_caches(decoder: ir.Model) -> list[ir.Value]:
    """The inputs of a decoder for keys and values of its own tokens, not of the source."""
    past = [value for value in decoder.graph.inputs if value.name.startswith("past_key_values")]
    return [value for value in past if ".encoder." not in value.name]


def present_caches(outputs: dict[str, ir.Value], past: list[ir.Value]) -> list[ir.Value]:
    """What a step makes of its `past` caches."""
    return [outputs[value.name.replace("past_key_values", "present")] for value in past]


def empty_cache(ops: Ops, cache: ir.Value, rows: ir.Value) -> ir.Value:
    """As `cache` (B, H, L, d), of so many `rows` and of no tokens."""
    _, heads, _, width = cache.shape
    return ops.filled([rows, heads, 0, width], np.float32(0))
