"""What a target gives `one_graph`: the encoder and a step of the decoder, as nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import onnx_ir as ir

    from .ops import Ops


@dataclass(frozen=True)
class Inputs:
    """Of one run.

    Args:
        ops: the graph that the loop stands in.
        ids: int64 (B, S); `mask` as these.
        steps: int64 (1,), the most new tokens of any row.
        beams: int64 (1,), K rows of each input; `None` for one.
    """

    ops: Ops
    ids: ir.Value
    mask: ir.Value
    steps: ir.Value
    beams: ir.Value | None = None

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


class Step(Protocol):
    """A decoder whose states go from one step of the loop to the next."""

    def begin(self, inputs: Inputs) -> list[ir.Value]:
        """The states before the first token. Nodes of what never changes go to `inputs.ops`."""

    def advance(self, ops: Ops, tokens: ir.Value, states: list[ir.Value], place: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
        """`tokens` (rows, t) after `place` (a scalar) others -> logits (rows, V) of the next one, and the new states."""

    def reorder(self, ops: Ops, states: list[ir.Value], parents: ir.Value, place: ir.Value) -> list[ir.Value]:
        """Each row's states after the step at `place` become those of the beam (B, K) of its input that it continues."""


def own_caches(decoder: ir.Model) -> list[ir.Value]:
    """The inputs of a decoder for keys and values of its own tokens, not of the source."""
    past = [value for value in decoder.graph.inputs if value.name.startswith("past_key_values")]
    return [value for value in past if ".decoder." in value.name]
