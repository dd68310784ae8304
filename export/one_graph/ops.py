"""Putting the nodes of whole graphs into another graph."""

import hashlib
from collections.abc import Collection

import onnx_ir as ir
from onnx_ir import Value

from ..graphs.ops import Ops
from .step import LoopInputs


def append(ops: Ops, model: ir.Model, bindings: dict[str, Value]) -> dict[str, Value]:
    """Append the nodes of `model` to the graph of `ops`, and return its outputs by name.

    `bindings` are the values that become its inputs, by name. `model` is empty afterwards.
    """
    nodes, outputs = inline(ops, model, bindings)
    ops.nodes += nodes
    return outputs


def append_step(
    inputs: LoopInputs,
    ops: Ops,
    model: ir.Model,
    bindings: dict[str, Value],
    changing: Collection[Value],
) -> dict[str, Value]:
    """Append the nodes of the decoder `model` to the body of the loop, `ops`. Return its outputs by
    name.

    Nodes that depend on no value of `changing` go before the loop, to `inputs.ops`. Keys and values
    of a source that are computed there are repeated for all its beams. `bindings` are the values
    that become the inputs of `model`, by name.
    """
    nodes, outputs = inline(ops, model, bindings)
    fixed, nodes = split(nodes, changing)
    ops.nodes += nodes
    source = {value for name, value in outputs.items() if ".encoder." in name}
    for node in fixed:
        inputs.ops.nodes.append(node)
        for value in source.intersection(node.outputs):
            users = list(value.uses())  # before `repeat_rows` is one of them
            repeat_rows = inputs.repeat_rows(value)
            for user, index in users:
                user.replace_input_with(index, repeat_rows)
    return outputs


def inline(
    ops: Ops, model: ir.Model, bindings: dict[str, Value]
) -> tuple[list[ir.Node], dict[str, Value]]:
    """Return the nodes of `model`, and its outputs by name. `model` is empty afterwards.

    `bindings` are the values that become its inputs, by name. Its initializers are shared with
    `ops`.
    """
    graph = model.graph
    outputs = {output.name: output for output in graph.outputs}
    graph.outputs.clear()
    for value in graph.inputs:
        value.replace_all_uses_with(bindings[value.name])
    for value in list(graph.initializers.values()):
        value.replace_all_uses_with(shared_initializer(ops, value.const_value))
    nodes = list(graph)
    graph.remove(nodes)
    return nodes, outputs


def shared_initializer(ops: Ops, tensor: ir.TensorProtocol) -> Value:
    """Return the one initializer of `ops` that holds the numbers of `tensor`."""
    return ops.initializer(
        (tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest()), tensor
    )


def split(nodes: list[ir.Node], changing: Collection[Value]) -> tuple[list[ir.Node], list[ir.Node]]:
    """Return (fixed, others): the `nodes` that do not depend on the values `changing`, and those
    that do.

    A node may depend on them through other nodes. Both lists keep the order.
    """
    changing = set(changing)
    fixed, others = [], []
    for node in nodes:
        if changing.isdisjoint(node.inputs):
            fixed.append(node)
        else:
            others.append(node)
            changing.update(node.outputs)
    return fixed, others
