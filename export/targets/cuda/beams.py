"""One step of beam search as a graph: what `search.BeamSearch` does after each step, without the
host.

B inputs have K beams. A hypothesis is the slots of its history, `visible` (B, K, slots) before
`first_slot` (B,), and a last token. `tokens` (B, 1, slots, 1) has the token of each slot; new ones
go from `first_slot` on. `length` counts the new tokens. Outputs may lie where inputs were read
from, as in `graphs.step_outputs`.
"""

from onnx_ir import Value

from ...graphs.beams import BeamRules, finished_beams, improvable, running_beams
from ...graphs.context import GraphContext, Values
from ...graphs.ops import Ops


def beam_search(g: GraphContext, inputs: Values) -> list[Value]:
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
