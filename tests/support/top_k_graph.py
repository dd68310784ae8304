"""The graph export/engine/top_k.onnx: `python tests/support/top_k_graph.py` writes it."""

from pathlib import Path

import onnx
from onnx import TensorProto, helper

FILE = Path(__file__).parents[2] / "export/engine/top_k.onnx"
OPSET, IR_VERSION = 21, 10


def top_k_graph() -> onnx.ModelProto:
    """Return the graph of the largest logits of each row.

    Its inputs are logits (rows, V) and count (1,), its outputs log p and ids of the tokens, both
    (rows, count).
    """
    nodes = [
        helper.make_node("TopK", ["logits", "count"], ["values", "tokens"]),
        helper.make_node("LogSoftmax", ["logits"], ["all"]),
        helper.make_node("GatherElements", ["all", "tokens"], ["log_p"], axis=1),
    ]
    inputs = [value("logits", TensorProto.FLOAT, 2), value("count", TensorProto.INT64, 1)]
    outputs = [value("log_p", TensorProto.FLOAT, 2), value("tokens", TensorProto.INT64, 2)]
    graph = helper.make_graph(nodes, "top_k", inputs, outputs)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )


def value(name: str, kind: int, rank: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, [None] * rank)


if __name__ == "__main__":
    onnx.save(top_k_graph(), FILE)
