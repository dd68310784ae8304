"""Greedy search and sampling, as nodes of a loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx_ir import Value

from ..graphs.context import Values
from ..graphs.ops import Ops
from ..specs.graph_spec import TensorSpec
from .generation_config import Rules
from .step import LoopInputs

PER_ROW = ("batch_size", 1)
STEPS = TensorSpec("max_new_tokens", "int64", PER_ROW)
SAMPLING = (
    TensorSpec("temperature", "float32", PER_ROW),
    TensorSpec("top_k", "int64", PER_ROW),
    TensorSpec("top_p", "float32", PER_ROW),
    TensorSpec("uniforms", "float32", ("batch_size", "steps")),
)
SEQUENCES = TensorSpec("sequences", "int64", ("batch_size", "sequence_length"))
ZERO = np.array(0, np.float64)
# below it, as at it, only the most likely token is left
MIN_TEMPERATURE = np.array(1e-6, np.float32)
# Logits (B, V), the position of the token and the settings -> tokens (B, 1).
ChooseTokens = Callable[[Ops, Value, Value, Values], Value]


class GraphTokenSearch:
    """A search of one token of each row, which `choose` returns, until its end token. Finished rows
    get the fill token.

    `inputs` are those of the graph beside ids, mask and max_new_tokens, `outputs` its outputs, and
    `dtypes` the types of the states that go from one step to the next.
    """

    outputs: tuple[TensorSpec, ...] = (SEQUENCES,)
    dtypes = ("int64", "bool")

    def __init__(self, rules: Rules, choose: ChooseTokens, inputs: tuple[TensorSpec, ...] = ()):
        self.rules = rules
        self.choose = choose
        self.inputs = inputs

    def beams(self, ops: Ops, settings: Values) -> None:
        """Return `None`: there are no beams."""

    def begin(
        self, inputs: LoopInputs, settings: Values, prompt: Value, limit: Value
    ) -> list[Value]:
        """Return [sequences, ended]: the `prompt` (B, P), and True (B, 1) for rows whose `limit`
        (B, 1) of new tokens is 0."""
        self.limit = limit
        self.settings = settings
        return [prompt, inputs.ops("Less", limit, 1)]

    def advance(
        self, ops: Ops, logits: Value, states: list[Value], position: Value
    ) -> tuple[Value, None, list[Value], Value]:
        """Append one token to each sequence. It follows `position` (a scalar) new tokens.

        Returns the tokens (B, 1), None, the new states, and a scalar that is True to continue.
        Logits are (B, V).
        """
        sequences, ended = states
        options = self.rules.options
        tokens = self.choose(
            ops, self.rules.applied(ops, logits, position, self.limit), position, self.settings
        )
        tokens = ops("Where", ended, options.fill_token_id, tokens)
        ended = ops("Or", ended, ops("GreaterOrEqual", ops("Add", position, 1), self.limit))
        if options.eos_token_ids:
            ended = ops("Or", ended, ops.is_in(tokens, options.eos_token_ids))
        return (
            tokens,
            None,
            [ops("Concat", sequences, tokens, axis=1), ended],
            ops.any(ops("Not", ended), keepdims=0),
        )

    def end(self, ops: Ops, states: list[Value]) -> list[Value]:
        """Return [sequences], the first of the last states."""
        return states[:1]


def greedy_tokens(ops: Ops, logits: Value, position: Value, settings: Values) -> Value:
    """Return the token (B, 1) with the largest of the `logits` (B, V) of each row. Position and
    settings are not used."""
    return ops("ArgMax", logits, axis=-1, keepdims=1)


def sampled_tokens(ops: Ops, logits: Value, position: Value, settings: Values) -> Value:
    """Return one token (B, 1) for each row of `logits` (B, V), sampled with top_k, temperature and
    top_p as in transformers.

    Of the tokens that are left, most likely first, it is the first whose cumulative probability
    exceeds the row's uniform number of this step. `position` is the number of new tokens so far,
    which selects the uniform numbers. `settings` are the inputs of the graph by name; a `top_k`
    below 1 keeps all tokens. It computes in float64: the same numbers give the same tokens
    everywhere.
    """
    size = ops("Shape", logits, start=1)
    counts = ops(
        "Where", ops("Less", settings["top_k"], 1), size, ops("Min", settings["top_k"], size)
    )
    max_count = ops("Reshape", ops("ReduceMax", counts, keepdims=0), [1])
    values, tokens = ops.outputs(2, "TopK", logits, max_count, axis=-1, largest=1, sorted=1)
    weights = sampling_weights(ops, values, counts, settings)
    uniform = ops.cast(
        ops("Gather", settings["uniforms"], ops("Reshape", position, [1]), axis=1), "float64"
    )
    cumulative = ops("CumSum", weights, 1)
    bound = ops("Mul", uniform, ops("ReduceSum", weights, [1]))
    passed = ops("ReduceSum", ops.cast(ops("LessOrEqual", cumulative, bound), "int64"), [1])
    last = ops("Sub", ops("ReduceSum", ops.cast(ops("Greater", weights, ZERO), "int64"), [1]), 1)
    return ops("GatherElements", tokens, ops("Max", ops("Min", passed, last), 0), axis=1)


def sampling_weights(ops: Ops, values: Value, counts: Value, settings: Values) -> Value:
    """Return weights in proportion to probabilities, float64, and 0 for tokens that top_k or top_p
    remove.

    `values` are sorted logits (B, n), largest first, of which each row has `counts` (B, 1).
    `settings` are the inputs of the graph by name.
    """
    best = ops.first(values)
    temperature = ops("Max", settings["temperature"], MIN_TEMPERATURE)
    distance = ops.cast(ops("Sub", values, best), "float64")
    weights = ops("Exp", ops("Div", distance, ops.cast(temperature, "float64")))
    ranks = ops.range(ops("Shape", values, start=1))
    weights = ops("Where", ops("Less", ranks, counts), weights, ZERO)
    before = ops("CumSum", weights, 1, exclusive=1)
    share = ops("Div", before, ops("ReduceSum", weights, [1]))
    is_kept = ops(
        "Or", ops("Less", share, ops.cast(settings["top_p"], "float64")), ops("Equal", ranks, 0)
    )
    return ops("Where", is_kept, weights, ZERO)
