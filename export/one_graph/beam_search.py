"""Beam search as nodes of a loop: `runtime.search.BeamSearch`, but each input has its own number of
beams, penalty and steps.

B inputs, K the largest number of beams, C candidates per input, t tokens so far. An input with
fewer beams has empty ones: their score is `EXCLUDED_SCORE`, so that beams with tokens always win.
"""

from __future__ import annotations

import numpy as np
from onnx_ir import Value

from ..graphs.context import Values
from ..graphs.ops import Ops
from ..inference.options import EXCLUDED_SCORE
from ..specs.graph_spec import TensorSpec
from .generation_config import Rules
from .searches import PER_ROW, SEQUENCES
from .step import LoopInputs

LOWEST = np.array(-np.inf, np.float32)
HIGHEST = np.array(np.inf, np.float32)
EXCLUDED = np.array(EXCLUDED_SCORE, np.float32)
STOPS, NEVER = 1, 2  # early_stopping: 0 is False, 1 True and 2 "never"


class Beams:
    """The best hypothesis of `num_beams`, by sum(log p) / length^length_penalty, and that score."""

    inputs = (
        TensorSpec("num_beams", "int64", PER_ROW),
        TensorSpec("length_penalty", "float32", PER_ROW),
        TensorSpec("early_stopping", "int64", PER_ROW),
    )
    outputs = (SEQUENCES, TensorSpec("scores", "float32", PER_ROW))
    dtypes = ("int64", "float32", "int64", "float32", "int64", "bool")

    def __init__(self, rules: Rules):
        self.rules = rules
        self.per_beam = max(2, 1 + len(rules.options.eos_token_ids))  # candidates

    def beams(self, ops: Ops, settings: Values) -> Value:
        """Return the largest number of beams of an input, (1,). Each is limited to 1 up to the size
        of the vocabulary.

        `settings` are the inputs of the graph by name. Call this before `begin`, which uses it.
        """
        self.counts = ops("Clip", settings["num_beams"], 1, self.rules.size)
        self.max_count = ops("Reshape", ops("ReduceMax", self.counts, keepdims=0), [1])
        return self.max_count

    def begin(
        self, inputs: LoopInputs, settings: Values, prompt: Value, limit: Value
    ) -> list[Value]:
        """Return the states before the first token, six values.

        They are tokens (B, K, t) and scores (B, K) of unfinished hypotheses, tokens, scores and
        lengths (B, K) of finished ones, and whether an input can improve, (B, 1). At most `limit`
        (B, 1) tokens follow the `prompt` (B, P). `settings` are the inputs of the graph by name.
        """
        ops = inputs.ops
        self.limit, self.settings, self.prompt = limit, settings, prompt
        self.row_limit = inputs.repeat_rows(limit)
        self.beam_indices = ops.range(self.max_count)
        self.exists = ops("Less", self.beam_indices, self.counts)
        self.width = ops("Mul", self.max_count, self.per_beam)
        self.ranks = ops.range(self.width)
        self.stops = ops("Equal", settings["early_stopping"], STOPS)
        shape = [inputs.batch, self.max_count]
        tokens = ops.filled([*shape, 0], np.int64(0))
        first = ops("Where", ops("Equal", self.beam_indices, 0), 0.0, EXCLUDED)
        scores = ops("Add", ops.filled(shape, np.float32(0)), first)
        none = ops.filled(shape, np.float32(-np.inf))
        return [
            tokens,
            scores,
            tokens,
            none,
            ops.filled(shape, np.int64(0)),
            ops("Greater", limit, 0),
        ]

    def advance(
        self, ops: Ops, logits: Value, states: list[Value], position: Value
    ) -> tuple[Value, Value, list[Value], Value]:
        """Extend all beams by one token, which follows `position` new tokens.

        Returns the next tokens (B * K, 1), the beams (B, K) that they continue, the new states, and
        a scalar that is True to continue. Logits are (B * K, V).
        """
        sequences, scores, *ended, can_improve = states
        length = ops("Add", position, 1)
        candidates, tokens, parents = self.candidates(ops, logits, scores, position)
        sequences = ops(
            "Concat", beams_at(ops, sequences, parents), ops("Unsqueeze", tokens, [2]), axis=2
        )
        is_last = ops("GreaterOrEqual", length, self.limit)
        ends = ops("Or", ops.is_in(tokens, self.rules.options.eos_token_ids), is_last)
        ended = self.with_ended(ops, ended, sequences, candidates, ends, can_improve, length)
        running = ops("Where", ends, ops("Add", candidates, EXCLUDED), candidates)
        scores, kept = ops.outputs(2, "TopK", running, self.max_count, axis=-1)
        scores = ops("Where", self.exists, scores, ops("Add", EXCLUDED, EXCLUDED))
        can_improve = ops("And", can_improve, self.improvable(ops, scores, ended, length))
        can_improve = ops("And", can_improve, ops("Not", is_last))
        goes_on = ops.any(ops("And", can_improve, self.is_open(ops, ended[2])), keepdims=0)
        next_tokens = ops("Reshape", ops("GatherElements", tokens, kept, axis=1), [-1, 1])
        states = [beams_at(ops, sequences, kept), scores, *ended, can_improve]
        return next_tokens, ops("GatherElements", parents, kept, axis=1), states, goes_on

    def candidates(self, ops: Ops, logits: Value, scores: Value, position: Value) -> list[Value]:
        """Return the best C continuations of each input: sums of log p, tokens, and the beams that
        they continue, all (B, C).

        `logits` are (B * K, V), `scores` (B, K) those of the beams. `position` is the number of new
        tokens so far.
        """
        log_p = self.rules.applied(
            ops, ops("LogSoftmax", logits, axis=-1), position, self.row_limit
        )
        if self.rules.options.renormalize_logits:
            log_p = ops("LogSoftmax", log_p, axis=-1)
        size = self.rules.size
        sums = ops(
            "Add",
            ops("Reshape", log_p, ops("Concat", [-1], self.max_count, [size], axis=0)),
            ops("Unsqueeze", scores, [2]),
        )
        best, indices = ops.outputs(2, "TopK", ops("Reshape", sums, [0, -1]), self.width, axis=-1)
        return [best, ops("Mod", indices, size), ops("Div", indices, size)]

    def with_ended(
        self,
        ops: Ops,
        ended: list[Value],
        sequences: Value,
        candidates: Value,
        ends: Value,
        can_improve: Value,
        length: Value,
    ) -> list[Value]:
        """Return tokens, scores and lengths of the best K finished hypotheses, which may now
        include candidates.

        Args:
            ended: the finished hypotheses so far.
            sequences: tokens of the candidates, (B, C, t).
            candidates: their scores (B, C).
            ends: True for candidates that end, (B, C).
            can_improve: True for inputs that still search, (B, 1).
            length: tokens of the candidates, a scalar.
        """
        old, scores, lengths = ended
        is_open = ops("And", can_improve, self.is_open(ops, lengths))
        just = ops("And", ops("And", ends, is_open), ops("Less", self.ranks, self.counts))
        new = ops("Where", just, ops("Div", candidates, self.divisor(ops, length)), LOWEST)
        fill = ops("Add", ops("Mul", lengths, 0), self.rules.options.fill_token_id)
        old = ops("Concat", old, ops("Unsqueeze", fill, [2]), axis=2)
        scores, best = ops.outputs(
            2, "TopK", ops("Concat", scores, new, axis=1), self.max_count, axis=-1
        )
        lengths = ops("Concat", lengths, ops("Mul", ops.cast(just, "int64"), length), axis=1)
        lengths = ops("GatherElements", lengths, best, axis=1)
        exists = self.exists
        sequences = beams_at(ops, ops("Concat", old, sequences, axis=1), best)
        return [sequences, ops("Where", exists, scores, LOWEST), ops("Where", exists, lengths, 0)]

    def divisor(self, ops: Ops, length: Value) -> Value:
        """Return length^length_penalty, (B, 1), for the scalar or (B, 1) `length`."""
        return ops("Pow", ops.cast(length, "float32"), self.settings["length_penalty"])

    def is_open(self, ops: Ops, lengths: Value) -> Value:
        """Return a flag (B, 1): False for inputs that stop early and have as many finished
        hypotheses as beams.

        `lengths` (B, K) are those of finished hypotheses, 0 for none.
        """
        return ops("Not", ops("And", self.stops, self.are_full(ops, lengths)))

    def are_full(self, ops: Ops, lengths: Value) -> Value:
        """Return a flag (B, 1): True for inputs that have as many finished hypotheses as beams.

        `lengths` (B, K) are those of finished hypotheses, 0 for none.
        """
        is_empty = ops("And", self.exists, ops("Less", lengths, 1))
        return ops("Not", ops.any(is_empty, [1]))

    def improvable(self, ops: Ops, scores: Value, ended: list[Value], length: Value) -> Value:
        """Return a flag (B, 1): True for inputs whose search can still find a better hypothesis.

        Such inputs have fewer finished hypotheses than beams, or their best unfinished one may beat
        the worst finished one. `scores` (B, K) are those of unfinished hypotheses. `ended` are
        tokens, scores and lengths of finished ones. `length` is the number of new tokens so far.
        The flag may be True for an input whose search has ended, so the caller keeps those ended.
        """
        _, finished, lengths = ended
        is_far = ops(
            "And",
            ops("Equal", self.settings["early_stopping"], NEVER),
            ops("Greater", self.settings["length_penalty"], 0.0),
        )
        possible = ops(
            "Div", ops.first(scores), self.divisor(ops, ops("Where", is_far, self.limit, length))
        )
        worst = ops("ReduceMin", ops("Where", self.exists, finished, HIGHEST), [1])
        return ops("Or", ops("Not", self.are_full(ops, lengths)), ops("Greater", possible, worst))

    def end(self, ops: Ops, states: list[Value]) -> list[Value]:
        """Return [sequences (B, P + t), scores (B, 1)]: the best finished hypothesis of each input
        after its prompt, and its score, 0 without one."""
        _, _, sequences, scores, lengths, _ = states
        width = ops("Reshape", ops("ReduceMax", ops.first(lengths), keepdims=0), [1])
        best = ops("Slice", ops("Squeeze", ops.first(sequences), [1]), [0], width, [1])
        is_found = ops("Greater", ops.first(lengths), 0)
        return [
            ops("Concat", self.prompt, best, axis=1),
            ops("Where", is_found, ops.first(scores), 0.0),
        ]


def beams_at(ops: Ops, sequences: Value, indices: Value) -> Value:
    """Return some of the `sequences` (B, K, t): those at `indices` (B, n), as (B, n, t)."""
    shape = ops("Concat", ops("Shape", indices), ops("Shape", sequences, start=2), axis=0)
    return ops(
        "GatherElements", sequences, ops("Expand", ops("Unsqueeze", indices, [2]), shape), axis=1
    )
