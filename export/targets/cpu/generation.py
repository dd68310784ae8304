"""The cpu target's graphs inside of the one graph that generates, see `generation`."""

import onnx_ir as ir

from ...generation.ops import inline, split
from ...generation.step import Inputs, empty_cache, own_caches, present_caches
from ...graphs.ops import Ops

INT32 = ir.DataType.INT32


class CpuSeq2SeqStep:
    """The `Step` of an encoder-decoder: caches that grow. A loop gives no operator its own input to write to, so that room for
    later tokens would be copied at each step; `MultiHeadAttention` copies what there is."""

    def __init__(self, graphs: dict[str, ir.Model]):
        self.graphs = graphs
        self.own = own_caches(graphs["decoder"])
        grow_caches(graphs["decoder"].graph)

    def begin(self, inputs: Inputs) -> list[ir.Value]:
        """As `Step`."""
        self.inputs = inputs
        ops = inputs.ops
        given = {"input_ids": inputs.ids, "attention_mask": inputs.mask}
        nodes, outputs = inline(ops, self.graphs["encoder"], given)
        ops.nodes += nodes
        self.cross = {name.replace("present", "past_key_values"): value for name, value in outputs.items()}
        return [empty_cache(ops, value, inputs.rows) for value in self.own]

    def advance(self, ops: Ops, tokens: ir.Value, states: list[ir.Value], place: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
        """As `Step`."""
        length = ops.cast(ops("Reshape", place, [1]), "int32")
        bindings = {"input_ids": tokens, "past_length": length, "encoder_attention_mask": self.inputs.mask, **self.cross}
        bindings |= {value.name: cache for value, cache in zip(self.own, states)}
        nodes, outputs = inline(ops, self.graphs["decoder"], bindings)
        fixed, nodes = split(nodes, {tokens, length, *states})
        self.inputs.ops.nodes += fixed
        ops.nodes += nodes
        return outputs["logits"], present_caches(outputs, self.own)

    def reorder(self, ops: Ops, states: list[ir.Value], parents: ir.Value, place: ir.Value) -> list[ir.Value]:
        """As `Step`."""
        return self.inputs.reordered(ops, states, parents)


def grow_caches(graph: ir.Graph) -> None:
    """Replaces attention over caches with room by that over caches which it returns longer."""
    for node in graph:
        if node.op_type == "DecoderMaskedMultiHeadAttention":
            query, key, value, _, bias, *past = node.inputs[:7]
            node.op_type = "MultiHeadAttention"
            node.attributes.pop("past_present_share_buffer")
            node.resize_inputs(8)
            for index, given in enumerate([query, key, value, None, None, bias, *past]):
                node.replace_input_with(index, given)
    inputs = {value.name: value for value in graph.inputs}
    writers = inputs["cache_indirection"]  # whose first axis is that of the mask, which is all that may still be read of it
    writers.replace_all_uses_with(inputs["encoder_attention_mask"])
    graph.inputs.remove(writers)
    graph.inputs.remove(inputs["num_beams"])


class CpuDecoderStep:
    """The `Step` of a decoder: caches that grow, in which each row has its own length."""

    def __init__(self, graphs: dict[str, ir.Model]):
        self.graph = graphs["decoder"]
        self.own = own_caches(self.graph)

    def begin(self, inputs: Inputs) -> list[ir.Value]:
        """As `Step`. There is no step of no token: the one token of a prompt is in its cache before it is written."""
        self.inputs = inputs
        ops = inputs.ops
        length = ops("Max", ops("Sub", ops.size(inputs.ids, 1), 1), 1)
        places = ops("Range", 0, ops("Squeeze", length), 1)
        bindings = {
            "input_ids": ops("Slice", padded_on_the_right(ops, inputs.ids, inputs.lengths), [0], length, [1]),
            "position_ids": ops("Expand", inputs.known(ops, places), ops("Concat", inputs.batch, length, axis=0)),
            "last_position": ops.cast(ops("Reshape", ops("Max", ops("Sub", inputs.lengths, 2), 0), [-1]), "int32"),
            "total_length": ops.cast(length, "int32"),
            **{value.name: empty_cache(ops, value, inputs.batch) for value in self.own},
        }
        nodes, outputs = inline(ops, self.graph.clone(), bindings)
        ops.nodes += nodes
        self.longest = ops("Reshape", ops("ReduceMax", inputs.lengths, keepdims=0), [1])
        self.last = inputs.repeated(ops("Sub", inputs.lengths, 1))
        return [inputs.repeated(cache) for cache in present_caches(outputs, self.own)]

    def advance(self, ops: Ops, tokens: ir.Value, states: list[ir.Value], place: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
        """As `Step`."""
        last = ops("Add", self.last, place)
        bindings = {
            "input_ids": tokens,
            "position_ids": self.inputs.known(ops, last),
            "last_position": ops.cast(ops("Reshape", last, [-1]), "int32"),
            "total_length": ops.cast(ops("Add", self.longest, place), "int32"),
            **{value.name: cache for value, cache in zip(self.own, states)},
        }
        nodes, outputs = inline(ops, self.graph, bindings)
        fixed, nodes = split(nodes, set(bindings.values()))
        self.inputs.ops.nodes += fixed
        ops.nodes += nodes
        return outputs["logits"], present_caches(outputs, self.own)

    def reorder(self, ops: Ops, states: list[ir.Value], parents: ir.Value, place: ir.Value) -> list[ir.Value]:
        """As `Step`."""
        return self.inputs.reordered(ops, states, parents)


def padded_on_the_right(ops: Ops, ids: ir.Value, lengths: ir.Value) -> ir.Value:
    """`ids` (B, S), whose rows have so many tokens (B, 1) after their padding."""
    size = ops("Shape", ids, start=1)
    places = ops("Add", ops("Range", 0, ops("Squeeze", size), 1), ops("Sub", size, lengths))
    return ops("GatherElements", ids, ops("Mod", places, size), axis=1)
