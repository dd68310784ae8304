"""The portable target's graphs: standard operators, with caches that grow.

`WRITE` names the function of each graph. Layers, positions and heads are those of all targets.
"""

from onnx_ir import Value

from ...graphs.alignment import cross_attentions
from ...graphs.attention import (
    append_keys,
    growing_attention,
    source_attention,
    source_heads,
)
from ...graphs.context import (
    Caches,
    GraphContext,
    TargetGraphs,
    Values,
    flat,
)
from ...graphs.encoder_attention import encoder_attention
from ...graphs.layers import STANDARD, decoder_states, logits
from ...graphs.positions import source_bias, token_positions
from ...graphs.precisions import STANDARD_INT8, TIED_FLOAT
from ...graphs.sequences import encoder_states, sequence_outputs


def source_encoder(g: GraphContext, inputs: Values) -> list[Value]:
    """Write the encoder of a seq2seq model and return its output (B, S, D) in a list.

    The decoder graph computes keys and values of the source from this output.
    """
    return [encoder_states(g, inputs)]


def decoder(g: GraphContext, inputs: Values) -> list[Value]:
    """Write a step of a decoder-only model and return `[logits, key, value, …]`.

    The logits follow each token. The keys and values of each layer are the caches with the new
    tokens appended.
    """
    ids, positions, caches = inputs["input_ids"], inputs["position_ids"], Caches(inputs)
    self_attn = growing_attention(g, ids, positions, inputs["attention_mask"], caches)
    states = decoder_states(g, ids, positions, self_attn)
    return [logits(g, states), *flat(caches.present)]


def seq2seq_decoder(g: GraphContext, inputs: Values) -> list[Value]:
    """Write a step of a seq2seq decoder and return `[logits, key, value, …]` with longer caches.

    Each layer has the key and value of the text, then those of the source. The caches of the source
    are empty in the first step. They get the states that they do not hold yet, so they grow only
    once.
    """
    op, ids, source = g.op, inputs["input_ids"], inputs["encoder_hidden_states"]
    caches, past_source = Caches(inputs), Caches(inputs, is_source=True).past
    positions = token_positions(g, ids, None, op.size(caches.past[0][0], 2))
    self_attn = growing_attention(g, ids, positions, None, caches)
    rest = op("Slice", source, op.size(past_source[0][0], 2), op.size(source, 1), [1])
    hidden = source_bias(g, inputs["encoder_attention_mask"])
    sources = [append_keys(g, *layer) for layer in zip(past_source, source_heads(g, rest))]
    states = decoder_states(g, ids, positions, self_attn, source_attention(g, sources, hidden))
    return [
        logits(g, states),
        *flat([pair for layer in zip(caches.present, sources) for pair in layer]),
    ]


def alignment(g: GraphContext, inputs: Values) -> list[Value]:
    """Write the alignment graph and return its output (B, heads, T, S) in a list."""
    states = source_heads(g, inputs["encoder_hidden_states"])
    return cross_attentions(g, inputs, states)


WRITE = {
    "sequence": sequence_outputs,
    "decoder": decoder,
    "seq2seq encoder": source_encoder,
    "seq2seq decoder": seq2seq_decoder,
    "seq2seq alignment": alignment,
}
PRECISIONS = {"fp32": TIED_FLOAT, "int8": STANDARD_INT8}


def target_graphs(dtype: str) -> TargetGraphs:
    return TargetGraphs(STANDARD, PRECISIONS[dtype], encoder_attention, WRITE)
