"""The cpu target's graphs: onnxruntime's attention, with caches that have room and are written in place.

`WRITE` names the function of each graph. Layers, positions and heads are those of all targets.
"""

from dataclasses import replace
from functools import partial

from onnx_ir import Value

from ...graphs.context import GraphContext, Pairs, Precision, TargetGraphs, Values, WriteGraph
from ...graphs.decoders import caches, flat, seq2seq_states, source_encoder
from ...graphs.layers import STANDARD, embed, fused_rms_norm, logits, stack
from ...graphs.onnxruntime_attention import (
    beam_attention,
    beam_cross_attention,
    cross_attention,
    grouped_attention,
    row_cross_attention,
    tiled_attention,
)
from ...graphs.precisions import BLOCK_INT4, FLOAT, ROW_INT8
from ...graphs.sequences import sequence_outputs, state_at

DIALECT = replace(STANDARD, rms_norm=fused_rms_norm)


def decoder(g: GraphContext, inputs: Values) -> list[Value]:
    """Write a decoder that returns the logits after the last token of each row."""
    op = g.op
    states, present = decoder_states(g, inputs)
    last = op.cast(inputs["last_position"], "int64")
    last = op("Min", last, op("Sub", op.size(inputs["input_ids"], 1), 1))  # a later step has one token
    return [logits(g, state_at(g, states, last)), *flat(present)]


def decoder_lookup(g: GraphContext, inputs: Values) -> list[Value]:
    """Write a decoder that returns the logits after all tokens."""
    states, present = decoder_states(g, inputs)
    return [logits(g, states), *flat(present)]


def decoder_states(g: GraphContext, inputs: Values) -> tuple[Value, Pairs]:
    present: Pairs = []
    attend = grouped_attention(g, "model.", inputs, caches(inputs), present)
    x = embed(g, "model.", inputs["input_ids"], inputs["position_ids"])
    return stack(g, "model.", g.config.num_hidden_layers, x, {"self_attn": attend}), present


def seq2seq_beams(g: GraphContext, inputs: Values) -> list[Value]:
    """Write one token of each beam, all beams as long."""
    present: Pairs = []
    positions = g.op("Unsqueeze", g.op.cast(inputs["past_length"], "int64"), [0])
    self_attn = beam_attention(g, "model.decoder.", inputs, caches(inputs, ".decoder."), present)
    cross_attn = beam_cross_attention(g, inputs["encoder_attention_mask"], caches(inputs, ".encoder."))
    states = seq2seq_states(g, inputs["input_ids"], positions, self_attn, cross_attn)
    return [next_logits(g, states), *flat(present)]


def seq2seq_step(g: GraphContext, inputs: Values) -> list[Value]:
    """Write one token of each row; rows and their sources differ in length."""
    present: Pairs = []
    sources: Pairs = []
    self_attn = grouped_attention(g, "model.decoder.", inputs, caches(inputs, ".decoder."), present)
    cross_attn = row_cross_attention(g, inputs, caches(inputs, ".encoder."), sources)
    states = seq2seq_states(g, inputs["input_ids"], inputs["position_ids"], self_attn, cross_attn)
    return [next_logits(g, states), *flat(present), *flat(sources)]


def seq2seq_lookup(g: GraphContext, inputs: Values) -> list[Value]:
    """Write several tokens of each row, with the logits after each."""
    present: Pairs = []
    self_attn = grouped_attention(g, "model.decoder.", inputs, caches(inputs, ".decoder."), present)
    cross_attn = cross_attention(g, inputs["encoder_attention_mask"], caches(inputs, ".encoder."))
    states = seq2seq_states(g, inputs["input_ids"], inputs["position_ids"], self_attn, cross_attn)
    return [logits(g, states), *flat(present)]


def next_logits(g: GraphContext, states: Value) -> Value:
    """Return the logits (rows, V) after the one token of each row, (rows, 1, D)."""
    return logits(g, g.op("Squeeze", states, [1]))


WRITE: dict[str, WriteGraph] = {
    "sequence": partial(sequence_outputs, attention=tiled_attention),
    "decoder": decoder,
    "lookup": decoder_lookup,
    "seq2seq encoder": partial(source_encoder, attention=tiled_attention),
    "seq2seq decoder": seq2seq_beams,
    "seq2seq step": seq2seq_step,
    "seq2seq lookup": seq2seq_lookup,
}
PRECISIONS: dict[str, Precision] = {"fp32": FLOAT, "int8": ROW_INT8, "int4": BLOCK_INT4}


def target_graphs(dtype: str) -> TargetGraphs:
    return TargetGraphs(DIALECT, PRECISIONS[dtype], WRITE)
