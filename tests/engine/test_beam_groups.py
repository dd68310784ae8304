"""Tests of searches that groups join and leave, and of the slots of their beams."""

import numpy as np
import pytest
from opened_engines import first_batch, open_client

from vanilla_transformer_export import Options
from vanilla_transformer_export.engine.search import BeamSearch, keep

VOCABULARY, BEAMS, STEPS = 40, 3, 5


@pytest.mark.parametrize("groups, beams", [(1, 2), (3, 4), (7, 5)])
def test_select_gives_rows_the_caches_of_their_parents_with_fewest_copies(
    exported_for, groups, beams, monkeypatch
):
    client = open_client(exported_for("causal", "cpu")[1], slots=groups * beams)
    rows, rng, count = first_batch(client).joining, np.random.default_rng(beams), groups * beams
    rows.add(None, np.arange(count))
    rows.lengths[:] = 1
    copies, copy = [], rows.copy

    def note_and_copy(sources, targets):
        copies.extend(sources)
        copy(sources, targets)

    monkeypatch.setattr(rows, "copy", note_and_copy)
    for _ in range(4):
        values = rng.random(len(rows.lengths)).astype(np.float32)
        rows.caches[...] = values[:, None, None, None]
        expected = values[rows.places]
        parents = np.repeat(np.arange(groups), beams) * beams + rng.integers(0, beams, count)
        copies.clear()
        rows.select(parents)
        assert (rows.caches[0, rows.places, 0, 0, 0] == expected[parents]).all()
        assert sorted(rows.places) == list(range(count))
        assert len(copies) == count - len(set(parents))


def start_search(groups):
    return BeamSearch(groups, Options(num_beams=BEAMS, eos_token_id=2, max_new_tokens=STEPS))


def top_tokens(rows, seed):
    """Return log p and numbers of the best tokens, both (rows, 2 * BEAMS), without end tokens."""
    rng = np.random.default_rng(seed)
    log_p = np.sort(rng.random((rows, 2 * BEAMS)).astype(np.float32), axis=1)[:, ::-1] - 2
    return log_p, np.argsort(rng.random((rows, VOCABULARY - 3)), axis=1)[:, : 2 * BEAMS] + 3


def run_alone(group, steps):
    """Return the finished search of one group whose best tokens depend on `group` and the step."""
    search = start_search(1)
    for step in range(steps):
        search.advance_best(*group_tokens([group], [step]))
    return search


def group_tokens(groups, steps):
    """Return the best tokens of `groups`, each before its own step of `steps`."""
    values = [
        top_tokens(1 if step == 0 else BEAMS, seed=[group, step])
        for group, step in zip(groups, steps)
    ]
    return tuple(np.concatenate(arrays) for arrays in zip(*values))


def test_group_with_nan_logits_is_invalid_and_others_go_on():
    search = start_search(2)
    log_p, tokens = group_tokens([0, 1], [0, 0])
    log_p[1] = np.nan
    search.advance_best(log_p, tokens)
    assert search.is_invalid.tolist() == [False, True]
    keep(search, np.array([0]))
    for step in range(1, STEPS):
        search.advance_best(*group_tokens([0], [step]))
    assert search.is_finished.all() and search.result(0) == run_alone(0, STEPS).result(0)


def test_groups_that_join_later_or_leave_have_same_results_as_alone():
    search, groups = start_search(2), [0, 1]
    for step in range(3):
        search.advance_best(*group_tokens(groups, [step] * 2))
    others = start_search(3)
    others.advance_best(*group_tokens([2, 3, 4], [0] * 3))
    groups = [4, 1, 2]
    keep(search, np.array(groups), others)
    for step in (3, 4):
        steps = [step if group == 1 else step - 2 for group in groups]
        search.advance_best(*group_tokens(groups, steps))
    assert search.is_finished.tolist() == [False, True, False]
    assert search.result(1) == run_alone(1, STEPS).result(0)
    keep(search, np.array([0, 2]))
    groups = [4, 2]
    for step in (3, 4):
        search.advance_best(*group_tokens(groups, [step] * 2))
    assert search.is_finished.all()
    for place, group in enumerate(groups):
        tokens, scores = search.result(place)
        assert tokens[0] and (tokens, scores) == run_alone(group, STEPS).result(0)
