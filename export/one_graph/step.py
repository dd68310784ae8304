"""The part of a target in `one_graph`: nodes that read the source or the prompt, and nodes of a
step of the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx_ir import Value

    from ..graphs.ops import Ops


@dataclass(frozen=True)
class LoopInputs:
    """The inputs of a run of the graph.

    Args:
        ops: the graph that the loop stands in.
        ids: int64 (B, S), the source; of a decoder the prompts, padded on the left. `mask` as
            these.
        beams: int64 (1,), K rows of each input; `None` for one.
        lengths: int64 (B, 1), tokens of each prompt of a decoder.
        positions: how many a learned table has; `None` without one.
    """

    ops: Ops
    ids: Value
    mask: Value
    beams: Value | None = None
    lengths: Value | None = None
    positions: int | None = None

    @property
    def batch(self) -> Value:
        """Number of inputs B, a value of shape (1,)."""
        return self.ops.size(self.ids, 0)

    @property
    def rows(self) -> Value:
        """Number of rows B * K, a value of shape (1,)."""
        return self.batch if self.beams is None else self.ops("Mul", self.batch, self.beams)

    @property
    def tokens(self) -> dict[str, Value]:
        """The inputs input_ids and attention_mask of an encoder, by name."""
        return {"input_ids": self.ids, "attention_mask": self.mask}

    def repeat_rows(self, value: Value) -> Value:
        """Return `value` (B, ...) with each row K times, (B * K, ...). The rows of one input are
        together."""
        if self.beams is None:
            return value
        ops = self.ops
        return ops("Gather", value, ops("Div", ops.range(self.rows), self.beams), axis=0)

    def reorder_rows(self, ops: Ops, states: list[Value], parents: Value) -> list[Value]:
        """Return each of `states` (B * K, ...) with the rows of the beams `parents` (B, K).

        Parents are numbers from 0 to K - 1 within an input. `beams` must not be None.
        """
        first = self.ops("Mul", self.ops.range(self.batch), self.beams)
        rows = ops("Reshape", ops("Add", parents, self.ops("Unsqueeze", first, [1])), [-1])
        return [ops("Gather", state, rows, axis=0) for state in states]

    def clip_positions(self, ops: Ops, positions: Value) -> Value:
        """Return `positions`, at most the last of a learned table. Without a table they are
        unchanged.

        Finished rows run on beside longer ones and may reach the end of the table.
        """
        return positions if self.positions is None else ops("Min", positions, self.positions - 1)


class Step(Protocol):
    """A decoder whose states go from one step of the loop to the next.

    Args:
        num_masks: int64 states, before the caches, that all beams of an input share.
    """

    num_masks: int

    def begin(self, inputs: LoopInputs) -> list[Value]:
        """Return the states before the first new token: masks, then caches.

        They hold what the decoder has read: each prompt except its last token, or nothing beside an
        encoder. Nodes whose results stay the same in all steps are added by `inputs.ops`.
        """

    def advance(
        self, ops: Ops, tokens: Value, states: list[Value], position: Value
    ) -> tuple[Value, list[Value]]:
        """Return the logits (rows, V) after `tokens`, and the new states.

        Args:
            ops: adds the nodes of the step to the graph.
            tokens: the last token of each row, (rows, 1).
            states: the states that `begin` or the last step returned.
            position: the number of new tokens so far, a scalar.
        """


class OwnCaches:
    """The caches of a decoder for keys and values of its own tokens, not of the source."""

    def __init__(self, decoder: ir.Model):
        past = [value for value in decoder.graph.inputs if value.name.startswith("past_key_values")]
        self.past = [value for value in past if ".encoder." not in value.name]

    def empty(self, inputs: LoopInputs, per_beam: bool) -> list[Value]:
        """Return caches without tokens: one row for each beam if `per_beam`, else one for each
        input."""
        return [
            empty_cache(inputs.ops, value, inputs.rows if per_beam else inputs.batch)
            for value in self.past
        ]

    def bind(self, states: list[Value]) -> dict[str, Value]:
        """Return {name of the decoder's input: cache} for the caches `states`."""
        return {value.name: state for value, state in zip(self.past, states)}

    def present(self, outputs: dict[str, Value]) -> list[Value]:
        """Return the caches after a step, from the decoder's `outputs` by name."""
        return [outputs[value.name.replace("past_key_values", "present")] for value in self.past]


def empty_cache(ops: Ops, cache: Value, rows: Value) -> Value:
    """Return a cache without tokens, (rows, H, 0, d).

    Heads and widths are those of `cache` (B, H, L, d); `rows` (1,) is the number of rows.
    """
    _, heads, _, width = cache.shape
    return ops.filled([rows, heads, 0, width], np.float32(0))
