"""One step of beam search as a graph, for devices: what `search.BeamSearch` does after each step, without the host."""

import torch
from torch import nn

from ...runtime.options import EXCLUDED_SCORE as EXCLUDED_SCORE_FLOAT32
from ..operators import gather, scatter

EXCLUDED_SCORE = EXCLUDED_SCORE_FLOAT32.item()


class BeamSearchGraph(nn.Module):
    """The logits after each beam, and the state of the search, in; the beams' next tokens and the next state out.

    A hypothesis is the slots of its history, `visible` (B, K, slots) before `first_slot` (B,), and a last token. `tokens`
    (B, 1, slots, 1) has the token of each slot; those of the new ones go from `first_slot` on. `length` counts the new tokens.
    As in `cuda.SlotStepGraph`, what is returned may lie where it was read from.
    """

    def forward(
        self,
        logits,
        first_slot,
        slot_numbers,
        is_best,
        eos_token_ids,
        max_length,
        length_penalty,
        stops_early,
        never_stops_early,
        scores,
        visible,
        tokens,
        finished_scores,
        finished_visible,
        finished_tokens,
        finished_lengths,
        can_improve,
        length,
    ):
        beams = scores.shape[1]
        count = is_best.shape[0]
        log_p, best = logits.log_softmax(dim=-1).topk(count)
        candidates, chosen = (log_p + scores[..., None]).flatten(1).topk(count)
        last = best.flatten(1).gather(1, chosen)
        histories = gather(visible & (slot_numbers < first_slot[:, None, None]), chosen // count)
        ends = (last[..., None] == eos_token_ids).any(dim=-1) | (length == max_length)

        # The best that go on.
        next_scores, kept = torch.where(ends, candidates + EXCLUDED_SCORE, candidates).topk(beams)
        input_ids = last.gather(1, kept)
        slots = first_slot[:, None] + (input_ids >= 0).long().cumsum(dim=1) - 1
        next_visible = gather(histories, kept) | (slot_numbers == slots[..., None])
        next_tokens = scatter(tokens, input_ids[:, None, :, None], first_slot)

        # Those of the best that end here compete with the hypotheses that ended before.
        just_finished = ends & is_best & can_improve
        ended = candidates / length.float().pow(length_penalty)
        ended = torch.where(just_finished, ended, ended + EXCLUDED_SCORE)
        next_finished_scores, places = torch.cat([finished_scores, ended], dim=1).topk(beams)
        next_finished_visible = gather(torch.cat([finished_visible, histories], dim=1), places)
        next_finished_tokens = torch.cat([finished_tokens, last], dim=1).gather(1, places)
        next_finished_lengths = torch.cat([finished_lengths, just_finished * length], dim=1).gather(1, places)

        # Whether the best running hypothesis may still beat the worst finished one.
        longest = torch.where(never_stops_early & (length_penalty > 0), max_length, length)
        possible = next_scores[:, :1] / longest.float().pow(length_penalty)
        worst = next_finished_scores.min(dim=1, keepdim=True).values
        worst = torch.where(next_finished_lengths > 0, worst, EXCLUDED_SCORE)
        is_full = next_finished_lengths.min(dim=1, keepdim=True).values > 0
        next_can_improve = can_improve & (possible > worst).any(dim=1, keepdim=True) & ~(stops_early & is_full)
        next_length = length + (next_can_improve[:1, 0].long() >= 0).long()  # always 1, and after all that reads `length`
        return (
            input_ids,
            next_scores,
            next_visible,
            next_tokens,
            next_finished_scores,
            next_finished_visible,
            next_finished_tokens,
            next_finished_lengths,
            next_can_improve,
            next_length,
        )
