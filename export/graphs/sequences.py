"""Graphs of models that read whole sequences: encoders with their heads, and models with a decoder.

Encoders have the attention of the target. Models with a decoder have standard operators on every
target.
"""

from collections.abc import Callable

import numpy as np
from onnx_ir import Value

from ..heads import HEADS, READS_CHOICES, READS_TARGETS
from .activations import activation
from .attention import causal_attention, source_attention, source_heads
from .context import EncoderAttention, GraphContext, Tokens, Values, flat
from .encoder_attention import encoder_attention
from .images import image_labels, patch_states
from .layers import (
    decoder_states,
    embed,
    linear,
    logits,
    norm,
    pool,
    project,
    row_linear,
    stack,
)
from .positions import (
    cast_to_float32,
    cast_to_graph_dtype,
    padded_positions,
    source_bias,
    token_positions,
)

# activations of SpladePooling, log(1 + x) once or twice after the ReLU
SPLADE_LOGARITHMS = {"relu": 1, "log1p_relu": 2}
# onnxruntime's Log gives the last values of an array other bits, unless this divides their number
LOG_MULTIPLE = 16


def sequence_outputs(g: GraphContext, inputs: Values) -> list[Value]:
    """Return the outputs of a model that reads whole sequences, in the order of its spec.

    `inputs` are those of the graph by name.
    """
    reads = HEADS[g.config.architecture].reads
    if reads == READS_CHOICES:
        return choice_logits(g, inputs)
    write_head = WRITERS[g.config.head]
    match g.config.model_type:
        case "vanilla-vision":
            patches = patch_states(g, inputs["pixel_values"])
            states = stack(g, g.config.encoder_prefix, patches, g.target.attention(g, None))
            return write_head(g, states, inputs)
        case "vanilla-decoder":
            return write_head(g, causal_states(g, inputs), inputs)
        case "vanilla-seq2seq":
            states, source = seq2seq_states(g, inputs)
            return [states, source] if reads == READS_TARGETS else write_head(g, states, inputs)
    return write_head(g, encoder_states(g, inputs), inputs)


# ------------------------------------------------------------------------------------------- bodies


def encoder_states(
    g: GraphContext, inputs: Values, attention: EncoderAttention | None = None
) -> Value:
    """Return the states (B, S, D) of an encoder for the tokens in `inputs`, written as nodes of the
    graph.

    `attention` makes the function that writes the attention, by default that of the target.
    """
    attention = attention or g.target.attention
    prefix, ids, mask = g.config.encoder_prefix, inputs["input_ids"], inputs["attention_mask"]
    tokens = Tokens(ids, mask, token_positions(g, ids, mask))
    x = embed(g, prefix, ids, tokens.positions, inputs.get("token_type_ids"))
    if g.target.dialect.token_multiple == 1:
        return stack(g, prefix, x, attention(g, tokens))
    padded, x = pad_tokens(g, tokens, x)
    states = stack(g, prefix, x, attention(g, padded))
    return g.op("Slice", states, [0], g.op.size(ids, 1), [1])


def pad_tokens(g: GraphContext, tokens: Tokens, x: Value) -> tuple[Tokens, Value]:
    """Return `tokens` and their embeddings with zeros up to a multiple of `token_multiple`
    tokens."""
    op = g.op
    missing = op("Mod", op("Neg", op.size(tokens.ids, 1)), g.target.dialect.token_multiple)

    def pad(value: Value, zero: np.generic, *sizes: int) -> Value:
        # onnxruntime has no `Pad` of integers and of bfloat16 on CUDA
        zeros = op.filled([op.size(value, 0), missing, *sizes], zero)
        return op("Concat", value, zeros, axis=1)

    padded = (pad(value, np.int64(0)) for value in (tokens.ids, tokens.mask, tokens.positions))
    return Tokens(*padded), pad(x, op.dtype.type(0), g.config.hidden_size)


def source_encoder(g: GraphContext, inputs: Values) -> list[Value]:
    """Return the keys and values of the source for each layer of the decoder, in the order of
    specs.

    They come from the encoder of a seq2seq model, which is written too. `inputs` are its tokens and
    mask.
    """
    return flat(source_heads(g, encoder_states(g, inputs)))


def causal_states(g: GraphContext, inputs: Values) -> Value:
    """Return the states (B, S, D) of a decoder that reads whole sequences, written as nodes of the
    graph."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = padded_positions(g, ids, mask)
    return decoder_states(g, ids, positions, causal_attention(g, ids, positions, mask))


def seq2seq_states(g: GraphContext, inputs: Values) -> tuple[Value, Value]:
    """Return the states of the decoder, (B, T, D), and of the encoder, (B, S, D).

    Without decoder tokens among the `inputs`, the decoder reads the source shifted right.
    """
    source = encoder_states(g, inputs, encoder_attention)
    targets, mask = inputs.get("decoder_input_ids"), inputs.get("decoder_attention_mask")
    if targets is None or mask is None:
        targets = shifted_right(g, inputs["input_ids"])
        positions = token_positions(g, targets, None)
    else:
        positions = padded_positions(g, targets, mask)
    self_attn = causal_attention(g, targets, positions, mask)
    cross_attn = source_attention(
        g, source_heads(g, source), source_bias(g, inputs["attention_mask"])
    )
    return decoder_states(g, targets, positions, self_attn, cross_attn), source


def shifted_right(g: GraphContext, ids: Value) -> Value:
    """Return `ids` (B, T) moved right by one, without their last token.

    The first token becomes the config's start token, or the last token of the row that is not
    padding, if the config has `wrap_last_token`.
    """
    op, config = g.op, g.config
    if config.wrap_last_token:
        is_token = op.cast(op("Not", op("Equal", ids, config.pad_token_id)), "int64")
        count = op("ReduceSum", is_token, [1], keepdims=1)
        start = op("GatherElements", ids, op("Max", op("Sub", count, 1), 0), axis=1)
    else:
        start = op(
            "Expand", np.array([[config.decoder_start_token_id]]), op.shape(op.size(ids, 0), 1)
        )
    return op("Concat", start, op("Slice", ids, [0], [-1], [1]), axis=1)


# -------------------------------------------------------------------------------------------- heads


def model_outputs(g: GraphContext, states: Value, inputs: Values) -> list[Value]:
    """Return [`states`], and the pooled state (B, D) as a second output if the model has a pooler.
    `inputs` are not used."""
    return [states, pool(g, states)] if getattr(g.config, "pooler_act", None) else [states]


def choice_logits(g: GraphContext, inputs: Values) -> list[Value]:
    """Return [logits (B, C)] of an encoder that reads C sequences for each row, (B, C, S)."""
    op = g.op
    rows_and_choices = op("Shape", inputs["input_ids"], end=2)
    rows = {
        name: op("Reshape", value, op.shape(-1, op("Shape", value, start=2)))
        for name, value in inputs.items()
    }
    states = encoder_states(g, rows)
    state = sequence_state(g, states, rows["attention_mask"])
    return [op("Reshape", row_linear(g, state, "choice_classifier"), rows_and_choices)]


def vocabulary_logits(g: GraphContext, states: Value) -> Value:
    """Return the logits (B, S, V) of a masked language model, from the encoder's states (B, S, D).

    Before the projection stands BERT's transform, or a projection to the width of the embeddings.
    """
    if not g.config.lm_transform_act:
        return logits(g, project(g, states, "transform"))
    return logits(g, transformed(g, states, g.config.lm_transform_act))


def sparse_embedding(g: GraphContext, states: Value, inputs: Values) -> list[Value]:
    """Return [sparse embeddings (B, V)] of a masked language model, pooled as SpladePooling does:
    the largest log(1 + relu(logit)) of the tokens of a row for each entry of the vocabulary, or
    their sum.

    The activations do not decrease, so those of the largest logit are computed, not of all.
    """
    op = g.op
    mask = op.cast(inputs["attention_mask"], op.dtype.name)
    scores = op("Mul", vocabulary_logits(g, states), op("Unsqueeze", mask, [2]))
    is_sum = g.config.splade["pooling_strategy"] == "sum"
    pooled = op("Relu", scores if is_sum else largest(g, scores))
    pooled = logarithms(g, pooled, SPLADE_LOGARITHMS[g.config.splade["activation_function"]])
    return [token_sum(g, pooled, mask) if is_sum else pooled]


def logarithms(g: GraphContext, x: Value, times: int) -> Value:
    """Return log(1 + x) of values (..., V), `times` times, with the same bits in any batch."""
    op, size = g.op, g.config.vocab_size
    one = np.ones((), np.float32 if op.dtype.name == "bfloat16" else op.dtype)

    def write(x: Value) -> Value:
        x = op("Pad", x, [0, -size % LOG_MULTIPLE], None, [-1])
        for _ in range(times):
            x = op("Log", op("Add", x, one))
        return op("Slice", x, [0], [size], [-1])

    return widened(g, x, write)


def transformed(g: GraphContext, states: Value, act: str) -> Value:
    """Return the states (..., D) after the linear map, activation and norm of "transform"."""
    inner = g.target.dialect.activated_linear(g, states, "transform.dense", act)
    return norm(g, inner, "transform.norm")


def is_next(g: GraphContext, states: Value) -> Value:
    """Return two logits (B, 2) for each row, from the encoder's states (B, S, D): the second
    sentence follows the first, and it does not."""
    return row_linear(g, pool(g, states), "next_sentence")


def token_labels(g: GraphContext, states: Value) -> Value:
    """Return the logits of each token's labels, (B, S, labels), after a transform if there is
    one."""
    if act := getattr(g.config, "token_transform_act", None):  # ELECTRA's
        states = activation(g, linear(g, states, "transform.0"), act, "transform.1")
    else:
        states = classifier_states(g, states)
    return linear(g, states, "classifier")


def classifier_states(g: GraphContext, states: Value) -> Value:
    """Return the states (B, S, D) that a classifier of tokens reads, after a transform if there is
    one."""
    act = getattr(g.config, "classifier_act", None)
    return transformed(g, states, act) if act else states


def answers(g: GraphContext, states: Value, inputs: Values) -> list[Value]:
    """Return [start logits, end logits], (B, S) each: how likely the answer starts, or ends, at
    each token. `inputs` are not used.

    `states` (B, S, D) are those of the encoder or decoder.
    """
    scores = linear(g, classifier_states(g, states), "qa_outputs")
    return [g.op("Gather", scores, end, axis=2) for end in range(2)]


def sequence_labels(g: GraphContext, states: Value, inputs: Values) -> list[Value]:
    """Return [logits (B, labels)] of each row's labels, computed from one state of the row.

    It is the pooled or mean state of an encoder, a decoder's last token's, or a seq2seq decoder's
    at the last end token.
    """
    op, ids, mask = g.op, inputs["input_ids"], inputs["attention_mask"]
    match g.config.model_type:
        case "vanilla-encoder":
            return [row_linear(g, sequence_state(g, states, mask), "classifier")]
        case "vanilla-decoder":
            return [linear(g, last_state(g, states, token_flags(g, ids, mask)), "score")]
    end_tokens = np.atleast_1d(np.array(g.config.eos_token_id, np.int64))
    is_end = op.any(op("Equal", op("Unsqueeze", ids, [-1]), end_tokens), [-1], keepdims=0)
    last = last_state(g, states, op("And", is_end, op.cast(mask, "bool")))
    return [row_linear(g, op("Tanh", row_linear(g, last, "dense")), "classifier")]


def sequence_state(g: GraphContext, states: Value, mask: Value) -> Value:
    """Return the state (B, D) of an encoder that a classifier of whole sequences reads: the pooled
    or mean state, after a transform if there is one."""
    is_mean = g.config.classifier_pooling == "mean"
    state = mean(g, states, mask) if is_mean else pool(g, states)
    if not (act := g.config.classifier_act):
        return state
    inner = row_linear(g, state, "transform.dense")
    return norm(g, activation(g, inner, act, "transform.activation"), "transform.norm")


def token_flags(g: GraphContext, ids: Value, mask: Value) -> Value:
    """Return True for tokens that are not padding, bool (B, S), by the mask and by the padding
    id."""
    is_token = g.op.cast(mask, "bool")
    if g.config.pad_token_id is None:
        return is_token
    return g.op("And", is_token, g.op("Not", g.op("Equal", ids, g.config.pad_token_id)))


def mean(g: GraphContext, states: Value, mask: Value) -> Value:
    """Return the mean of the states (B, S, D) that are not padding, (B, D)."""
    op = g.op
    weights = op.cast(mask, op.dtype.name)
    count = op("ReduceSum", weights, [1], keepdims=1)
    return op("Div", token_sum(g, states, weights), op("Max", count, 1.0))


def token_sum(g: GraphContext, states: Value, weights: Value) -> Value:
    """Return the sum of the states (B, S, D) with the `weights` (B, S), (B, D).

    It is a matmul, because `ReduceSum` adds in one order for one row and in another for several.
    Two equal rows of weights keep it a matrix-matrix product: a matrix-vector product would add in
    a third order.
    """
    op = g.op
    row = op("Unsqueeze", weights, [1])
    return largest(g, op("MatMul", op("Concat", row, row, axis=1), states))


def largest(g: GraphContext, x: Value) -> Value:
    """Return the largest values along the second axis, (B, N, D) -> (B, D)."""
    return widened(g, x, lambda x: g.op("ReduceMax", x, [1], keepdims=0))


def widened(g: GraphContext, x: Value, write: Callable[[Value], Value]) -> Value:
    """Return what `write` returns for x, computed in float32 if the graph computes in bfloat16: for
    operators that onnxruntime lacks in bfloat16."""
    if g.op.dtype.name != "bfloat16":
        return write(x)
    return cast_to_graph_dtype(g, write(cast_to_float32(g, x)))


def last_state(g: GraphContext, states: Value, flags: Value) -> Value:
    """Return the state at the last true flag of each row, or the first state, (B, D); `flags` are
    (B, T)."""
    indices = g.op("Mul", g.op.cast(flags, "int64"), g.op.range(g.op.size(flags, 1)))
    return state_at(g, states, g.target.dialect.last_index(g, indices))


def state_at(g: GraphContext, states: Value, indices: Value) -> Value:
    """Return one of the `states` (B, S, D) of each row, as (B, D): that at the row's index.

    `indices` are (B,).
    """
    return g.op("GatherND", states, g.op("Unsqueeze", indices, [1]), batch_dims=1)


# What follows "For" in the name of the class: the states (B, S, D) and the inputs -> the outputs.
WRITERS: dict[str, Callable[[GraphContext, Value, Values], list[Value]]] = {
    "": model_outputs,
    "MaskedLM": lambda g, states, inputs: [vocabulary_logits(g, states)],
    "SparseEmbedding": sparse_embedding,
    "PreTraining": lambda g, states, inputs: [vocabulary_logits(g, states), is_next(g, states)],
    "NextSentencePrediction": lambda g, states, inputs: [is_next(g, states)],
    "SequenceClassification": sequence_labels,
    "TokenClassification": lambda g, states, inputs: [token_labels(g, states)],
    "QuestionAnswering": answers,
    "ImageClassification": lambda g, states, inputs: [image_labels(g, states)],
}
