"""What the passes look for in a graph, and how they put something else in its place."""

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values

SELF_ATTENTION = ("GroupQueryAttention", "DecoderMaskedMultiHeadAttention")
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
RMS_NORM = "SimplifiedLayerNormalization"  # in onnxruntime


def array(value: ir.Value) -> np.ndarray:
    return value.const_value.numpy()


def weight(model: ir.Model, name: str, values: np.ndarray) -> ir.Value:
    """`values` as a weight of the graph; what has the name already is the same."""
    if name not in model.graph.initializers:
        tensor = ir.tensor(np.ascontiguousarray(values), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        model.graph.register_initializer(value)
    return model.graph.initializers[name]


def replace(model: ir.Model, old: list[ir.Node], new: list[ir.Node]) -> None:
    """The last of `new` returns what the last of `old` returned."""
    replace_nodes_and_values(model.graph, old[-1], old, new, old[-1].outputs, new[-1].outputs)


def matmuls(model: ir.Model) -> list[ir.Node]:
    """The products x W with a matrix of weights."""
    return [node for node in model.graph if node.op_type == "MatMul" and is_matrix(node.inputs[1])]


def is_matrix(value: ir.Value) -> bool:
    return value.const_value is not None and len(value.shape) == 2 and value.dtype in FLOATS


def is_vector(value: ir.Value) -> bool:
    return value.const_value is not None and len(value.shape) == 1


def bias_of(product: ir.Node) -> ir.Node | None:
    """The node that adds a bias to `product`, if that is all it is used for."""
    users = product.outputs[0].consumers()
    is_bias = len(users) == 1 and users[0].op_type == "Add" and is_vector(users[0].inputs[1])
    return users[0] if is_bias else None


def match_linear(value: ir.Value) -> tuple[ir.Node, ir.Node | None] | None:
    """What made `value`, if it is x W (+ b): the product, and the node that adds the bias."""
    node = value.producer()
    add = None
    if node is not None and node.op_type == "Add" and is_vector(node.inputs[1]):
        node, add = node.inputs[0].producer(), node
    if node is None or node.op_type != "MatMul" or not is_matrix(node.inputs[1]):
        return None
    return node, add
