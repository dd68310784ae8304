"""The portable graphs inside of the one graph that generates, see `generation`."""

import numpy as np
import onnx_ir as ir

from ...generation.ops import Ops, inline, split
from ...generation.step import Inputs, own_caches


class PortableStep:
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
        _, heads, _, width = cache.shape
        return self.inputs.ops.filled([rows, heads, 0, width], np.float32(0))

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
        present = [outputs[value.name.replace("past_key_values", "present")] for value in self.own]
        return ops("Gather", outputs["logits"], -1, axis=1), present

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
        inputs = self.inputs
        first = inputs.ops("Mul", inputs.ops("Range", 0, inputs.ops("Squeeze", inputs.batch), 1), inputs.beams)
        rows = ops("Reshape", ops("Add", parents, inputs.ops("Unsqueeze", first, [1])), [-1])
        return [ops("Gather", state, rows, axis=0) for state in states]
