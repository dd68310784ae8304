"""The graph that generates: its inputs, the loop around a step and a search, and its outputs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ..graphs.context import Values
from ..graphs.ops import IR_VERSION, Ops, data_type, with_spec
from ..inference.inputs import position_limit
from ..specs.graph_spec import GraphSpec
from ..specs.sequences import token_inputs
from .beam_search import GraphBeamSearch
from .generation_config import Rules
from .searches import SAMPLING, STEPS, GraphTokenSearch, greedy_tokens, sampled_tokens
from .step import LoopInputs, Step

Search = GraphTokenSearch | GraphBeamSearch
SEARCHES: dict[str, Callable[[Rules], Search]] = {
    "greedy": lambda rules: GraphTokenSearch(rules, greedy_tokens),
    "sample": lambda rules: GraphTokenSearch(rules, sampled_tokens, SAMPLING),
    "beam": GraphBeamSearch,
}
IDS = ("batch_size", "source_length")


def one_graph(
    step: Step, search: Search, file: str, config: dict[str, Any], opsets: dict[str, int]
) -> tuple[ir.Model, GraphSpec]:
    """Return a loop of `step`, the decoder, and `search`, which returns sequences, and its spec.

    `file` is its name in the export, `config` is config.json, and `opsets` are {domain: version}.
    """
    tokens = [replace(tensor, range=None, default=None) for tensor in token_inputs(config, IDS)[:2]]
    spec = GraphSpec(file, (*tokens, STEPS, *search.inputs), search.outputs)
    ops, options = Ops(), search.rules.options
    settings = {tensor.name: with_spec(Value(), tensor) for tensor in spec.inputs}
    ids, mask = settings["input_ids"], settings["attention_mask"]
    lengths = None
    prompt = ops.filled([ops.size(ids, 0), 1], np.int64(options.decoder_start_token_id or 0))
    if config["model_type"] == "vanilla-decoder":
        ids, mask, lengths = pad_left(ops, ids, mask, options.pad_token_id)
        prompt = ids
    positions = position_limit(config)
    limit = limit_steps(ops, settings, lengths, positions)
    trips = ops("ReduceMax", limit, keepdims=0)
    inputs = LoopInputs(ops, ids, mask, search.beams(ops, settings), lengths, positions)
    last = ops("Slice", prompt, [-1], [np.iinfo(np.int64).max], [1])
    initial = [
        inputs.repeat_rows(last),
        *search.begin(inputs, settings, prompt, limit),
        *step.begin(inputs),
    ]
    # tokens, states of the search, masks, caches
    dtypes = ["int64", *search.dtypes, *["int64"] * step.num_masks]
    dtypes += ["float32"] * (len(initial) - len(dtypes))
    types = [ir.TensorType(data_type(dtype)) for dtype in dtypes]
    body = loop_body(step, search, inputs, types)
    final = ops.outputs(len(initial), "Loop", trips, ops("Greater", trips, 0), *initial, body=body)
    set_types(final, types)
    results = search.end(ops, final[1 : 1 + len(search.dtypes)])
    return build_model(ops, list(settings.values()), results, spec, opsets), spec


def set_types(values: Sequence[Value], types: Sequence[ir.TensorType]) -> None:
    for value, type_ in zip(values, types, strict=True):
        value.type = type_


def pad_left(ops: Ops, ids: Value, mask: Value, pad: int | None) -> tuple[Value, Value, Value]:
    """Return (ids, mask, lengths): `ids` (B, S) with all padding moved to the left, their mask, and
    their lengths (B, 1).

    `pad` is the padding token. A row without tokens keeps its last one.
    """
    size = ops("Shape", ids, start=1)
    columns = ops.range(size)
    is_padding = ops("Less", mask, 1)
    # ranks are distinct
    rank = ops("Sub", ops("Where", is_padding, ops("Mul", size, 2), size), columns)
    _, order = ops.outputs(2, "TopK", rank, size, axis=1)
    lengths = ops("Max", ops("ReduceSum", ops.cast(ops("Not", is_padding), "int64"), [1]), 1)
    is_token = ops("GreaterOrEqual", columns, ops("Sub", size, lengths))
    moved = ops("Where", is_token, ops("GatherElements", ids, order, axis=1), pad or 0)
    return moved, ops.cast(is_token, "int64"), lengths


def limit_steps(ops: Ops, settings: Values, lengths: Value | None, positions: int | None) -> Value:
    """Return the maximum new tokens of each row, (B, 1): max_new_tokens, at least 0 and at most
    `positions` + 1 - `lengths`, and the number of uniform numbers for sampling.

    `settings` are the inputs of the graph by name. `positions` is the size of a learned table, None
    for no limit. The last new token takes no position. `lengths` (B, 1) are those of the prompts,
    None for prompts of 1 token.
    """
    steps = settings["max_new_tokens"]
    if "uniforms" in settings:
        steps = ops("Min", steps, ops("Shape", settings["uniforms"], start=1))
    steps = ops("Max", steps, 0)
    if positions is None:
        return steps
    free_positions = (
        ops.value(positions)
        if lengths is None
        else ops("Max", ops("Sub", positions + 1, lengths), 0)
    )
    return ops("Min", steps, free_positions)


def loop_body(
    step: Step, search: Search, inputs: LoopInputs, types: Sequence[ir.TensorType]
) -> ir.Graph:
    """Return the body of the loop.

    It reads and returns the tokens, the states of the search and those of the step, which have the
    `types`.
    """
    ops = Ops(main=inputs.ops)
    position = Value(type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    before = Value(type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    current = [Value(type=type_) for type_ in types]
    count = 1 + len(search.dtypes)
    logits, states = step.advance(ops, current[0], current[count:], position)
    tokens, parents, search_states, goes_on = search.advance(
        ops, logits, current[1:count], position
    )
    if parents is not None:
        masks, caches = states[: step.num_masks], states[step.num_masks :]
        states = [*masks, *inputs.reorder_rows(ops, caches, parents)]
    results = [tokens, *search_states, *states]
    set_types(results, types)
    goes_on.type, goes_on.shape = before.type, ir.Shape([])
    return ir.Graph([position, before, *current], [goes_on, *results], nodes=ops.nodes, name="step")


def build_model(
    ops: Ops, inputs: list[Value], results: list[Value], spec: GraphSpec, opsets: dict[str, int]
) -> ir.Model:
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
        bodies = [
            attribute.value
            for attribute in node.attributes.values()
            if attribute.type == ir.AttributeType.GRAPH
        ]
        for value in (*node.outputs, *(value for body in bodies for value in body.inputs)):
            if value not in kept:
                value.name = f"{node.op_type}.{next(numbers)}"
    graph.opset_imports.update(opsets)
    model = ir.Model(graph, ir_version=IR_VERSION)
    RemoveUnusedNodesPass()(model)  # logits of a prompt
    return model
