"""Beam search as nodes: the candidates of a step, which of them go on, which have finished, and
whether a better one may follow.

B inputs have K beams and C candidates, sorted by score. A score is the sum of log p.
"""

from typing import NamedTuple

import numpy as np
from onnx_ir import Value

from ..inference.options import EXCLUDED_SCORE
from .ops import Ops

GROUP = 16  # adjacent values whose maximum is found first
LOWEST = np.array(-np.inf, np.float32)
HIGHEST = np.array(np.inf, np.float32)


class BeamRules(NamedTuple):
    """The options of a search, for all inputs, (1,), or for each, (B, 1).

    Args:
        beams: the number K, (1,).
        limit: the maximum number of new tokens.
        penalty: the exponent of the length that divides a score.
        stops: True to end at K finished hypotheses.
        never: True to end only when no better hypothesis is possible.
        exists: False for beams (B, K) that an input does not have; `None` if all have K.
    """

    beams: Value
    limit: Value
    penalty: Value
    stops: Value
    never: Value
    exists: Value | None = None


def top_k(op: Ops, values: Value, count: Value, factor: int = 1) -> tuple[Value, Value]:
    """Return the `count` (1,) largest of each row of `values` (R, N) and their indices, both (R,
    count).

    The largest comes first, and of equal ones the lowest index. Only the groups of adjacent values
    with the largest maxima are sorted: no other group has one of the largest values. `factor` is a
    known factor of N, which saves a copy if it is a multiple of `GROUP`.
    """
    is_padded = factor % GROUP != 0
    groups = op("Reshape", fill_groups(op, values) if is_padded else values, [0, -1, GROUP])
    best = best_groups(op, groups, count)
    candidates = op("GatherND", groups, op("Unsqueeze", best, [2]), batch_dims=1)
    largest, places = op.outputs(2, "TopK", op("Reshape", candidates, [0, -1]), count, axis=1)
    first = op("Mul", op("GatherElements", best, op("Div", places, GROUP), axis=1), GROUP)
    indices = op("Add", first, op("Mod", places, GROUP))
    # beside NaN, padding may count as large
    return largest, op("Min", indices, op("Sub", op.size(values, 1), 1)) if is_padded else indices


def fill_groups(op: Ops, values: Value) -> Value:
    """Return `values` (R, N) with -infinity at the end of each row, so that all groups are full."""
    missing = op("Mod", op("Neg", op.size(values, 1)), GROUP)
    return op("Pad", values, op.shape(0, missing), LOWEST, [1])


def best_groups(op: Ops, groups: Value, count: Value) -> Value:
    """Return the numbers (R, n) of the `count` of `groups` (R, W, `GROUP`) with the largest maxima,
    or of all, in ascending order. So a TopK of their values prefers the lowest index."""
    maxima = op("ReduceMax", groups, [2], keepdims=0)
    count = op("Min", count, op.size(maxima, 1))
    _, best = op.outputs(2, "TopK", maxima, count, axis=1, sorted=0)
    ordered, _ = op.outputs(2, "TopK", best, count, axis=1, largest=0)
    return ordered


def top_tokens(op: Ops, logits: Value, count: Value, factor: int = 1) -> tuple[Value, Value]:
    """Return log p and ids of the `count` (1,) most likely tokens of `logits` (R, V), both (R,
    count). The best token comes first, and of equal ones the lowest id. `factor` is as in `top_k`.
    """
    # first, while the logits are in the cache
    log_p = op("LogSoftmax", logits, axis=1)
    _, tokens = top_k(op, logits, count, factor)
    return op("GatherElements", log_p, tokens, axis=1), tokens


def running_beams(op: Ops, rules: BeamRules, scores: Value, ends: Value) -> list[Value]:
    """Return scores and numbers, both (B, K), of the best candidates that go on.

    `scores` and `ends` (B, C) are those of all candidates.
    """
    scores = op("Where", ends, op("Add", scores, EXCLUDED_SCORE), scores)
    return op.outputs(2, "TopK", scores, rules.beams, axis=-1)


def finished_beams(
    op: Ops,
    rules: BeamRules,
    finished: tuple[Value, Value],
    scores: Value,
    ends: Value,
    length: Value,
) -> list[Value]:
    """Return scores and lengths of the best K finished hypotheses, and their numbers, all (B, K).

    The numbers count the earlier ones, then the candidates.

    Args:
        op: adds the nodes to the graph.
        rules: the options of the search.
        finished: scores and lengths (B, K) of earlier ones, with a length of 0 for none.
        scores: those of the candidates (B, C).
        ends: True (B, C) for candidates that finish now.
        length: the number of their tokens.
    """
    divided = op("Div", scores, divisor(op, rules, length))
    both = op("Concat", finished[0], op("Where", ends, divided, LOWEST), axis=1)
    best, numbers = op.outputs(2, "TopK", both, rules.beams, axis=-1)
    lengths = op("Concat", finished[1], op("Mul", op.cast(ends, "int64"), length), axis=1)
    lengths = op("GatherElements", lengths, numbers, axis=1)
    if rules.exists is None:
        return [best, lengths, numbers]
    exists = rules.exists
    return [op("Where", exists, best, LOWEST), op("Where", exists, lengths, 0), numbers]


def divisor(op: Ops, rules: BeamRules, length: Value) -> Value:
    """Return length^penalty, by which scores are divided."""
    return op("Pow", op.cast(length, "float32"), rules.penalty)


def improvable(
    op: Ops, rules: BeamRules, scores: Value, finished: tuple[Value, Value], length: Value
) -> Value:
    """Return flags (B, 1) that are True for inputs whose search goes on.

    Such inputs have fewer than K finished hypotheses, or their best running one may still beat the
    worst finished one and nothing stops them earlier. The flag may be True for an input whose
    search has ended, so the caller keeps those ended. The arguments are as in `finished_beams`,
    after the step, and `scores` (B, K) those of running hypotheses.
    """
    is_far = op("And", rules.never, op("Greater", rules.penalty, np.float32(0)))
    longest = op("Where", is_far, rules.limit, length)
    possible = op("Div", op.first(scores), divisor(op, rules, longest))
    of_finished, lengths = finished
    is_empty = op("Less", lengths, 1)
    if rules.exists is not None:
        is_empty = op("And", is_empty, rules.exists)
        of_finished = op("Where", rules.exists, of_finished, HIGHEST)
    is_better = op("Greater", possible, op("ReduceMin", of_finished, [1], keepdims=1))
    goes_on = op("And", is_better, op("Not", rules.stops))
    return op("Or", op.any(is_empty, [1]), goes_on)
