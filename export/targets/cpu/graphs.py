"""The cpu target's graphs: onnxruntime's attention, with caches of a fixed size, written in place.

`WRITE` names the function of each graph. Layers, positions and heads are those of all targets.
"""

from dataclasses import replace
from functools import partial

from onnx_ir import Value

from ...graphs.alignment import cross_attentions
from ...graphs.context import (
    Caches,
    GraphContext,
    Precision,
    TargetGraphs,
    Values,
    WriteGraph,
    flat,
)
from ...graphs.layers import STANDARD, decoder_states, fused_rms_norm, logits
from ...graphs.onnxruntime_attention import (
    beam_attention,
    beam_cross_attention,
    cross_attention,
    fused_rotate,
    grouped_attention,
    row_cross_attention,
    target_attention,
    tiled_attention,
)
from ...graphs.precisions import BLOCK_INT4, FLOAT, ROW_INT8
from ...graphs.sequences import sequence_outputs, source_encoder, state_at

DIALECT = replace(STANDARD, rms_norm=fused_rms_norm, rotate=fused_rotate)


def decoder(g: GraphContext, inputs: Values) -> list[Value]:
    """Write a decoder and return `[logits, key, value, …]`.

    The logits (rows, V) are those after the last token of each row. The keys and values of each
    layer are the caches, written in place.
    """
    states, present = row_states(g, inputs)
    last = g.op.cast(inputs["last_position"], "int64")
    # a later step has one token
    last = g.op("Min", last, g.op("Sub", g.op.size(inputs["input_ids"], 1), 1))
    return [logits(g, state_at(g, states, last)), *present]


def step(g: GraphContext, inputs: Values) -> list[Value]:
    """Write a step of one token per row and return `[logits, key, value, …]`.

    Rows may differ in length, and so may their sources. The caches of all layers come first, then
    those of the source.
    """
    states, present = row_states(g, inputs)
    return [next_logits(g, states), *present]


def row_states(g: GraphContext, inputs: Values) -> tuple[Value, list[Value]]:
    """Return the final states (rows, T, D) of rows that may differ in length, and the new caches.

    The caches are a list of keys and values, layer by layer. The graph `step` also has those of the
    source, after the others.
    """
    caches, source = Caches(inputs), Caches(inputs, is_source=True)
    attentions = [grouped_attention(g, inputs, caches)]
    if "last_source_position" in inputs:
        attentions.append(row_cross_attention(g, inputs, source))
    elif g.config.is_seq2seq:
        attentions.append(cross_attention(g, inputs["encoder_attention_mask"], source.past))
    states = decoder_states(g, inputs["input_ids"], inputs["position_ids"], *attentions)
    return states, flat(caches.present + source.present)


def beams(g: GraphContext, inputs: Values) -> list[Value]:
    """Write a step of one token per beam and return `[logits, key, value, …]`.

    The beams of all inputs have the same length. The logits are (rows, V), one row per beam.
    """
    caches, source = Caches(inputs), Caches(inputs, is_source=True)
    positions = g.op("Unsqueeze", g.op.cast(inputs["past_length"], "int64"), [0])
    self_attn = beam_attention(g, inputs, caches)
    cross_attn = beam_cross_attention(g, inputs["encoder_attention_mask"], source.past)
    states = decoder_states(g, inputs["input_ids"], positions, self_attn, cross_attn)
    return [next_logits(g, states), *flat(caches.present)]


def alignment(g: GraphContext, inputs: Values) -> list[Value]:
    """Write the alignment graph and return its output (B, heads, T, S) in a list.

    Weights are shared with the other graphs.
    """
    return cross_attentions(g, inputs, Caches(inputs, is_source=True).past, target_attention)


def next_logits(g: GraphContext, states: Value) -> Value:
    """Return the logits (rows, V) after the one token of each row, whose `states` are (rows, 1,
    D)."""
    return logits(g, g.op("Squeeze", states, [1]))


WRITE: dict[str, WriteGraph] = {
    "sequence": partial(sequence_outputs, attention=tiled_attention),
    "decoder": decoder,
    "seq2seq encoder": partial(source_encoder, attention=tiled_attention),
    "seq2seq decoder": beams,
    "seq2seq step": step,
    "seq2seq alignment": alignment,
}
PRECISIONS: dict[str, Precision] = {"fp32": FLOAT, "int8": ROW_INT8, "int4": BLOCK_INT4}


def target_graphs(dtype: str) -> TargetGraphs:
    return TargetGraphs(DIALECT, PRECISIONS[dtype], WRITE)
