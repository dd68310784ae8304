"""The cpu target's graphs inside of the one graph that generates, see `generation`."""

import onnx_ir as ir
from onnx_ir import Value

from ...graphs.ops import Ops
from ...one_graph.ops import append, append_step
from ...one_graph.step import LoopInputs, OwnCaches


class CpuSeq2SeqStep:
    """The `Step` (one decoding step in the one graph that generates) of an encoder-decoder.

    Its caches grow. A loop gives no operator its own input to write to, so caches of a fixed size
    would be copied whole at each step.
    """

    num_masks = 0

    def __init__(self, graphs: dict[str, ir.Model]):
        self.graphs = graphs
        self.caches = OwnCaches(graphs["decoder"])
        grow_caches(graphs["decoder"].graph)

    def begin(self, inputs: LoopInputs) -> list[Value]:
        """Add the encoder, which computes keys and values of the source, and return empty
        caches."""
        self.inputs = inputs
        outputs = append(inputs.ops, self.graphs["encoder"], inputs.tokens)
        self.cross = {
            name.replace("present", "past_key_values"): value for name, value in outputs.items()
        }
        return self.caches.empty(inputs, per_beam=True)

    def advance(
        self, ops: Ops, tokens: Value, states: list[Value], position: Value
    ) -> tuple[Value, list[Value]]:
        """Add one step and return the logits (rows, V) and the new states, the longer caches.

        Beams of one input read the same keys and values of the source.

        Args:
            ops: adds the nodes to the graph.
            tokens: the last token of each row.
            states: the caches that `begin` or the step before returned.
            position: the number of new tokens so far, a scalar.
        """
        length = ops.cast(ops("Reshape", position, [1]), "int32")
        bindings = {
            "input_ids": tokens,
            "past_length": length,
            "encoder_attention_mask": self.inputs.mask,
            **self.cross,
        }
        bindings |= self.caches.bind(states)
        outputs = append_step(
            self.inputs, ops, self.graphs["decoder"], bindings, {tokens, length, *states}
        )
        return outputs["logits"], self.caches.present(outputs)


def grow_caches(graph: ir.Graph) -> None:
    """Change a decoder `graph` in place, so that its attention returns longer caches.

    Before, it wrote to caches of a fixed size. The inputs `cache_indirection` and `num_beams` are
    removed.
    """
    for node in graph:
        if node.op_type == "DecoderMaskedMultiHeadAttention":
            query, key, value, _, bias, *past = node.inputs[:7]
            node.op_type = "MultiHeadAttention"
            node.attributes.pop("past_present_share_buffer")
            node.resize_inputs(8)
            for index, operand in enumerate([query, key, value, None, None, bias, *past]):
                node.replace_input_with(index, operand)
    inputs = {value.name: value for value in graph.inputs}
    # the first axis of the mask, the only thing that may still be read of it
    writers = inputs["cache_indirection"]
    writers.replace_all_uses_with(inputs["encoder_attention_mask"])
    graph.inputs.remove(writers)
    graph.inputs.remove(inputs["num_beams"])


class CpuDecoderStep:
    """The `Step` (one decoding step in the one graph that generates) of a decoder-only model.

    Its caches grow, and rows may differ in length.
    """

    num_masks = 0

    def __init__(self, graphs: dict[str, ir.Model]):
        self.graph = graphs["decoder"]
        self.caches = OwnCaches(self.graph)

    def begin(self, inputs: LoopInputs) -> list[Value]:
        """Read each prompt without its last token and return the caches.

        A prompt of one token is read whole; the first step writes the same token over it.
        """
        self.inputs = inputs
        ops = inputs.ops
        length = ops("Max", ops("Sub", ops.size(inputs.ids, 1), 1), 1)
        indices = ops.range(length)
        bindings = {
            "input_ids": ops("Slice", pad_right(ops, inputs.ids, inputs.lengths), [0], length, [1]),
            "position_ids": ops(
                "Expand",
                inputs.clip_positions(ops, indices),
                ops("Concat", inputs.batch, length, axis=0),
            ),
            "last_position": ops.cast(
                ops("Reshape", ops("Max", ops("Sub", inputs.lengths, 2), 0), [-1]), "int32"
            ),
            "total_length": ops.cast(length, "int32"),
            **self.caches.bind(self.caches.empty(inputs, per_beam=False)),
        }
        outputs = append(ops, self.graph.clone(), bindings)
        self.longest = ops("Reshape", ops("ReduceMax", inputs.lengths, keepdims=0), [1])
        self.last = inputs.repeat_rows(ops("Sub", inputs.lengths, 1))
        return [inputs.repeat_rows(cache) for cache in self.caches.present(outputs)]

    def advance(
        self, ops: Ops, tokens: Value, states: list[Value], position: Value
    ) -> tuple[Value, list[Value]]:
        """Add one step and return the logits (rows, V) and the new states, the longer caches.

        Args:
            ops: adds the nodes to the graph.
            tokens: the last token of each row, which is appended to the row.
            states: the caches that `begin` or the step before returned.
            position: the number of new tokens so far, a scalar.
        """
        last = ops("Add", self.last, position)
        bindings = {
            "input_ids": tokens,
            "position_ids": self.inputs.clip_positions(ops, last),
            "last_position": ops.cast(ops("Reshape", last, [-1]), "int32"),
            "total_length": ops.cast(ops("Add", self.longest, position), "int32"),
            **self.caches.bind(states),
        }
        outputs = append_step(self.inputs, ops, self.graph, bindings, bindings.values())
        return outputs["logits"], self.caches.present(outputs)


def pad_right(ops: Ops, ids: Value, lengths: Value) -> Value:
    """Return `ids` (B, S) with the padding on the left moved to the right.

    `lengths` (B, 1) is the number of tokens of each row.
    """
    size = ops("Shape", ids, start=1)
    indices = ops("Add", ops.range(size), ops("Sub", size, lengths))
    return ops("GatherElements", ids, ops("Mod", indices, size), axis=1)
