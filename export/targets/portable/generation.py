"""The portable graphs inside of the one graph that generates, see `generation`."""

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from ...graphs.ops import Ops
from ...one_graph.ops import append, append_step
from ...one_graph.step import LoopInputs, OwnCaches, empty_cache


class PortableSeq2SeqStep:
    """The `Step` (one decoding step in the one graph that generates) of an encoder-decoder.

    Caches grow with each step. Keys and values of the source are computed once, before the loop.
    """

    num_masks = 0

    def __init__(self, graphs: dict[str, ir.Model]):
        self.graphs = graphs
        self.caches = OwnCaches(graphs["decoder"])

    def begin(self, inputs: LoopInputs) -> list[Value]:
        """Add the encoder to the graph and return the states before the first step: empty
        caches."""
        self.inputs = inputs
        self.source = append(inputs.ops, self.graphs["encoder"], inputs.tokens)["last_hidden_state"]
        self.mask = inputs.repeat_rows(inputs.mask)
        return self.caches.empty(inputs, per_beam=True)

    def advance(
        self, ops: Ops, tokens: Value, states: list[Value], position: Value
    ) -> tuple[Value, list[Value]]:
        """Add one step of the decoder and return the logits and the new states, the longer caches.

        Args:
            ops: adds the nodes to the graph.
            tokens: the last token of each row.
            states: the states that `begin` or the step before returned.
            position: the number of new tokens so far, a scalar.
        """
        decoder = self.graphs["decoder"]
        bindings = {
            "input_ids": tokens,
            "encoder_hidden_states": self.source,
            "encoder_attention_mask": self.mask,
        }
        bindings |= self.caches.bind(states)
        for value in decoder.graph.inputs:
            if value.name not in bindings:
                bindings[value.name] = empty_cache(self.inputs.ops, value, self.inputs.batch)
        outputs = append_step(self.inputs, ops, decoder, bindings, {tokens, *states})
        return ops("Gather", outputs["logits"], -1, axis=1), self.caches.present(outputs)


class PortableDecoderStep:
    """The `Step` (one decoding step in the one graph that generates) of a decoder-only model.

    The caches and the attention mask grow with each step.
    """

    num_masks = 1

    def __init__(self, graphs: dict[str, ir.Model]):
        self.graph = graphs["decoder"]
        self.caches = OwnCaches(self.graph)

    def begin(self, inputs: LoopInputs) -> list[Value]:
        """Read each prompt without its last token and return the states: the mask, then the caches.

        One token of padding is read before. It keeps a prompt of one token from being empty: a size
        of 0 has another meaning to `Reshape`.
        """
        self.inputs = inputs
        ops = inputs.ops
        none = ops.filled([inputs.batch, 1], np.int64(0))
        ids, mask = (
            ops("Concat", none, ops("Slice", value, [0], [-1], [1]), axis=1)
            for value in (inputs.ids, inputs.mask)
        )
        positions = inputs.clip_positions(ops, ops("Max", ops("Sub", ops("CumSum", mask, 1), 1), 0))
        bindings = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        outputs = append(
            ops,
            self.graph.clone(),
            bindings | self.caches.bind(self.caches.empty(inputs, per_beam=False)),
        )
        self.last = inputs.repeat_rows(ops("Sub", inputs.lengths, 1))
        self.one = ops.filled([inputs.rows, 1], np.int64(1))
        return [inputs.repeat_rows(value) for value in (mask, *self.caches.present(outputs))]

    def advance(
        self, ops: Ops, tokens: Value, states: list[Value], position: Value
    ) -> tuple[Value, list[Value]]:
        """Add one step and return the logits (rows, V) and the new states: the mask, then the
        caches.

        Args:
            ops: adds the nodes to the graph.
            tokens: the last token of each row.
            states: the states that `begin` or the step before returned.
            position: the number of new tokens so far, a scalar.
        """
        before, *caches = states
        mask = ops("Concat", before, self.one, axis=1)
        positions = self.inputs.clip_positions(ops, ops("Add", self.last, position))
        bindings = {
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": positions,
            **self.caches.bind(caches),
        }
        outputs = append_step(self.inputs, ops, self.graph, bindings, bindings.values())
        return ops("Gather", outputs["logits"], -1, axis=1), [mask, *self.caches.present(outputs)]
