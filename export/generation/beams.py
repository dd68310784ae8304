"""Beam search as nodes of a loop: `runtime.search.BeamSearch`, but each input has its own number of beams, penalty and steps.

B inputs, K the most beams of any, C the candidates of each, t the tokens so far. Beams that an input has not are empty: their
scores are `EXCLUDED_SCORE`, so that they go on with no token before any other's.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graphs.ops import Ops
from ..runtime.options import EXCLUDED_SCORE
from ..targets.spec import TensorSpec
from .rules import Rules
from .searches import EACH, SEQUENCES, Values
from .step import Inputs

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
LOWEST = np.array(-np.inf, np.float32)
HIGHEST = np.array(np.inf, np.float32)
EXCLUDED = np.array(EXCLUDED_SCORE, np.float32)
STOPS, NEVER = 1, 2  # early_stopping: 0 is False, 1 True and 2 "never"


class Beams:
    """The best hypothesis of `num_beams`, by sum(log p) / length^length_penalty, and that score."""

    inputs = (
        TensorSpec("num_beams", "int64", EACH),
        TensorSpec("length_penalty", "float32", EACH),
        TensorSpec("early_stopping", "int64", EACH),
    )
    outputs = (SEQUENCES, TensorSpec("scores", "float32", EACH))

    def __init__(self, rules: Rules):
        self.rules = rules
        self.per_beam = max(2, 1 + len(rules.options.eos_token_ids))  # candidates

    def steps(self, ops: Ops, given: Values) -> ir.Value:
        """As `Search`."""
        return given["max_new_tokens"]

    def beams(self, ops: Ops, given: Values) -> ir.Value:
        """As `Search`: from 1 to what a vocabulary can fill."""
        self.counts = ops("Clip", given["num_beams"], 1, self.rules.size)
        self.most = ops("Reshape", ops("ReduceMax", self.counts, keepdims=0), [1])
        return self.most

    def begin(self, inputs: Inputs, given: Values, prompt: ir.Value, limit: ir.Value) -> list[ir.Value]:
        """As `Search`: the tokens (B, K, t) and scores (B, K) of what goes on, the tokens, scores and lengths (B, K) of what
        ended, and whether an input can improve (B, 1)."""
        ops = inputs.ops
        self.limit, self.given, self.prompt = limit, given, prompt
        self.row_limit = inputs.repeated(limit)
        self.places = ops("Range", 0, ops("Squeeze", self.most), 1)
        self.exists = ops("Less", self.places, self.counts)
        self.width = ops("Mul", self.most, self.per_beam)
        self.ranks = ops("Range", 0, ops("Squeeze", self.width), 1)
        self.stops = ops("Equal", given["early_stopping"], STOPS)
        shape = [inputs.batch, self.most]
        tokens = ops.filled([*shape, 0], np.int64(0))
        first = ops("Where", ops("Equal", self.places, 0), 0.0, EXCLUDED)
        scores = ops("Add", ops.filled(shape, np.float32(0)), first)
        none = ops.filled(shape, np.float32(-np.inf))
        return [tokens, scores, tokens, none, ops.filled(shape, np.int64(0)), ops("Greater", limit, 0)]

    def advance(
        self, ops: Ops, logits: ir.Value, states: list[ir.Value], place: ir.Value
    ) -> tuple[ir.Value, ir.Value, list[ir.Value], ir.Value]:
        """As `Search`."""
        sequences, scores, *ended, can_improve = states
        length = ops("Add", place, 1)
        candidates, tokens, parents = self.candidates(ops, logits, scores, place)
        sequences = ops("Concat", taken(ops, sequences, parents), ops("Unsqueeze", tokens, [2]), axis=2)
        is_last = ops("GreaterOrEqual", length, self.limit)
        ends = ops("Or", ops.is_in(tokens, self.rules.options.eos_token_ids), is_last)
        ended = self.with_ended(ops, ended, sequences, candidates, ends, can_improve, length)
        running = ops("Where", ends, ops("Add", candidates, EXCLUDED), candidates)
        scores, kept = ops.outputs(2, "TopK", running, self.most, axis=-1)
        scores = ops("Where", self.exists, scores, ops("Add", EXCLUDED, EXCLUDED))
        can_improve = ops("And", can_improve, self.improvable(ops, scores, ended, length))
        can_improve = ops("And", can_improve, ops("Not", is_last))
        goes_on = ops.any(ops("And", can_improve, ops("Not", ops("And", self.stops, self.are_full(ops, ended[2])))), keepdims=0)
        next_tokens = ops("Reshape", ops("GatherElements", tokens, kept, axis=1), [-1, 1])
        states = [taken(ops, sequences, kept), scores, *ended, can_improve]
        return next_tokens, ops("GatherElements", parents, kept, axis=1), states, goes_on

    def candidates(self, ops: Ops, logits: ir.Value, scores: ir.Value, place: ir.Value) -> list[ir.Value]:
        """Of each input the best of all its beams, all (B, C): log p, tokens, and the beams that they continue."""
        log_p = self.rules.applied(ops, ops("LogSoftmax", logits, axis=-1), place, self.row_limit)
        if self.rules.options.renormalize_logits:
            log_p = ops("LogSoftmax", log_p, axis=-1)
        size = self.rules.size
        sums = ops("Add", ops("Reshape", log_p, ops("Concat", [-1], self.most, [size], axis=0)), ops("Unsqueeze", scores, [2]))
        best, chosen = ops.outputs(2, "TopK", ops("Reshape", sums, [0, -1]), self.width, axis=-1)
        return [best, ops("Mod", chosen, size), ops("Div", chosen, size)]

    def with_ended(
        self,
        ops: Ops,
        ended: list[ir.Value],
        sequences: ir.Value,
        candidates: ir.Value,
        ends: ir.Value,
        can_improve: ir.Value,
        length: ir.Value,
    ) -> list[ir.Value]:
        """What `ended`, with those candidates that end among the best K."""
        old, scores, lengths = ended
        is_open = ops("And", can_improve, ops("Not", ops("And", self.stops, self.are_full(ops, lengths))))
        just = ops("And", ops("And", ends, is_open), ops("Less", self.ranks, self.counts))
        new = ops("Where", just, ops("Div", candidates, self.divisor(ops, length)), LOWEST)
        old = ops("Concat", old, self.filling(ops, lengths), axis=2)
        scores, best = ops.outputs(2, "TopK", ops("Concat", scores, new, axis=1), self.most, axis=-1)
        lengths = ops("Concat", lengths, ops("Mul", ops.cast(just, "int64"), length), axis=1)
        lengths = ops("GatherElements", lengths, best, axis=1)
        exists = self.exists
        sequences = taken(ops, ops("Concat", old, sequences, axis=1), best)
        return [sequences, ops("Where", exists, scores, LOWEST), ops("Where", exists, lengths, 0)]

    def filling(self, ops: Ops, lengths: ir.Value) -> ir.Value:
        """(B, K) -> (B, K, 1), fill tokens."""
        fill = self.rules.options.fill_token_id
        return ops("Unsqueeze", ops("Add", ops("Mul", lengths, 0), fill), [2])

    def divisor(self, ops: Ops, length: ir.Value) -> ir.Value:
        """length^length_penalty, (B, 1)."""
        return ops("Pow", ops.cast(length, "float32"), self.given["length_penalty"])

    def are_full(self, ops: Ops, lengths: ir.Value) -> ir.Value:
        """Whether as many ended as there are beams, (B, 1)."""
        is_empty = ops("And", self.exists, ops("Less", lengths, 1))
        return ops("Not", ops.any(is_empty, [1]))

    def improvable(self, ops: Ops, scores: ir.Value, ended: list[ir.Value], length: ir.Value) -> ir.Value:
        """Whether the best that goes on may still beat the worst that ended, (B, 1)."""
        _, finished, lengths = ended
        is_far = ops(
            "And", ops("Equal", self.given["early_stopping"], NEVER), ops("Greater", self.given["length_penalty"], 0.0)
        )
        possible = ops("Div", ops("Slice", scores, [0], [1], [1]), self.divisor(ops, ops("Where", is_far, self.limit, length)))
        worst = ops("ReduceMin", ops("Where", self.exists, finished, HIGHEST), [1])
        return ops("Or", ops("Not", self.are_full(ops, lengths)), ops("Greater", possible, worst))

    def end(self, ops: Ops, states: list[ir.Value]) -> list[ir.Value]:
        """As `Search`."""
        _, _, sequences, scores, lengths, _ = states
        width = ops("Reshape", ops("ReduceMax", ops("Slice", lengths, [0], [1], [1]), keepdims=0), [1])
        best = ops("Slice", ops("Squeeze", ops("Slice", sequences, [0], [1], [1]), [1]), [0], width, [1])
        is_found = ops("Greater", ops("Slice", lengths, [0], [1], [1]), 0)
        return [ops("Concat", self.prompt, best, axis=1), ops("Where", is_found, ops("Slice", scores, [0], [1], [1]), 0.0)]


def taken(ops: Ops, sequences: ir.Value, chosen: ir.Value) -> ir.Value:
    """`sequences` (B, K, t) of the `chosen` (B, n) -> (B, n, t)."""
    shape = ops("Concat", ops("Shape", chosen), ops("Shape", sequences, start=2), axis=0)
    return ops("GatherElements", sequences, ops("Expand", ops("Unsqueeze", chosen, [2]), shape), axis=1)
