"""The portable target's graphs: standard operators, with caches that grow.

`WRITE` names the function of each graph. Layers, positions and heads are those of all targets.
"""

from functools import partial

from onnx_ir import Value

from ...graphs.attention import encoder_attention, growing_attention, grown, source_attention, source_heads
from ...graphs.context import GraphContext, Pairs, Precision, TargetGraphs, Values, WriteGraph
from ...graphs.decoders import caches, flat, seq2seq_states
from ...graphs.layers import STANDARD, embed, logits, stack
from ...graphs.positions import causal_bias, key_flags, masked, offsets, token_positions
from ...graphs.precisions import STANDARD_INT8, TIED_FLOAT
from ...graphs.sequences import encoder_states, sequence_outputs


def source_encoder(g: GraphContext, inputs: Values) -> list[Value]:
    """Write the encoder of a seq2seq model. Its decoder makes keys and values of the output, (B, S, D)."""
    return [encoder_states(g, "model.encoder.", g.config.encoder_layers, inputs, encoder_attention)]


def decoder(g: GraphContext, inputs: Values) -> list[Value]:
    """Write a decoder whose caches and mask grow."""
    ids, positions, past = inputs["input_ids"], inputs["position_ids"], caches(inputs)
    present: Pairs = []
    distances = offsets(g, ids, g.op.size(past[0][0], 2))
    bias = causal_bias(g, "model.", distances, inputs["attention_mask"])
    attend = growing_attention(g, positions, bias, past, present)
    states = stack(g, "model.", g.config.num_hidden_layers, embed(g, "model.", ids, positions), {"self_attn": attend})
    return [logits(g, states), *flat(present)]


def seq2seq_decoder(g: GraphContext, inputs: Values) -> list[Value]:
    """Write a decoder whose caches grow. Those of the source grow once, by the states that they do not cover yet."""
    op, ids, source = g.op, inputs["input_ids"], inputs["encoder_hidden_states"]
    past, past_source = caches(inputs, ".decoder."), caches(inputs, ".encoder.")
    present: Pairs = []
    before = op.size(past[0][0], 2)
    positions = token_positions(g, ids, None, before)
    bias = causal_bias(g, "model.decoder.", offsets(g, ids, before), None)
    self_attn = growing_attention(g, positions, bias, past, present)
    rest = op("Slice", source, op.size(past_source[0][0], 2), op.size(source, 1), [1])
    hidden = masked(g, key_flags(g, inputs["encoder_attention_mask"]))
    new_source = source_heads(g, "model.decoder.", rest)
    sources = [grown(g, *layer) for layer in zip(past_source, new_source)]
    states = seq2seq_states(g, ids, positions, self_attn, source_attention(g, sources, hidden))
    return [logits(g, states), *flat([pair for layer in zip(present, sources) for pair in layer])]


WRITE: dict[str, WriteGraph] = {
    "sequence": partial(sequence_outputs, attention=encoder_attention),
    "decoder": decoder,
    "seq2seq encoder": source_encoder,
    "seq2seq decoder": seq2seq_decoder,
}
PRECISIONS: dict[str, Precision] = {"fp32": TIED_FLOAT, "int8": STANDARD_INT8}


def target_graphs(dtype: str) -> TargetGraphs:
    return TargetGraphs(STANDARD, PRECISIONS[dtype], WRITE)
