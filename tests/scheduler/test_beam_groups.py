"""Tests of beams of several sequence groups in one search, and of the slots of their caches."""

import numpy as np
import pytest

from vanilla_transformer_export.inference.options import Options
from vanilla_transformer_export.scheduler.beam_groups import (
    assign_slots,
    group_beams,
    joined_beams,
)
from vanilla_transformer_export.scheduler.request import GenerationInput
from vanilla_transformer_export.scheduler.sequence_group import start_request

VOCABULARY = 40


@pytest.mark.parametrize("groups, beams", [(1, 2), (3, 4), (7, 5)])
def test_assign_slots_gives_beams_parent_caches_with_fewest_copies(groups, beams):
    rng = np.random.default_rng(beams)
    slots = rng.permutation(2 * groups * beams)[: groups * beams].reshape(groups, beams)
    parents = rng.integers(0, beams, (groups, beams))
    caches = rng.random(2 * groups * beams)
    expected = np.take_along_axis(caches[slots], parents, axis=1)
    assigned, copies = assign_slots(slots, parents)
    for source, target in copies:
        caches[target] = caches[source]
    np.testing.assert_array_equal(caches[assigned], expected)
    assert np.array_equal(np.sort(assigned, axis=1), np.sort(slots, axis=1))
    assert len(copies) == sum(beams - len(set(row)) for row in parents.tolist())


def start_groups(count, **options):
    """Return sequence groups with one slot each, and their request."""
    options = Options(num_beams=3, eos_token_id=2, **options)
    request = start_request(
        [GenerationInput(options, [1], [5])] * count, lambda events, is_finished: None
    )
    for slot, group in enumerate(request.parts):
        group.slots = [slot]
    return request.parts, request


def top_tokens(rows, seed=0):
    rng = np.random.default_rng(seed)
    log_p = np.sort(rng.random((rows, 6)).astype(np.float32), axis=1)[:, ::-1] - 2
    return log_p, np.argsort(rng.random((rows, VOCABULARY)), axis=1)[:, 3:9]


def test_only_groups_with_equal_options_share_a_search():
    groups = [start_groups(2)[0], start_groups(1, length_penalty=2.0)[0], start_groups(1)[0]]
    searches = group_beams([group for some in groups for group in some])
    assert [len(beams.groups) for beams in searches] == [3, 1]
    again = joined_beams([*searches, *group_beams(start_groups(2)[0])])
    assert [len(beams.groups) for beams in again] == [5, 1]


def test_group_with_nan_logits_does_not_affect_other_groups():
    groups, request = start_groups(2)
    _, other = start_groups(1)
    groups[1].request = other
    [beams] = group_beams(groups)
    log_p, tokens = top_tokens(2)
    log_p[1] = np.nan
    beams.advance(log_p, tokens)
    assert beams.groups == [groups[0]]
    assert groups[1].is_finished and str(other.error) == (
        "some logits are NaN or infinite, expected numbers"
    )
    assert request.error is None and len(groups[0].next_tokens) == 3


def test_groups_that_join_later_have_same_results_as_alone():
    """Groups join and leave one search, and get the tokens of a separate search."""

    def run(first, second):
        results, beams = {}, None
        for step in range(9):
            for name, count in first if step == 0 else second if step == 3 else []:
                groups, _ = start_groups(count, max_new_tokens=5)
                [new] = group_beams(groups)
                results[name] = groups
                new.advance(*(values[: len(groups)] for values in top_tokens(8, seed=0)))
                for group in groups:
                    group.is_expanded = True
                    group.slots = [3 * group.slots[0] + beam for beam in range(3)]
                beams = new if beams is None else joined_beams([beams, new])[0]
            if beams is not None and beams.groups:
                beams.advance(*top_tokens(30, seed=7))
        return {
            name: [[hypothesis.tokens for hypothesis in group.results] for group in groups]
            for name, groups in results.items()
        }

    together = run([("a", 2)], [("b", 3)])
    assert together["a"] == run([("a", 2)], [])["a"]
    assert together["b"] == run([("b", 3)], [])["b"]
    assert all(group[0] for group in together["a"] + together["b"])
