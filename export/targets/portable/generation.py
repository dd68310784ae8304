"""The portable graphs inside of the one graph that generates, see `generation`."""

import numpy as np
import onnx_ir as ir

from ...generation.ops import inline, split
from ...generation.step import Inputs, empty_cache, own_caches, present_caches
from ...graphs.ops import Ops


class PortableSeq2SeqStep:
    """The `Step` of an encoder-decoder: caches that grow, and keys and values of the source that are computed once."""

    def __init__(self, graphs: dict[str, ir.Model]):
        self.graphs = graphs
        self.own = own_caches(graphs["decoder"])

    def begin(self, inputs: Inputs) -> list[ir.Value]:
        """As `Step`."""
        self.inputs = inputs
        ops = inputs.ops
        nodes, outputs = inline(ops, self.graphs["encoder"], {"input_ids": inputs.ids, "attention_mask": inputs.mask})
        ops.nodes += nodes
        self.source = outputs["last_hidden_state"]
        self.mask = inputs.repeated(inputs.mask)
        return [self.empty(value, inputs.rows) for value in self.own]

    def empty(self, cache: ir.Value, rows: ir.Value) -> ir.Value:
        return empty_cache(self.inputs.ops, cache, rows)

    def advance(self, ops: Ops, tokens: ir.Value, states: list[ir.Value], place: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
        """As `Step`."""
        graph = self.graphs["decoder"]
        bindings = {"input_ids": tokens, "encoder_hidden_states": self.source, "encoder_attention_mask": self.mask}
        bindings |= {value.name: state for value, state in zip(self.own, states)}
        for value in graph.graph.inputs:  # nothing is known of the source yet, so that all of it is projected, before the loop
            if value.name not in bindings:
                bindings[value.name] = self.empty(value, self.inputs.batch)
        nodes, outputs = inline(ops, graph, bindings)
        fixed, nodes = split(nodes, {tokens, *states})
        self.add_once(fixed, {value for name, value in outputs.items() if ".encoder." in name})
        ops.nodes += nodes
        return ops("Gather", outputs["logits"], -1, axis=1), present_caches(outputs, self.own)

    def add_once(self, nodes: list[ir.Node], cross: set[ir.Value]) -> None:
        """Adds `nodes` before the loop. They make the keys and values of the source, `cross`, which all beams read."""
        main = self.inputs.ops
        for node in nodes:
            main.nodes.append(node)
            for value in cross.intersection(node.outputs):
                users = list(value.uses())
                repeated = self.inputs.repeated(value)
                for user, index in users:
                    user.replace_input_with(index, repeated)

    def reorder(self, ops: Ops, states: list[ir.Value], parents: ir.Value, place: ir.Value) -> list[ir.Value]:
        """As `Step`."""
        return self.inputs.reordered(ops, states, parents)


class PortableDecoderStep:
    """The `Step` of a decoder: caches that grow, and a mask that grows with them."""

    def __init__(self, graphs: dict[str, ir.Model]):
        self.graph = graphs["decoder"]
        self.own = own_caches(self.graph)

    def begin(self, inputs: Inputs) -> list[ir.Value]:
        """As `Step`. A place of padding comes first, so that no prompt is empty without its last token: a size of 0 has another
        meaning to `Reshape`."""
        self.inputs = inputs
        ops = inputs.ops
        none = ops.filled([inputs.batch, 1], np.int64(0))
        ids, mask = (ops("Concat", none, ops("Slice", value, [0], [-1], [1]), axis=1) for value in (inputs.ids, inputs.mask))
        positions = inputs.known(ops, ops("Max", ops("Sub", ops("CumSum", mask, 1), 1), 0))
        bindings = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        bindings |= {value.name: empty_cache(ops, value, inputs.batch) for value in self.own}
        nodes, outputs = inline(ops, self.graph.clone(), bindings)
        ops.nodes += nodes
        self.last = inputs.repeated(ops("Sub", inputs.lengths, 1))
        self.one = ops.filled([inputs.rows, 1], np.int64(1))
        return [inputs.repeated(value) for value in (mask, *present_caches(outputs, self.own))]

    def advance(self, ops: Ops, tokens: ir.Value, states: list[ir.Value], place: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
        """As `Step`."""
        before, *caches = states
        mask = ops("Concat", before, self.one, axis=1)
        positions = self.inputs.known(ops, ops("Add", self.last, place))
        bindings = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        bindings |= {value.name: cache for value, cache in zip(self.own, caches)}
        nodes, outputs = inline(ops, self.graph, bindings)
        fixed, nodes = split(nodes, {tokens, mask, positions, *caches})
        self.inputs.ops.nodes += fixed
        ops.nodes += nodes
        return ops("Gather", outputs["logits"], -1, axis=1), [mask, *present_caches(outputs, self.own)]

    def reorder(self, ops: Ops, states: list[ir.Value], parents: ir.Value, place: ir.Value) -> list[ir.Value]:
        """As `Step`; beams of one input have the same mask."""
        mask, *caches = states
        return [mask, *self.inputs.reordered(ops, caches, parents)]
