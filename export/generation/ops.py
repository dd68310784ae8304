"""Writing ONNX nodes one after the other, and putting the nodes of a whole graph among them."""

import hashlib
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

Operand: TypeAlias = "ir.Value | np.ndarray | bool | int | float | list[int] | None"
LOGICAL = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not")
TYPES = {bool: np.bool_, int: np.int64, float: np.float32}


class Ops:
    """Nodes of a graph, or of the body of its loop, in order. `ops("Add", x, 1)` adds one and returns its output. Numbers and
    arrays are weights of the graph, each once: whole numbers in int64, others in float32."""

    def __init__(self, main: "Ops | None" = None):
        """`main` is what the body's loop stands in; `None` for the graph itself."""
        self.main = main or self
        self.nodes: list[ir.Node] = []
        self.weights: dict[tuple, ir.Value] = {} if main is None else main.weights

    def __call__(self, op_type: str, *operands: Operand, **attributes: Any) -> ir.Value:
        return self.all(op_type, operands, 1, **attributes)[0]

    def all(self, op_type: str, operands: Iterable[Operand], count: int, **attributes: Any) -> list[ir.Value]:
        """Of a node with `count` outputs, all of them."""
        inputs = [self.value(operand) for operand in operands]
        node = ir.node(op_type, inputs, attributes, num_outputs=count)
        self.nodes.append(node)
        node.outputs[0].type = type_of(op_type, inputs, attributes)
        return list(node.outputs)

    def value(self, operand: Operand) -> ir.Value | None:
        if operand is None or isinstance(operand, ir.Value):
            return operand
        if not isinstance(operand, np.ndarray):
            first = operand[0] if isinstance(operand, list) else operand
            operand = np.array(operand, TYPES[type(first)])
        return self.weight(ir.tensor(operand))

    def weight(self, tensor: ir.TensorProtocol) -> ir.Value:
        """The one value that holds the numbers of `tensor`."""
        key = (tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest())
        if key not in self.weights:
            shape = ir.Shape(tensor.shape)
            self.weights[key] = ir.Value(type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
        return self.weights[key]

    # What is written often.

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """(1,), of one axis, not the last."""
        return self("Shape", value, start=axis, end=axis + 1)

    def filled(self, shape: list[Operand], number: Any) -> ir.Value:
        """Of sizes (1,), all of them the numpy scalar `number`."""
        sizes = self("Concat", *([size] if isinstance(size, int) else size for size in shape), axis=0)
        return self("ConstantOfShape", sizes, value=ir.tensor(np.array([number])))

    def cast(self, value: Operand, dtype: ir.DataType) -> ir.Value:
        return self("Cast", value, to=dtype)

    def one_of(self, tokens: ir.Value, ids: Collection[int]) -> ir.Value:
        """Where a token is one of `ids`."""
        found = self("Equal", tokens, next(iter(ids), -1))
        for each in list(ids)[1:]:
            found = self("Or", found, self("Equal", tokens, each))
        return found

    def any(self, flags: ir.Value, axes: list[int] | None = None) -> ir.Value:
        """Whether any is true: of all a scalar, of `axes` with these as 1."""
        numbers = self.cast(flags, ir.DataType.INT32)
        largest = self("ReduceMax", numbers, keepdims=0) if axes is None else self("ReduceMax", numbers, axes)
        return self.cast(largest, ir.DataType.BOOL)


def type_of(op_type: str, inputs: list[ir.Value | None], attributes: dict[str, Any]) -> ir.TypeProtocol | None:
    """Of the first output, for the operators that are written here."""
    if op_type in LOGICAL:
        return ir.TensorType(ir.DataType.BOOL)
    if op_type in ("Shape", "ArgMax"):
        return ir.TensorType(ir.DataType.INT64)
    if "to" in attributes:
        return ir.TensorType(attributes["to"])
    if op_type == "ConstantOfShape":
        return ir.TensorType(attributes["value"].dtype)
    same = next((value for value in inputs[op_type == "Where" :] if value is not None), None)
    return None if same is None else same.type


def inline(ops: Ops, model: ir.Model, bindings: dict[str, ir.Value]) -> tuple[list[ir.Node], dict[str, ir.Value]]:
    """The nodes of `model`, which is used up, with its inputs replaced by `bindings`; and its outputs by name."""
    graph = model.graph
    outputs = {output.name: output for output in graph.outputs}
    graph.outputs.clear()
    for value in graph.inputs:
        value.replace_all_uses_with(bindings[value.name])
    for value in list(graph.initializers.values()):
        value.replace_all_uses_with(ops.weight(value.const_value))
    nodes = list(graph)
    graph.remove(nodes)
    return nodes, outputs


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
