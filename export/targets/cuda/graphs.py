"""The cuda target's graphs: onnxruntime's own operators, with caches that stay on the device.

Shapes never change from one step to the next, so that a step can be replayed as a CUDA graph.
"""

from onnx_ir import Value

from ...graphs.alignment import cross_attentions
from ...graphs.attention import (
    by_layer_type,
    fused_product,
    key_value_heads,
    slot_attention,
    source_attention,
    source_states,
)
from ...graphs.beams import BeamRules, finished_beams, improvable, running_beams
from ...graphs.context import (
    Attention,
    Caches,
    Dialect,
    GraphContext,
    TargetGraphs,
    Values,
    flat,
)
from ...graphs.encoder_attention import fused_attention
from ...graphs.layers import (
    STANDARD,
    decoder_states,
    fused_rms_norm,
    has_output_norm,
    linear,
    logits,
)
from ...graphs.ops import CONTRIB, Ops
from ...graphs.positions import (
    cast_to_float32,
    cast_to_graph_dtype,
    key_flags,
    mask_scores,
    position_bias,
    rotary_factors,
)
from ...graphs.precisions import FLOAT, WEIGHT_ONLY, columns
from ...graphs.sequences import encoder_states, sequence_outputs

# added to the scores of slots that are not read: half of what float16 holds, so no sum overflows
MASK_VALUE = -30000.0
# of tokens: attention with a mask is fused for multiples of 4 only
TOKEN_MULTIPLE = 8
# with more, the provider's `Split` copies sizes from the host, which cannot be replayed
MAX_SPLIT_OUTPUTS = 32
FUSED_GELUS = {
    "gelu": "BiasGelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "FastGelu"),
}


def packed_linears(g: GraphContext, x: Value, *names: str) -> list[Value]:
    """Apply the linear maps `names` to `x` and return their results in this order.

    Maps with the same number of outputs are written as one map, whose result is split.
    """
    by_width: dict[int, list[str]] = {}
    for name in names:
        by_width.setdefault(columns(g, [name]), []).append(name)
    parts = [
        group[start : start + MAX_SPLIT_OUTPUTS]
        for group in by_width.values()
        for start in range(0, len(group), MAX_SPLIT_OUTPUTS)
    ]
    results = {name: value for part in parts for name, value in zip(part, split_linear(g, x, part))}
    return [results[name] for name in names]


def split_linear(g: GraphContext, x: Value, names: list[str]) -> list[Value]:
    if len(names) == 1:
        return [linear(g, x, *names)]
    return g.op.outputs(len(names), "Split", linear(g, x, *names), axis=-1, num_outputs=len(names))


def fused_add_and_norm(
    g: GraphContext, x: Value, inner: Value, last: str, after: str | None
) -> tuple[Value, Value]:
    """Return `x` plus the linear map `last` of `inner`, and that sum normed, with one operator.

    If `after`, the name of the norm, is `None`, or if the map has a norm of its own, return what
    `STANDARD.add_and_norm` does.
    """
    if after is None or has_output_norm(g, last):
        return STANDARD.add_and_norm(g, x, inner, last, after)
    product = g.target.precision.matmul(g, inner, [last], None)
    is_rms = g.config.norm_type == "rms_norm"
    shift = [] if is_rms else [g.weight(f"{after}.bias")]
    operands = [product, x, g.weight(f"{after}.weight"), *shift, g.bias(last)]
    op_type = "SkipSimplifiedLayerNormalization" if is_rms else "SkipLayerNormalization"
    normed, *statistics, total = g.op.outputs(
        4, op_type, *operands, domain=CONTRIB, epsilon=g.config.layer_norm_eps
    )
    for value in statistics:
        value.name = ""  # not computed
    return total, normed


def fused_activated_linear(g: GraphContext, x: Value, name: str, act: str) -> Value:
    """Return the linear map `name` of `x` with the activation `act`, bias and GELU in one operator.

    Other activations, and maps without a bias, are written with standard operators.
    """
    bias = g.bias(name)
    if act not in FUSED_GELUS or bias is None:
        return STANDARD.activated_linear(g, x, name, act)
    return g.contrib(FUSED_GELUS[act], g.target.precision.matmul(g, x, [name], None), bias)


def fused_rotate(g: GraphContext, states: Value, heads: int, positions: Value, kind: str) -> Value:
    """Return queries or keys `states` (B, T, H * d), rotated by their `positions` (rotary
    embeddings), with one operator. `kind` is the type of the layer."""
    factors = g.op.once(
        ("rotary", positions, kind),
        lambda: rotary_factors(g, repeated(g, positions, states), kind),
    )
    return g.op("RotaryEmbedding", states, *factors, num_heads=heads, interleaved=1)


def repeated(g: GraphContext, positions: Value, states: Value) -> Value:
    """Return `positions` for each row of `states`: those that the graph computes itself may be of
    one row, (1, T)."""
    if positions.producer() is None:
        return positions
    return g.op("Expand", positions, g.op("Shape", states, end=2))


def last_index(g: GraphContext, indices: Value) -> Value:
    """Return the largest number in each row of `indices` (B, T), as (B,).

    `indices` has i at position i, or 0, so this is the position of the last that is not 0. `ArgMax`
    would do the same, but the CUDA provider lacks it for int64.
    """
    return g.op("ReduceMax", indices, [1], keepdims=0)


DIALECT = Dialect(
    fused_rms_norm,
    packed_linears,
    fused_activated_linear,
    fused_add_and_norm,
    fused_rotate,
    last_index,
    MASK_VALUE,
    TOKEN_MULTIPLE,
)


def sequence(g: GraphContext, inputs: Values) -> list[Value]:
    if "pixel_values" in inputs:
        inputs = {"pixel_values": cast_to_graph_dtype(g, inputs["pixel_values"])}
    return [cast_to_float32(g, value) for value in sequence_outputs(g, inputs)]


def encoder(g: GraphContext, inputs: Values) -> list[Value]:
    """Write the encoder of a seq2seq model, and the keys and values that its decoder reads."""
    return flat(source_states(g, encoder_states(g, inputs)))


def decoder(g: GraphContext, inputs: Values) -> list[Value]:
    """Write a decoder with preallocated caches, and return its outputs.

    They are the logits, the inputs of the next step, and the key and value of each layer. A slot is
    one position of these caches.
    """
    caches = Caches(inputs)

    def write(kind: str) -> Attention:
        return slot_attention(
            g, inputs, slot_bias(g, inputs["visible"], g.config.window(kind)), caches
        )

    attentions = [by_layer_type(g, g.config.decoder_prefix, write)]
    if g.config.is_seq2seq:
        source = Caches(inputs, is_source=True).past
        attentions.append(source_attention(g, source, source_rows(g, inputs), fused_product))
    states = decoder_states(g, inputs["input_ids"], inputs["position_ids"], *attentions)
    return [*step_outputs(g, inputs, states), *flat(caches.present)]


def alignment(g: GraphContext, inputs: Values) -> list[Value]:
    """Write the alignment graph and return its output (B, heads, T, S) in a list. Its attention has
    standard operators, because it returns the weights."""
    source = Caches(inputs, is_source=True).past
    states = [key_value_heads(g, *pair) for pair in source]
    return cross_attentions(g, inputs, states)


def slot_bias(g: GraphContext, visible: Value, window: int | None) -> Value:
    """Return the bias (B, 1 or H, T, slots) that is added to attention scores.

    It hides slots that are not `visible` (B, T, slots), and all but the last `window` of those that
    are. With relative positions, it has their bias too. Visible slots are in the order of the text.
    """
    op, config = g.op, g.config
    is_read = op("Unsqueeze", visible, [1])
    if window is None and not config.has_relative_positions:
        return mask_scores(g, is_read)
    later = op.once(
        ("later slots", visible),
        lambda: op("CumSum", op.cast(visible, "int64"), -1, reverse=1, exclusive=1),
    )
    if window is not None:
        is_read = op("And", is_read, op("Unsqueeze", op("Less", later, window), [1]))
    if not config.has_relative_positions:
        return mask_scores(g, is_read)
    return op("Where", is_read, position_bias(g, op("Neg", later), is_causal=True), MASK_VALUE)


def source_rows(g: GraphContext, inputs: Values) -> Value:
    """Return the bias (B, 1, T, S) that hides padding of the source, with a row for each of T
    tokens. No shape is read."""
    is_token = g.op("GreaterOrEqual", inputs["input_ids"], 0)
    flags = key_flags(g, inputs["encoder_attention_mask"])
    return mask_scores(g, g.op("And", flags, g.op("Unsqueeze", is_token, [1, 3])))


def step_outputs(g: GraphContext, inputs: Values, states: Value) -> list[Value]:
    """Return the logits of the tokens at `logit_indices`, and the inputs of the next step.

    Returns:
        The logits, then `input_ids` (the most likely tokens), `position_ids`, `first_slot`,
            `visible` and `tokens` of a step that continues with these tokens. An output may use the
            memory of an input: it is written after all reading.
    """
    op, first_slot, logit_indices = g.op, inputs["first_slot"], inputs["logit_indices"]
    computed = cast_to_float32(g, logits(g, gather(op, states, logit_indices)))
    best = op("ArgMax", computed, axis=-1, keepdims=0)
    ones = op.cast(op("GreaterOrEqual", best, 0), "int64")
    last = op("Sub", op("Add", first_slot, inputs["count"]), 1)
    slot = op("Add", last, op("Gather", ones, 0, axis=1))
    is_new = slots_from(op, inputs, slot, ones)
    positions = op("Add", gather(op, inputs["position_ids"], logit_indices), ones)
    visible = op("Or", gather(op, inputs["visible"], logit_indices), is_new)
    tokens = op("TensorScatter", inputs["tokens"], op("Unsqueeze", best, [1, 3]), slot, axis=-2)
    return [computed, best, positions, slot, visible, tokens]


# -------------------------------------------------------------------------------------- beam search


def beam_search(g: GraphContext, inputs: Values) -> list[Value]:
    """Write one step of beam search: what `search.BeamSearch` does after each step, without the
    host.

    B inputs have K beams. A hypothesis is the slots of its history, `visible` (B, K, slots) before
    `first_slot` (B,), and a last token. `tokens` (B, 1, slots, 1) has the token of each slot; new
    ones go from `first_slot` on. `length` counts the new tokens. Outputs may lie where inputs were
    read from, as in `step_outputs`.
    """
    op, first_slot, length = g.op, inputs["first_slot"], inputs["length"]
    rules = BeamRules(
        op.size(inputs["scores"], 1),
        *(inputs[name] for name in ("max_length", "length_penalty")),
        *(inputs[name] for name in ("stops_early", "never_stops_early")),
    )
    candidates, last, histories = best_candidates(op, inputs)
    ends = op("Equal", op("Unsqueeze", last, [-1]), inputs["eos_token_ids"])
    ends = op("Or", op.any(ends, [-1], keepdims=0), op("Equal", length, inputs["max_length"]))

    next_scores, kept = running_beams(op, rules, candidates, ends)
    input_ids = op("GatherElements", last, kept, axis=1)
    ones = op.cast(op("GreaterOrEqual", input_ids, 0), "int64")
    is_new = slots_from(op, inputs, first_slot, ones)
    next_visible = op("Or", gather(op, histories, kept), is_new)
    next_tokens = op(
        "TensorScatter", inputs["tokens"], op("Unsqueeze", input_ids, [1, 3]), first_slot, axis=-2
    )

    can_improve = inputs["can_improve"]
    just_ended = op("And", op("And", ends, inputs["is_best"]), can_improve)
    earlier = inputs["finished_scores"], inputs["finished_lengths"]
    scores, lengths, best = finished_beams(op, rules, earlier, candidates, just_ended, length)
    visible = gather(op, op("Concat", inputs["finished_visible"], histories, axis=1), best)
    tokens = op("Concat", inputs["finished_tokens"], last, axis=1)
    tokens = op("GatherElements", tokens, best, axis=1)
    goes_on = improvable(op, rules, next_scores, (scores, lengths), length)
    can_improve = op("And", can_improve, goes_on)
    # Always 1 more, and written after all that reads `length`.
    first = op("Reshape", op("Slice", can_improve, [0], [1], [0]), [1])
    next_length = op("Add", length, op.cast(op("Or", first, op("Not", first)), "int64"))
    finished = [scores, visible, tokens, lengths]
    return [input_ids, next_scores, next_visible, next_tokens, *finished, can_improve, next_length]


def best_candidates(op: Ops, inputs: Values) -> tuple[Value, Value, Value]:
    """Return the best continuations of the beams of each input.

    Returns:
        Their scores (B, C), their last tokens (B, C) and the slots before these (B, C, slots). C is
            twice the number of beams or more.
    """
    count = op("Shape", inputs["is_best"])
    log_p, best = op.outputs(2, "TopK", op("LogSoftmax", inputs["logits"], axis=-1), count, axis=-1)
    sums = op("Add", log_p, op("Unsqueeze", inputs["scores"], [-1]))
    candidates, indices = op.outputs(2, "TopK", op("Reshape", sums, [0, -1]), count, axis=-1)
    last = op("GatherElements", op("Reshape", best, [0, -1]), indices, axis=1)
    is_history = op("Less", inputs["slot_numbers"], op("Unsqueeze", inputs["first_slot"], [1, 2]))
    return (
        candidates,
        last,
        gather(op, op("And", inputs["visible"], is_history), op("Div", indices, count)),
    )


def slots_from(op: Ops, inputs: Values, first: Value, ones: Value) -> Value:
    """Return flags (B, T, slots) that are True at the slot of each of T tokens.

    Args:
        op: adds the nodes to the graph.
        inputs: the inputs of the graph, of which `slot_numbers` is read.
        first: the slot of the first token of each row (B,). The others follow it.
        ones: ones (B, T), whose sums count the tokens.
    """
    slots = op("Sub", op("Add", op("Unsqueeze", first, [1]), op("CumSum", ones, 1)), 1)
    return op("Equal", inputs["slot_numbers"], op("Unsqueeze", slots, [-1]))


def gather(op: Ops, states: Value, indices: Value) -> Value:
    """Return entries of `states` (B, T, ...): in each row those at `indices` (B, N), as (B, N,
    ...)."""
    return op("GatherND", states, op("Unsqueeze", indices, [-1]), batch_dims=1)


WRITE = {
    "sequence": sequence,
    "decoder": decoder,
    "beams": beam_search,
    "seq2seq encoder": encoder,
    "seq2seq decoder": decoder,
    "seq2seq beams": beam_search,
    "seq2seq alignment": alignment,
}
FLOATS = ("fp32", "fp16", "bf16")
PRECISIONS = {
    **dict.fromkeys(FLOATS, FLOAT),
    "int8": WEIGHT_ONLY[8],
    "int4": WEIGHT_ONLY[4],
}


def target_graphs(dtype: str) -> TargetGraphs:
    return TargetGraphs(DIALECT, PRECISIONS[dtype], fused_attention, WRITE)
