"""Beam search of several sequence groups at once."""

from collections.abc import Sequence

import numpy as np

from ..inference.options import Options
from ..inference.search import BeamSearch
from ..inference.top_k import NOT_FINITE
from .sequence_group import SequenceGroup

NO_COPIES = np.empty((0, 2), np.int64)


class BeamGroups:
    """Sequence groups with equal `options`, whose beams one search advances together.

    Groups join with their first new tokens, and leave when they are finished. The slots of a group
    are in the order of its beams, best first.
    """

    def __init__(self, options: Options, groups: list[SequenceGroup]):
        self.options = options
        self.groups = groups
        self.search = BeamSearch(len(groups), options)

    def add(self, others: "BeamGroups") -> None:
        self.groups += others.groups
        self.search.add(others.search)

    def remove(self, groups: Sequence[SequenceGroup]) -> None:
        self.search = self.search.take(np.array([group not in groups for group in self.groups]))
        self.groups = [group for group in self.groups if group not in groups]

    def advance(self, log_p: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Select the next tokens of all groups, and let finished groups leave.

        Groups with logits that are not finite fail and leave. A group in its first step has one
        slot; the caller adds slots for its other beams.

        Args:
            log_p: log p of the best tokens of each slot, (slots, n).
            tokens: their ids, (slots, n).

        Returns:
            Pairs of slots (copies, 2): the caches of the first must be copied to the second.
        """
        self.remove_invalid(log_p)
        if not self.groups:
            return NO_COPIES
        slots = np.array([group.slots for group in self.groups])
        rows = slots.ravel()
        tokens, parents = self.search.advance_top(log_p[rows], tokens[rows])
        copies = NO_COPIES
        if slots.shape[1] > 1:  # in its first step a group has one slot
            slots, copies = assign_slots(slots, parents)
        for group, beam_tokens, beam_slots in zip(self.groups, tokens.tolist(), slots.tolist()):
            group.has_started = True
            group.next_tokens = beam_tokens
            group.slots = beam_slots
        self.finish()
        return copies

    def remove_invalid(self, log_p: np.ndarray) -> None:
        """Let groups fail and leave whose `log_p` (slots, n) have NaN, as those of logits that are
        not finite."""
        if not np.isnan(log_p).any():
            return
        invalid = [group for group in self.groups if np.isnan(log_p[group.slots]).any()]
        for group in invalid:
            group.fail(ValueError(NOT_FINITE))
        self.remove(invalid)

    def finish(self) -> None:
        """Store the results of finished groups and remove these."""
        is_finished = self.search.is_finished
        if not is_finished.any():
            return
        finished = [group for group, is_done in zip(self.groups, is_finished) if is_done]
        tokens, scores = self.search.take(is_finished).result()
        parts = (np.split(values, len(finished)) for values in (tokens, scores))
        for group, *results in zip(finished, *parts):
            group.finish(group.make_results(*results))
        self.remove(finished)


def assign_slots(slots: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots of the next beams, and the copies of caches that they need.

    The first beam that continues a parent keeps its slot, so that nothing is copied. Each further
    one gets the slot of a beam that none continues.

    Args:
        slots: those of the beams, (groups, K).
        parents: the beams that the next ones continue, (groups, K), as indices from 0 to K - 1
            within the group.

    Returns:
        The slots of the next beams (groups, K), and pairs of slots to copy from and to (copies, 2).
    """
    repeats = np.tril(parents[:, :, None] == parents[:, None, :], -1).any(axis=2)
    continues = np.zeros_like(repeats)
    np.put_along_axis(continues, parents, True, axis=1)
    assigned = np.take_along_axis(slots, parents, axis=1)
    copies = np.stack([assigned[repeats], slots[~continues]], axis=1)
    assigned[repeats] = copies[:, 1]
    return assigned, copies


def group_beams(groups: Sequence[SequenceGroup]) -> list[BeamGroups]:
    """Return new searches of `groups`, one for all that have equal options."""
    distinct: list[Options] = []
    for group in groups:
        if group.options not in distinct:
            distinct.append(group.options)
    return [
        BeamGroups(options, [group for group in groups if group.options == options])
        for options in distinct
    ]


def joined_beams(searches: Sequence[BeamGroups]) -> list[BeamGroups]:
    """Return `searches` without empty ones. The first of those with equal options takes the groups
    of the others."""
    joined: list[BeamGroups] = []
    for beams in searches:
        same = [other for other in joined if other.options == beams.options]
        if same:
            same[0].add(beams)
        elif beams.groups:
            joined.append(beams)
    return joined
