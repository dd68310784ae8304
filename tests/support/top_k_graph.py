"""The graph export/engine/top_k.onnx: `python tests/support/top_k_graph.py` writes it.

It is exact without a sort of the whole vocabulary. Only the groups of adjacent tokens with the
largest maxima are searched: no other group has one of the most likely tokens.
"""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir import Value

from vanilla_transformer_export.graphs.ops import IR_VERSION, Ops, with_spec
from vanilla_transformer_export.specs.graph_spec import TensorSpec

FILE = Path(__file__).parents[2] / "export/engine/top_k.onnx"
OPSET = 21
GROUP = 16  # adjacent tokens
INPUTS = (
    TensorSpec("logits", "float32", ("rows", "vocab_size")),
    TensorSpec("count", "int64", (1,)),
)
OUTPUTS = (
    TensorSpec("log_p", "float32", ("rows", "count")),
    TensorSpec("tokens", "int64", ("rows", "count")),
)


def top_k_graph() -> onnx.ModelProto:
    """Return the graph of the most likely tokens of each row.

    Its inputs are logits (rows, V) and count (1,), its outputs log p and ids of the tokens, both
    (rows, count).
    """
    op = Ops()
    inputs = [with_spec(Value(), tensor) for tensor in INPUTS]
    outputs = [with_spec(*both) for both in zip(top_tokens(op, *inputs), OUTPUTS, strict=True)]
    weights = list(op.initializers.values())
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=op.nodes,
        initializers=weights,
        opset_imports={"": OPSET},
        name="top_k",
    )
    return ir.to_proto(ir.Model(graph, ir_version=IR_VERSION))


def top_tokens(op: Ops, logits: Value, count: Value) -> tuple[Value, Value]:
    """Return log p and ids of the most likely tokens of each row, both (rows, count).

    The best token comes first, and of equal ones the lowest id.

    Args:
        op: appends the nodes.
        logits: (rows, V).
        count: (1,), at most V.
    """
    # first, while the logits are in the cache
    log_p = op("LogSoftmax", logits, axis=1)
    missing = op("Mod", op("Neg", op.size(logits, 1)), GROUP)
    padding = op("Concat", np.zeros(3, np.int64), missing, axis=0)
    padded = op("Pad", logits, padding, np.float32(-np.inf))
    tokens = candidates(op, padded, count)
    values = op("GatherElements", padded, tokens, axis=1)
    _, places = op.outputs(2, "TopK", values, count, axis=1)
    best = op("GatherElements", tokens, places, axis=1)
    return op("GatherElements", log_p, best, axis=1), best


def candidates(op: Ops, padded: Value, count: Value) -> Value:
    """Return the ids (rows, N) of the tokens of the `count` groups with the largest maxima, or of
    all groups, in ascending order.

    `padded` are logits of whole groups. Ascending ids make the last TopK prefer the lowest one.
    """
    maxima = op("ReduceMax", op("Reshape", padded, [0, -1, GROUP]), [2], keepdims=0)
    searched = op("Min", count, op.size(maxima, 1))
    _, groups = op.outputs(2, "TopK", maxima, searched, axis=1, sorted=0)
    ordered, _ = op.outputs(2, "TopK", groups, searched, axis=1, largest=0)
    firsts = op("Unsqueeze", op("Mul", ordered, GROUP), [2])
    return op("Reshape", op("Add", firsts, np.arange(GROUP)), [0, -1])


if __name__ == "__main__":
    onnx.save(top_k_graph(), FILE)
