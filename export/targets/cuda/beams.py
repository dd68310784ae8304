"""One step of beam search as a graph: what `search.BeamSearch` does after each step, without the
host.

B inputs have K beams. A hypothesis is the slots of its history, `visible` (B, K, slots) before
`first_slot` (B,), and a last token. `tokens` (B, 1, slots, 1) has the token of each slot; new ones
go from `first_slot` on. `length` counts the new tokens. Outputs may lie where inputs were read
from, as in `graphs.step_outputs`.
"""

import numpy as np
from onnx_ir import Value

from ...graphs.context import GraphContext, Values
from ...graphs.ops import Ops
from ...inference.options import EXCLUDED_SCORE


def beam_search(g: GraphContext, inputs: Values) -> list[Value]:
    op, first_slot, length = g.op, inputs["first_slot"], inputs["length"]
    beams = op.size(inputs["scores"], 1)
    candidates, last, histories = best_candidates(op, inputs)
    ends = op("Equal", op("Unsqueeze", last, [-1]), inputs["eos_token_ids"])
    ends = op("Or", op.any(ends, [-1], keepdims=0), op("Equal", length, inputs["max_length"]))

    unfinished = op("Where", ends, op("Add", candidates, EXCLUDED_SCORE), candidates)
    next_scores, kept = op.outputs(2, "TopK", unfinished, beams, axis=-1)
    input_ids = op("GatherElements", last, kept, axis=1)
    ones = op.cast(op("GreaterOrEqual", input_ids, 0), "int64")
    is_new = slots_from(op, inputs, first_slot, ones)
    next_visible = op("Or", gather(op, histories, kept), is_new)
    next_tokens = op(
        "TensorScatter", inputs["tokens"], op("Unsqueeze", input_ids, [1, 3]), first_slot, axis=-2
    )

    finished = finished_hypotheses(op, inputs, candidates, last, histories, ends)
    can_improve = improvable(op, inputs, next_scores, finished)
    # Always 1 more, and written after all that reads `length`.
    first = op("Reshape", op("Slice", can_improve, [0], [1], [0]), [1])
    next_length = op("Add", length, op.cast(op("Or", first, op("Not", first)), "int64"))
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


def finished_hypotheses(
    op: Ops, inputs: Values, candidates: Value, last: Value, histories: Value, ends: Value
) -> list[Value]:
    """Return the K best finished hypotheses of each input, as scores, slots, last tokens and
    lengths.

    Args:
        op: adds the nodes to the graph.
        inputs: the inputs of the graph, with the hypotheses that finished earlier.
        candidates: the scores (B, C) of the continuations.
        last: their last tokens (B, C).
        histories: the slots before these (B, C, slots).
        ends: True (B, C) for continuations that end here.
    """
    beams, length = op.size(inputs["scores"], 1), inputs["length"]
    is_finished = op("And", op("And", ends, inputs["is_best"]), inputs["can_improve"])
    scores = op("Div", candidates, op("Pow", op.cast(length, "float32"), inputs["length_penalty"]))
    scores = op("Where", is_finished, scores, op("Add", scores, EXCLUDED_SCORE))
    scores = op("Concat", inputs["finished_scores"], scores, axis=1)
    finished_scores, indices = op.outputs(2, "TopK", scores, beams, axis=-1)
    visible = gather(op, op("Concat", inputs["finished_visible"], histories, axis=1), indices)
    tokens = op(
        "GatherElements", op("Concat", inputs["finished_tokens"], last, axis=1), indices, axis=1
    )
    lengths = op(
        "Concat",
        inputs["finished_lengths"],
        op("Mul", op.cast(is_finished, "int64"), length),
        axis=1,
    )
    return [finished_scores, visible, tokens, op("GatherElements", lengths, indices, axis=1)]


def improvable(op: Ops, inputs: Values, scores: Value, finished: list[Value]) -> Value:
    """Return flags (B, 1) that are True for inputs whose search goes on.

    An unfinished hypothesis may still beat the worst finished one, and the option `early_stopping`
    does not end the search. An input whose search has ended stays False.

    Args:
        op: adds the nodes to the graph.
        inputs: the inputs of the graph.
        scores: the scores (B, K) of the unfinished hypotheses, best first.
        finished: scores, slots, last tokens and lengths (B, K, ...) of the best finished
            hypotheses.
    """
    penalty = inputs["length_penalty"]
    finished_scores, _, _, finished_lengths = finished
    never_stops = op("And", inputs["never_stops_early"], op("Greater", penalty, np.float32(0)))
    longest = op.cast(op("Where", never_stops, inputs["max_length"], inputs["length"]), "float32")
    possible = op("Div", op.first(scores), op("Pow", longest, penalty))
    worst = op("ReduceMin", finished_scores, [1], keepdims=1)
    worst = op("Where", op("Greater", finished_lengths, 0), worst, EXCLUDED_SCORE)
    is_better = op.any(op("Greater", possible, worst), [1])
    is_full = op("Greater", op("ReduceMin", finished_lengths, [1], keepdims=1), 0)
    continues = op("Not", op("And", inputs["stops_early"], is_full))
    return op("And", op("And", inputs["can_improve"], is_better), continues)


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
