"""Beam search as nodes of a loop: `runtime.search.BeamSearch`, but each input has its own number of
beams, penalty and steps.

B inputs, K the largest number of beams, C candidates per input, t tokens so far. An input with
fewer beams has empty ones: their score is `EXCLUDED_SCORE`, so that beams with tokens always win.
"""

from __future__ import annotations

import numpy as np
from onnx_ir import Value

from ..graphs.beams import BeamRules, finished_beams, improvable, running_beams, top_k
from ..graphs.context import Values
from ..graphs.ops import Ops
from ..inference.options import EXCLUDED_SCORE
from ..specs.graph_spec import TensorSpec
from .generation_config import Rules
from .searches import PER_ROW, SEQUENCES
from .step import LoopInputs

EXCLUDED = np.array(EXCLUDED_SCORE, np.float32)
STOPS, NEVER = 1, 2  # early_stopping: 0 is False, 1 True and 2 "never"


class GraphBeamSearch:
    """A search of the best hypothesis of `num_beams`, by sum(log p) / length^length_penalty, and of
    that score. Its attributes are those of `GraphTokenSearch`."""

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
        self.limit, self.prompt = limit, prompt
        self.row_limit = inputs.repeat_rows(limit)
        self.width = ops("Mul", self.max_count, self.per_beam)
        self.is_best = ops("Less", ops.range(self.width), self.counts)
        beam_indices, early = ops.range(self.max_count), settings["early_stopping"]
        self.search = BeamRules(
            self.max_count,
            limit,
            settings["length_penalty"],
            ops("Equal", early, STOPS),
            ops("Equal", early, NEVER),
            ops("Less", beam_indices, self.counts),
        )
        shape = [inputs.batch, self.max_count]
        tokens = ops.filled([*shape, 0], np.int64(0))
        first = ops("Where", ops("Equal", beam_indices, 0), 0.0, EXCLUDED)
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
        scores, kept = running_beams(ops, self.search, candidates, ends)
        exists = self.search.exists
        scores = ops("Where", exists, scores, ops("Add", EXCLUDED, EXCLUDED))
        just_ended = ops("And", ops("And", ends, can_improve), self.is_best)
        old, *of_ended = ended
        *of_ended, best = finished_beams(ops, self.search, of_ended, candidates, just_ended, length)
        fill = ops("Add", ops("Mul", ended[2], 0), self.rules.options.fill_token_id)
        old = ops("Concat", old, ops("Unsqueeze", fill, [2]), axis=2)
        ended = [beams_at(ops, ops("Concat", old, sequences, axis=1), best), *of_ended]
        goes_on = improvable(ops, self.search, scores, of_ended, length)
        can_improve = ops("And", ops("And", can_improve, goes_on), ops("Not", is_last))
        next_tokens = ops("Reshape", ops("GatherElements", tokens, kept, axis=1), [-1, 1])
        states = [beams_at(ops, sequences, kept), scores, *ended, can_improve]
        parents = ops("GatherElements", parents, kept, axis=1)
        return next_tokens, parents, states, ops.any(can_improve, keepdims=0)

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
        best, indices = top_k(ops, ops("Reshape", sums, [0, -1]), self.width, size)
        return [best, ops("Mod", indices, size), ops("Div", indices, size)]

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
