"""The graph export/engine/top_k.onnx: `python tests/support/top_k_graph.py` writes it."""

from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir import Value

from vanilla_transformer_export.graphs.beams import top_tokens
from vanilla_transformer_export.graphs.ops import IR_VERSION, Ops, with_spec
from vanilla_transformer_export.specs.graph_spec import TensorSpec

FILE = Path(__file__).parents[2] / "export/engine/top_k.onnx"
OPSET = 21
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


if __name__ == "__main__":
    onnx.save(top_k_graph(), FILE)
