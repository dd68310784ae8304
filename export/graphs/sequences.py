"""Graphs of models that read whole sequences: encoders with their heads, and models with a decoder.

Encoders have the attention of the target. Models with a decoder have standard operators on every target.
"""

from collections.abc import Callable

import numpy as np
from onnx_ir import Value

from ..targets.sequences import READS_CHOICES
from .activations import activation
from .attention import encoder_attention, self_attention, source_attention, source_heads
from .context import GraphContext, Values
from .images import image_outputs
from .layers import Attention, embed, linear, logits, norm, projected, row_linear, stack
from .positions import causal_bias, key_flags, masked, offsets, padded_positions, token_positions

# Graph, prefix of the stack, ids, positions and mask; images have none of the last three.
EncoderAttention = Callable[[GraphContext, str, Value | None, Value | None, Value | None], Attention]


def sequence_outputs(g: GraphContext, inputs: Values, attention: EncoderAttention) -> list[Value]:
    """Return the outputs of the model's head, in the order of its spec."""
    if g.config.model_type == "vanilla-vision":
        return image_outputs(g, inputs["pixel_values"], attention(g, "", None, None, None))
    if g.config.model_type == "vanilla-encoder":
        return encoder_outputs(g, inputs, attention)
    return seq2seq_outputs(g, inputs) if g.config.is_seq2seq else decoder_outputs(g, inputs)


# -------------------------------------------------------------------------------------------------------------- encoders


def encoder_states(g: GraphContext, prefix: str, depth: int, inputs: Values, attention: EncoderAttention) -> Value:
    """Write an encoder of tokens: (B, S) -> (B, S, D)."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = token_positions(g, ids, mask)
    x = embed(g, prefix, ids, positions, inputs.get("token_type_ids"))
    return stack(g, prefix, depth, x, {"self_attn": attention(g, prefix, ids, positions, mask)})


def encoder_outputs(g: GraphContext, inputs: Values, attention: EncoderAttention) -> list[Value]:
    if g.config.architecture != READS_CHOICES:
        states = encoder_states(g, g.config.prefix, g.config.num_hidden_layers, inputs, attention)
        return HEADS[g.config.architecture.removeprefix("VanillaEncoder")](g, states, inputs["attention_mask"])
    op = g.op
    rows_and_choices = op("Shape", inputs["input_ids"], end=2)
    rows = {name: op("Reshape", value, op.shape(-1, op("Shape", value, start=2))) for name, value in inputs.items()}
    states = encoder_states(g, g.config.prefix, g.config.num_hidden_layers, rows, attention)
    return [op("Reshape", row_linear(g, pooled(g, states), "choice_classifier"), rows_and_choices)]


def pooled(g: GraphContext, states: Value) -> Value:
    """Return the state of the first token, (B, D), after the pooler if there is one (Devlin et al. 2019)."""
    first = g.op("Gather", states, 0, axis=1)
    if not g.config.pooler_act:
        return first
    name = f"{g.config.prefix}pooler"
    return activation(g, row_linear(g, first, f"{name}.dense"), g.config.pooler_act, f"{name}.activation")


def vocabulary_logits(g: GraphContext, states: Value) -> Value:
    """Return the logits of masked tokens, after BERT's transform or a projection to the width of embeddings."""
    if not (act := g.config.lm_transform_act):
        return logits(g, projected(g, states, "transform"))
    inner = g.target.dialect.activated_linear(g, states, "transform.dense", act)
    return logits(g, norm(g, inner, "transform.norm"))


def token_labels(g: GraphContext, states: Value) -> Value:
    """Return the logits of each token's labels, after ELECTRA's transform if there is one."""
    if act := getattr(g.config, "token_transform_act", None):
        states = activation(g, linear(g, states, "transform.0"), act, "transform.1")
    return linear(g, states, "classifier")


def sequence_labels(g: GraphContext, states: Value, mask: Value) -> Value:
    is_mean = g.config.classifier_pooling == "mean"
    return row_linear(g, mean(g, states, mask) if is_mean else pooled(g, states), "classifier")


def mean(g: GraphContext, states: Value, mask: Value) -> Value:
    """Return the mean of the states (B, S, D) that are not padding, (B, D).

    It is a product of matrices: `ReduceSum` adds in one order for one row and in another for several. Two equal rows of weights
    keep the product from becoming one with a vector, which has another order again.
    """
    op = g.op
    weights = op("Unsqueeze", op.cast(mask, op.dtype.name), [1])
    sums = op("ReduceMax", op("MatMul", op("Concat", weights, weights, axis=1), states), [1], keepdims=0)
    count = op("ReduceSum", op("Squeeze", weights, [1]), [1], keepdims=1)
    return op("Div", sums, op("Max", count, 1.0))


def answers(g: GraphContext, states: Value) -> list[Value]:
    """Return the scores of each token as the start and as the end of the answer, (B, S) each."""
    scores = linear(g, states, "qa_outputs")
    return [g.op("Gather", scores, end, axis=2) for end in range(2)]


# By the name of the class after "VanillaEncoder": the states (B, S, D) and the mask -> the outputs.
HEADS: dict[str, Callable[[GraphContext, Value, Value], list[Value]]] = {
    "Model": lambda g, states, mask: [states, pooled(g, states)] if g.config.pooler_act else [states],
    "ForMaskedLM": lambda g, states, mask: [vocabulary_logits(g, states)],
    "ForPreTraining": lambda g, states, mask: [
        vocabulary_logits(g, states),
        row_linear(g, pooled(g, states), "next_sentence"),
    ],
    "ForNextSentencePrediction": lambda g, states, mask: [row_linear(g, pooled(g, states), "next_sentence")],
    "ForSequenceClassification": lambda g, states, mask: [sequence_labels(g, states, mask)],
    "ForTokenClassification": lambda g, states, mask: [token_labels(g, states)],
    "ForQuestionAnswering": lambda g, states, mask: answers(g, states),
}


# ------------------------------------------------------------------------------------------------- models with a decoder


def decoder_outputs(g: GraphContext, inputs: Values) -> list[Value]:
    op, config = g.op, g.config
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = padded_positions(g, ids, mask)
    bias = causal_bias(g, config.prefix, offsets(g, ids), mask)
    attentions = {"self_attn": self_attention(g, positions, bias)}
    states = stack(g, config.prefix, config.num_hidden_layers, embed(g, config.prefix, ids, positions), attentions)
    kind = config.architecture.removeprefix("VanillaDecoder")
    if kind == "Model":
        return [states]
    if kind == "ForTokenClassification":
        return [token_labels(g, states)]
    if kind == "ForQuestionAnswering":
        return answers(g, states)
    is_token = op.cast(mask, "bool")
    if config.pad_token_id is not None:
        is_token = op("And", is_token, op("Not", op("Equal", ids, config.pad_token_id)))
    return [linear(g, last_state(g, states, is_token), "score")]


def last_state(g: GraphContext, states: Value, flags: Value) -> Value:
    """Return the state at the last true flag of each row, or the first state, (B, D); `flags` are (B, T)."""
    op = g.op
    indices = op("Mul", op.cast(flags, "int64"), op.range(op.size(flags, 1)))
    return state_at(g, states, g.target.dialect.last_index(g, indices))


def state_at(g: GraphContext, states: Value, indices: Value) -> Value:
    """Return one state of each row, (B, D); `indices` are (B,)."""
    return g.op("GatherND", states, g.op("Unsqueeze", indices, [1]), batch_dims=1)


def seq2seq_outputs(g: GraphContext, inputs: Values) -> list[Value]:
    config, prefix = g.config, g.config.prefix
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    source = encoder_states(g, f"{prefix}encoder.", config.encoder_layers, inputs, encoder_attention)
    targets, target_mask = inputs.get("decoder_input_ids"), inputs.get("decoder_attention_mask")
    if targets is None or target_mask is None:
        targets = shifted_right(g, ids)
        positions = token_positions(g, targets, None)
    else:
        positions = padded_positions(g, targets, target_mask)
    name = f"{prefix}decoder."
    attentions = {
        "self_attn": self_attention(g, positions, causal_bias(g, name, offsets(g, targets), target_mask)),
        "cross_attn": source_attention(g, source_heads(g, name, source), masked(g, key_flags(g, mask))),
    }
    states = stack(g, name, config.decoder_layers, embed(g, name, targets, positions), attentions)
    return seq2seq_head(g, states, source, inputs)


def seq2seq_head(g: GraphContext, states: Value, source: Value, inputs: Values) -> list[Value]:
    op, config = g.op, g.config
    kind = config.architecture.removeprefix("VanillaSeq2Seq")
    if kind == "Model":
        return [states, source]
    if kind == "ForQuestionAnswering":
        return answers(g, states)
    end_tokens = np.atleast_1d(np.array(config.eos_token_id, np.int64))
    is_end = op.any(op("Equal", op("Unsqueeze", inputs["input_ids"], [-1]), end_tokens), [-1], keepdims=0)
    last = last_state(g, states, op("And", is_end, op.cast(inputs["attention_mask"], "bool")))
    return [row_linear(g, op("Tanh", row_linear(g, last, "dense")), "classifier")]


def shifted_right(g: GraphContext, ids: Value) -> Value:
    """Return `ids` (B, T) moved right by one, after the token that a decoder starts from."""
    op, config = g.op, g.config
    if config.wrap_last_token:
        is_token = op.cast(op("Not", op("Equal", ids, config.pad_token_id)), "int64")
        count = op("ReduceSum", is_token, [1], keepdims=1)
        start = op("GatherElements", ids, op("Max", op("Sub", count, 1), 0), axis=1)
    else:
        start = op("Expand", np.array([[config.decoder_start_token_id]]), op.shape(op.size(ids, 0), 1))
    return op("Concat", start, op("Slice", ids, [0], [-1], [1]), axis=1)
