"""ONNX nodes and constants, written one after the other."""

import functools
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy
import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from ..specs.graph_spec import TensorSpec

Operand: TypeAlias = "Value | np.ndarray | np.generic | bool | int | float | list[int] | None"
FLOAT32 = np.dtype(np.float32)
IR_VERSION = 10
CONTRIB = "com.microsoft"  # domain of onnxruntime's own operators


class Ops:
    """The nodes of a graph, in order. `op("Add", x, 1)` appends a node and returns its output.

    Numbers, lists and arrays become initializers, equal ones once. Integers are int64, other
    numbers have `dtype`, arrays keep their own type. The body of a loop or branch shares the
    initializers of the graph `main`.
    """

    def __init__(self, dtype: np.dtype = FLOAT32, main: "Ops | None" = None):
        self.dtype = dtype
        self.nodes: list[ir.Node] = []
        self.initializers: dict[Any, Value] = {} if main is None else main.initializers
        self.results: dict[Any, Any] = {}

    def __call__(self, op_type: str, *operands: Operand, **attributes: Any) -> Value:
        return self.outputs(1, op_type, *operands, **attributes)[0]

    def outputs(
        self, count: int, op_type: str, *operands: Operand, domain: str = "", **attributes: Any
    ) -> list[Value]:
        """Append a node with the operator `op_type` and `count` outputs, and return these.

        `domain` is the operator's, "" for standard ones. None stands for a missing operand.
        `operands` are its inputs, and `attributes` its attributes by name.
        """
        inputs = [self.value(operand) for operand in operands]
        while inputs and inputs[-1] is None:
            inputs.pop()
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=count)
        self.nodes.append(node)
        return list(node.outputs)

    def once(self, key: Any, write: Callable[[], Any]) -> Any:
        """Return `write()`. Later calls with the same `key` return the result of the first."""
        if key not in self.results:
            self.results[key] = write()
        return self.results[key]

    def value(self, operand: Operand) -> Value | None:
        """Return `operand` as a value of the graph. Numbers, arrays and lists (not empty) become
        initializers; values and None are returned as they are."""
        if operand is None or isinstance(operand, Value):
            return operand
        if not isinstance(operand, np.ndarray | np.generic):
            first = operand[0] if isinstance(operand, list) else operand
            operand = np.array(
                operand,
                {bool: np.dtype(bool), int: np.dtype(np.int64), float: self.dtype}[type(first)],
            )
        array = np.asarray(operand)
        return self.initializer((array.dtype, array.shape, array.tobytes()), ir.Tensor(array))

    def initializer(self, key: Any, tensor: ir.TensorProtocol) -> Value:
        """Return the initializer for `key`. It holds the `tensor` of the first call with this
        key."""
        if key not in self.initializers:
            name = tensor.name or f"constant.{len(self.initializers)}"
            self.initializers[key] = Value(name=name, const_value=tensor)
        return self.initializers[key]

    # Combinations of operators that many functions need.

    def size(self, value: Value, axis: int) -> Value:
        """Return the size of the axis number `axis` of a value, as a value of shape (1,).

        The axis is counted from the front, or from the end if it is negative; -1 is not possible.
        """
        return self.once(
            ("size", value, axis), lambda: self("Shape", value, start=axis, end=axis + 1)
        )

    def range(self, count: Value) -> Value:
        """Return the numbers 0 to `count` - 1, int64 (count,). `count` has the shape (1,)."""
        return self.once(("range", count), lambda: self("Range", 0, self("Squeeze", count), 1))

    def first(self, value: Value) -> Value:
        """Return the first entry along the second axis of `value` (B, N, ...), as (B, 1, ...)."""
        return self("Slice", value, [0], [1], [1])

    def shape(self, *sizes: Value | int) -> Value:
        """Return all `sizes` in one int64 value (N,), for operators that take a shape.

        They are integers, or values of shape (n,).
        """
        return self(
            "Concat", *([size] if isinstance(size, int) else size for size in sizes), axis=0
        )

    def cast(self, value: Operand, dtype: str) -> Value:
        """Return `value` in `dtype`, a name of numpy's."""
        return self("Cast", value, to=data_type(dtype))

    def filled(self, shape: list[Value | int], number: np.generic) -> Value:
        """Return a tensor of the sizes `shape` with `number`, and its type, everywhere."""
        return self("ConstantOfShape", self.shape(*shape), value=ir.tensor(np.array([number])))

    def is_in(self, tokens: Value, ids: Collection[int]) -> Value:
        """Return True at each of `tokens` that is one of `ids`, bool in the shape of `tokens`."""
        flags = [self("Equal", tokens, token) for token in ids or [-1]]
        return functools.reduce(lambda one, other: self("Or", one, other), flags)

    def any(self, flags: Value, axes: list[int] | None = None, keepdims: int = 1) -> Value:
        """Return True where any of `flags` is true along `axes`, by default along all.

        `keepdims` 1 keeps these axes with size 1, 0 removes them.
        """
        return self.cast(
            self("ReduceMax", self.cast(flags, "int32"), axes, keepdims=keepdims), "bool"
        )


def data_type(name: str) -> ir.DataType:
    """Return the ONNX type with the numpy name `name`."""
    return ir.DataType.from_numpy(np.dtype(name))


def branch(name: str, ops: Ops, output: Value) -> ir.Graph:
    """Return the branch `name` of an `If` with the nodes of `ops` and one `output`.

    The output has the type that the graph computes in.
    """
    name_values(name, ops)
    output.name, output.type = name, ir.TensorType(data_type(ops.dtype.name))
    return ir.Graph([], [output], nodes=ops.nodes, name=name)


def name_values(name: str, ops: Ops) -> None:
    """Give the outputs of the nodes of `ops`, part of the inner graph `name`, names that no other
    value of the graph has."""
    for number, node in enumerate(ops.nodes):
        for value in node.outputs:
            value.name = f"{name}.{number}.{value.index()}"


def with_spec(value: Value, tensor: TensorSpec) -> Value:
    """Set the name, type and shape of `value` to those of `tensor`, and return it."""
    value.name, value.type, value.shape = (
        tensor.name,
        ir.TensorType(data_type(tensor.dtype)),
        ir.Shape(tensor.shape),
    )
    return value
