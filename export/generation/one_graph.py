"""The one graph: what is read, the loop around a step and a search, and what is returned."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ..graphs.build import IR_VERSION, with_spec
from ..graphs.ops import Ops
from ..runtime.inputs import position_limit
from ..targets.sequences import token_inputs
from ..targets.spec import GraphSpec
from .beams import Beams
from .ops import type_of
from .rules import Rules
from .searches import STEPS, Greedy, Sampling, Search, TokenSearch
from .step import Inputs, Step

SEARCHES: dict[str, Callable[[Rules], Search]] = {
    "greedy": lambda rules: TokenSearch(rules, Greedy()),
    "sample": lambda rules: TokenSearch(rules, Sampling()),
    "beam": Beams,
}
IDS = ("batch_size", "source_length")


def one_graph_spec(file: str, search: Search, config: dict[str, Any]) -> GraphSpec:
    ids, mask = (replace(tensor, range=None, default=None) for tensor in token_inputs(config, IDS)[:2])
    return GraphSpec(file, (ids, mask, STEPS, *search.inputs), search.outputs)


def one_graph(
    step: Step, search: Search, spec: GraphSpec, rules: Rules, config: dict[str, Any], opsets: dict[str, int]
) -> ir.Model:
    """A model with the inputs and outputs of `spec`: the sequences that `search` finds with the logits of `step`."""
    ops = Ops()
    given = {tensor.name: with_spec(ir.Value(), tensor) for tensor in spec.inputs}
    ids, mask = given["input_ids"], given["attention_mask"]
    lengths = None
    prompt = ops.filled([ops.size(ids, 0), 1], np.int64(rules.options.decoder_start_token_id or 0))
    if config["model_type"] == "vanilla-decoder":
        ids, mask, lengths = padded_on_the_left(ops, ids, mask, rules.options.pad_token_id)
        prompt = ids
    positions = position_limit(config)
    limit = at_most_positions(ops, search.steps(ops, given), lengths, positions)
    trips = ops("ReduceMax", limit, keepdims=0)
    inputs = Inputs(ops, ids, mask, search.beams(ops, given), lengths, positions)
    last = ops("Slice", prompt, [-1], [np.iinfo(np.int64).max], [1])
    initial = [inputs.repeated(last), *search.begin(inputs, given, prompt, limit)]
    count = len(initial)
    initial += step.begin(inputs)
    body = loop_body(step, search, Ops(main=ops), initial, count)
    final = ops.outputs(len(initial), "Loop", trips, ops("Greater", trips, 0), *initial, body=body)
    for value, first in zip(final, initial):
        value.type = type_of(first)
    results = search.end(ops, final[1:count])
    return model_of(ops, list(given.values()), results, spec, opsets)


def padded_on_the_left(ops: Ops, ids: ir.Value, mask: ir.Value, pad: int | None) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The tokens of each row of `ids` (B, S) in order, with all padding before them; their mask, and how many there are (B, 1).
    A row without tokens has its last one."""
    size = ops("Shape", ids, start=1)
    places = ops("Range", 0, ops("Squeeze", size), 1)
    is_padding = ops("Less", mask, 1)
    rank = ops("Sub", ops("Where", is_padding, ops("Mul", size, 2), size), places)  # all are different
    _, order = ops.outputs(2, "TopK", rank, size, axis=1)
    lengths = ops("Max", ops("ReduceSum", ops.cast(ops("Not", is_padding), "int64"), [1]), 1)
    is_token = ops("GreaterOrEqual", places, ops("Sub", size, lengths))
    moved = ops("Where", is_token, ops("GatherElements", ids, order, axis=1), pad or 0)
    return moved, ops.cast(is_token, "int64"), lengths


def at_most_positions(ops: Ops, steps: ir.Value, lengths: ir.Value | None, positions: int | None) -> ir.Value:
    """`steps` (B, 1) as far as there are `positions` after prompts of these `lengths` (B, 1), 1 if `None`; 0 for less."""
    steps = ops("Max", steps, 0)
    if positions is None:
        return steps
    room = ops.value(positions) if lengths is None else ops("Max", ops("Sub", positions + 1, lengths), 0)
    return ops("Min", steps, room)


def loop_body(step: Step, search: Search, ops: Ops, initial: list[ir.Value], count: int) -> ir.Graph:
    """Takes the tokens, then the states of the search, `count` together, then those of the step, as the `initial` ones."""
    place = ir.Value(type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    before = ir.Value(type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    taken = [ir.Value(type=type_of(value)) for value in initial]
    logits, states = step.advance(ops, taken[0], taken[count:], place)
    tokens, parents, found, goes_on = search.advance(ops, logits, taken[1:count], place)
    if parents is not None:
        states = step.reorder(ops, states, parents, place)
    returned = [tokens, *found, *states]
    for value, first in zip(returned, initial, strict=True):
        value.type = type_of(first)
    goes_on.type, goes_on.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([])
    return ir.Graph([place, before, *taken], [goes_on, *returned], nodes=ops.nodes, name="step")


def model_of(ops: Ops, inputs: list[ir.Value], results: list[ir.Value], spec: GraphSpec, opsets: dict[str, int]) -> ir.Model:
    for value, tensor in zip(results, spec.outputs, strict=True):
        with_spec(value, tensor)
    kept = {*inputs, *results}
    graph = ir.Graph(inputs, results, nodes=ops.nodes, name="generate")
    numbers = itertools.count()
    for value in ops.initializers.values():
        value.name = f"weight.{next(numbers)}"
        graph.register_initializer(value)
    for node in ir.traversal.RecursiveGraphIterator(graph):
        node.name = f"{node.op_type}.{next(numbers)}"
        bodies = [each.value for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH]
        for value in (*node.outputs, *(value for body in bodies for value in body.inputs)):
            if value not in kept:
                value.name = f"{node.op_type}.{next(numbers)}"
    graph.opset_imports.update(opsets)
    model = ir.Model(graph, ir_version=IR_VERSION)
    RemoveUnusedNodesPass()(model)  # logits of a prompt
    return model
