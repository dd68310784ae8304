"""The cpu target's graphs: onnxruntime's attention, with caches of a fixed size, written in place.

`WRITE` names the function of each graph. Layers, positions and heads are those of all targets.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from ...graphs.alignment import cross_attentions
from ...graphs.attention import causal_attention, fused_product
from ...graphs.beams import top_tokens
from ...graphs.context import (
    Caches,
    GraphContext,
    TargetGraphs,
    Values,
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
    split_projections,
    tiled_attention,
)
from ...graphs.ops import Ops, data_type, name_values
from ...graphs.precisions import BLOCK_INT4, FLOAT, ROW_INT8
from ...graphs.sequences import sequence_outputs, source_encoder, state_at

DIALECT = replace(STANDARD, rms_norm=fused_rms_norm, rotate=fused_rotate)
# rows whose logits are computed together, so that these stay in the cache of a core until their
# best tokens are found
BLOCK = 64


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
    return [logits(g, g.op("Squeeze", states, [1])), *present]


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

    The logits are (rows, V), one row per beam.
    """
    states, present = beam_states(g, inputs)
    return [logits(g, states), *present]


def candidates(g: GraphContext, inputs: Values) -> list[Value]:
    """Write the same step and return `[log_p, tokens, key, value, …]`.

    Instead of the logits it returns the `count` most likely tokens of each row with their log p,
    both (rows, count).
    """
    states, present = beam_states(g, inputs)
    return [*best_tokens(g, states, inputs["count"]), *present]


def beam_states(g: GraphContext, inputs: Values) -> tuple[Value, list[Value]]:
    """Return the final states (rows, D) of beams, and the new caches, keys and values layer by
    layer. The beams of all inputs have the same length."""
    caches, source = Caches(inputs), Caches(inputs, is_source=True)
    positions = g.op("Unsqueeze", g.op.cast(inputs["past_length"], "int64"), [0])
    self_attn = beam_attention(g, inputs, caches)
    cross_attn = beam_cross_attention(g, inputs["encoder_attention_mask"], source.past)
    states = decoder_states(g, inputs["input_ids"], positions, self_attn, cross_attn)
    return g.op("Squeeze", states, [1]), flat(caches.present)


def best_tokens(g: GraphContext, states: Value, count: Value) -> list[Value]:
    """Return log p and ids of the `count` (1,) most likely tokens after each of `states` (rows, D),
    both (rows, count). They are found in a loop over blocks of `BLOCK` rows."""
    shape = g.op.shape(0, count)
    before = [
        g.op("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, dtype)))
        for dtype in (np.float32, np.int64)
    ]
    num_blocks = g.op("Div", g.op("Add", g.op.size(states, 0), BLOCK - 1), BLOCK)
    body = best_tokens_of_block(g, states, count)
    return g.op.outputs(2, "Loop", g.op("Squeeze", num_blocks), None, *before, body=body)


def best_tokens_of_block(g: GraphContext, states: Value, count: Value) -> ir.Graph:
    """Return the body of the loop of `best_tokens`, which appends the results of a block of
    `states` to those of the blocks before it."""
    op, name = Ops(g.op.dtype, g.op), "block"
    inputs = [
        Value(name=f"{name}.{place}", type=ir.TensorType(data_type(dtype)))
        for place, dtype in enumerate(("int64", "bool", "float32", "int64"))
    ]
    number, goes_on, *before = inputs
    number.shape = goes_on.shape = ir.Shape([])
    start = op("Mul", number, [BLOCK])
    rows = op("Slice", states, start, op("Add", start, BLOCK), [0])
    best = top_tokens(op, logits(replace(g, op=op), rows), count, g.config.vocab_size)
    outputs = [op("Identity", goes_on)]
    outputs += [op("Concat", *both, axis=0) for both in zip(before, best)]
    name_values(name, op)
    for output, like in zip(outputs, inputs[1:]):
        output.type, output.shape = like.type, like.shape
    return ir.Graph(inputs, outputs, nodes=op.nodes, name=name)


def alignment(g: GraphContext, inputs: Values) -> list[Value]:
    """Write the alignment graph and return its output (B, heads, T, S) in a list.

    Weights are shared with the other graphs, so queries, keys and values are those of `beams`.
    """
    attention = partial(causal_attention, product=fused_product, project=split_projections)
    return cross_attentions(g, inputs, Caches(inputs, is_source=True).past, attention)


WRITE = {
    "sequence": sequence_outputs,
    "decoder": decoder,
    "seq2seq encoder": source_encoder,
    "seq2seq decoder": beams,
    "seq2seq candidates": candidates,
    "seq2seq step": step,
    "seq2seq alignment": alignment,
}
PRECISIONS = {"fp32": FLOAT, "int8": ROW_INT8, "int4": BLOCK_INT4}


def target_graphs(dtype: str) -> TargetGraphs:
    return TargetGraphs(DIALECT, PRECISIONS[dtype], tiled_attention, WRITE)
