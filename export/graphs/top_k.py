"""The most likely tokens of each row of logits, exact but without a sort of the whole vocabulary.

Only the groups of adjacent tokens with the largest maxima are searched: no other group has one of
the most likely tokens.
"""

import numpy as np
from onnx_ir import Value

from .ops import Ops

GROUP = 16  # adjacent tokens


def top_tokens(op: Ops, logits: Value, count: Value) -> tuple[Value, Value]:
    """Return log p and ids of the most likely tokens of each row, both (rows, count).

    The best token comes first, and of equal ones the lowest id.

    Args:
        op: appends the nodes.
        logits: (rows, V).
        count: (1,), at most V.
    """
    tokens = grouped_candidates(op, logits, count)
    size = op.size(logits, 1)
    values = op("GatherElements", logits, op("Min", tokens, op("Sub", size, 1)), axis=1)
    # the last group may end behind the vocabulary
    values = op("Where", op("Less", tokens, size), values, np.float32(-np.inf))
    _, places = op.outputs(2, "TopK", values, count, axis=1)
    best = op("GatherElements", tokens, places, axis=1)
    log_p = op("GatherElements", op("LogSoftmax", logits, axis=1), best, axis=1)
    return log_p, best


def grouped_candidates(op: Ops, logits: Value, count: Value) -> Value:
    """Return the ids (rows, N) of the tokens of the `count` groups with the largest maxima, or of
    all groups, in ascending order."""
    pooled = op(
        "MaxPool",
        op("Unsqueeze", logits, [1]),
        kernel_shape=[GROUP],
        strides=[GROUP],
        ceil_mode=1,
    )
    maxima = op("Squeeze", pooled, [1])
    searched = op("Min", count, op.size(maxima, 1))
    _, groups = op.outputs(2, "TopK", maxima, searched, axis=1, sorted=0)
    ordered, _ = op.outputs(2, "TopK", groups, searched, axis=1, largest=0)
    firsts = op("Unsqueeze", op("Mul", ordered, GROUP), [2])
    return op("Reshape", op("Add", firsts, np.arange(GROUP)), [0, -1])
