"""Putting the nodes of whole graphs into another graph."""

import hashlib
from collections.abc import Collection

import onnx_ir as ir

from ..graphs.ops import Ops

LOGICAL = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not")


def type_of(value: ir.Value) -> ir.TypeProtocol | None:
    """Return the type of `value`: its own, or what its operator makes of the types of its inputs."""
    node = value.producer()
    if value.type is not None or node is None or value is not node.outputs[0]:
        return value.type
    if node.op_type in LOGICAL:
        return ir.TensorType(ir.DataType.BOOL)
    if node.op_type in ("Shape", "ArgMax"):
        return ir.TensorType(ir.DataType.INT64)
    if "to" in node.attributes:
        return ir.TensorType(ir.DataType(node.attributes["to"].as_int()))
    if node.op_type == "ConstantOfShape":
        return ir.TensorType(node.attributes["value"].as_tensor().dtype)
    same = next((operand for operand in node.inputs[node.op_type == "Where" :] if operand is not None), None)
    return None if same is None else type_of(same)


def inline(ops: Ops, model: ir.Model, bindings: dict[str, ir.Value]) -> tuple[list[ir.Node], dict[str, ir.Value]]:
    """The nodes of `model`, which is used up, with its inputs replaced by `bindings`; and its outputs by name."""
    graph = model.graph
    outputs = {output.name: output for output in graph.outputs}
    graph.outputs.clear()
    for value in graph.inputs:
        value.replace_all_uses_with(bindings[value.name])
    for value in list(graph.initializers.values()):
        value.replace_all_uses_with(shared(ops, value.const_value))
    nodes = list(graph)
    graph.remove(nodes)
    return nodes, outputs


def shared(ops: Ops, tensor: ir.TensorProtocol) -> ir.Value:
    """Return the one initializer of `ops` that holds the numbers of `tensor`."""
    return ops.initializer((tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest()), tensor)


def split(nodes: list[ir.Node], changing: Collection[ir.Value]) -> tuple[list[ir.Node], list[ir.Node]]:
    """The `nodes` that need none of the values that are `changing`, and the others."""
    changing = set(changing)
    fixed, others = [], []
    for node in nodes:
        if changing.isdisjoint(node.inputs):
            fixed.append(node)
        else:
            others.append(node)
            changing.update(node.outputs)
    return fixed, others
