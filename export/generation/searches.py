"""Greedy search and sampling, as nodes of a loop."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import onnx_ir as ir

from ..graphs.ops import Ops
from ..targets.spec import TensorSpec
from .rules import Rules
from .step import Inputs

EACH = ("batch_size", 1)
STEPS = TensorSpec("max_new_tokens", "int64", EACH)
UNIFORMS = TensorSpec("uniforms", "float32", ("batch_size", "steps"))
SAMPLING = (
    TensorSpec("temperature", "float32", EACH),
    TensorSpec("top_k", "int64", EACH),
    TensorSpec("top_p", "float32", EACH),
)
SEQUENCES = TensorSpec("sequences", "int64", ("batch_size", "sequence_length"))
Values = dict[str, ir.Value]


class Search(Protocol):
    """Chooses the tokens of B inputs."""

    inputs: tuple[TensorSpec, ...]  # beside ids, mask and max_new_tokens
    outputs: tuple[TensorSpec, ...]

    def steps(self, ops: Ops, given: Values) -> ir.Value:
        """(B, 1), how many tokens there may be of each by what is `given`, the inputs by name."""

    def beams(self, ops: Ops, given: Values) -> ir.Value | None:
        """(1,), rows of each input; `None` for one."""

    def begin(self, inputs: Inputs, given: Values, prompt: ir.Value, limit: ir.Value) -> list[ir.Value]:
        """The states before the first token, after the `prompt` (B, P); of each at most `limit` (B, 1) follow."""

    def advance(
        self, ops: Ops, logits: ir.Value, states: list[ir.Value], place: ir.Value
    ) -> tuple[ir.Value, ir.Value | None, list[ir.Value], ir.Value]:
        """Logits (rows, V) -> the next tokens (rows, 1), the beams (B, K) that they continue, `None` for each its own, the new
        states, and whether to go on (a scalar)."""

    def end(self, ops: Ops, states: list[ir.Value]) -> list[ir.Value]:
        """The `outputs`."""


class TokenSearch:
    """One token of each row, until its end token; rows that ended get the fill token. A `Choice` says which."""

    outputs: tuple[TensorSpec, ...] = (SEQUENCES,)

    def __init__(self, rules: Rules, choice: Greedy | Sampling):
        self.rules = rules
        self.choice = choice
        self.inputs = choice.inputs

    def steps(self, ops: Ops, given: Values) -> ir.Value:
        """As `Search`."""
        return self.choice.steps(ops, given)

    def beams(self, ops: Ops, given: Values) -> None:
        """As `Search`."""

    def begin(self, inputs: Inputs, given: Values, prompt: ir.Value, limit: ir.Value) -> list[ir.Value]:
        """As `Search`: the sequences, and which ended."""
        self.limit = limit
        self.given = given
        return [prompt, inputs.ops("Less", limit, 1)]

    def advance(
        self, ops: Ops, logits: ir.Value, states: list[ir.Value], place: ir.Value
    ) -> tuple[ir.Value, None, list[ir.Value], ir.Value]:
        """As `Search`."""
        sequences, ended = states
        options = self.rules.options
        chosen = self.choice.tokens(ops, self.rules.applied(ops, logits, place, self.limit), place, self.given)
        tokens = ops("Where", ended, options.fill_token_id, chosen)
        ended = ops("Or", ended, ops("GreaterOrEqual", ops("Add", place, 1), self.limit))
        if options.eos_token_ids:
            ended = ops("Or", ended, ops.is_in(tokens, options.eos_token_ids))
        return tokens, None, [ops("Concat", sequences, tokens, axis=1), ended], ops.any(ops("Not", ended), keepdims=0)

    def end(self, ops: Ops, states: list[ir.Value]) -> list[ir.Value]:
        """As `Search`."""
        return states[:1]


class Greedy:
    """The likeliest token."""

    inputs: tuple[TensorSpec, ...] = ()

    def steps(self, ops: Ops, given: Values) -> ir.Value:
        return given["max_new_tokens"]

    def tokens(self, ops: Ops, logits: ir.Value, place: ir.Value, given: Values) -> ir.Value:
        """(B, V) -> (B, 1)."""
        return ops("ArgMax", logits, axis=-1, keepdims=1)


class Sampling:
    """top_k, temperature and top_p as in transformers; of what they leave, likeliest first, the first token whose cumulative
    probability exceeds the row's uniform number of this step. In float64: the same numbers give the same tokens everywhere."""

    inputs = (*SAMPLING, UNIFORMS)

    def steps(self, ops: Ops, given: Values) -> ir.Value:
        """No more than there are uniform numbers."""
        return ops("Min", given["max_new_tokens"], ops("Shape", given["uniforms"], start=1))

    def tokens(self, ops: Ops, logits: ir.Value, place: ir.Value, given: Values) -> ir.Value:
        """(B, V) -> (B, 1)."""
        size = ops("Shape", logits, start=1)
        counts = ops("Where", ops("Less", given["top_k"], 1), size, ops("Min", given["top_k"], size))
        most = ops("ReduceMax", counts, keepdims=0)
        values, tokens = ops.outputs(2, "TopK", logits, ops("Reshape", most, [1]), axis=-1, largest=1, sorted=1)
        weights = self.weights(ops, values, counts, given)
        uniform = ops.cast(ops("Gather", given["uniforms"], ops("Reshape", place, [1]), axis=1), "float64")
        cumulative = ops("CumSum", weights, 1)
        bound = ops("Mul", uniform, ops("ReduceSum", weights, [1]))
        passed = ops("ReduceSum", ops.cast(ops("LessOrEqual", cumulative, bound), "int64"), [1])
        last = ops("Sub", ops("ReduceSum", ops.cast(ops("Greater", weights, ZERO), "int64"), [1]), 1)
        return ops("GatherElements", tokens, ops("Max", ops("Min", passed, last), 0), axis=1)

    def weights(self, ops: Ops, values: ir.Value, counts: ir.Value, given: Values) -> ir.Value:
        """Sorted logits (B, n), largest first -> what each weighs, in float64; 0 for what a filter takes out."""
        best = ops("Slice", values, [0], [1], [1])
        temperature = ops("Max", given["temperature"], LEAST_TEMPERATURE)
        distance = ops.cast(ops("Sub", values, best), "float64")
        weights = ops("Exp", ops("Div", distance, ops.cast(temperature, "float64")))
        places = ops("Range", 0, ops("Squeeze", ops("Shape", values, start=1)), 1)
        weights = ops("Where", ops("Less", places, counts), weights, ZERO)
        before = ops("CumSum", weights, 1, exclusive=1)
        share = ops("Div", before, ops("ReduceSum", weights, [1]))
        is_kept = ops("Or", ops("Less", share, ops.cast(given["top_p"], "float64")), ops("Equal", places, 0))
        return ops("Where", is_kept, weights, ZERO)


INT64, DOUBLE = ir.DataType.INT64, ir.DataType.DOUBLE
ZERO = np.array(0, np.float64)
LEAST_TEMPERATURE = np.array(1e-6, np.float32)  # below it, as at it, the likeliest token alone is left
