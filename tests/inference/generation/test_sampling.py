"""Tests of sampling and of token selection."""

import functools

import numpy as np
import pytest
import torch
from generation_pairs import VOCABULARY, each_model, prompts
from messages import raises
from transformers.generation import logits_process

from vanilla_transformer_export import Options
from vanilla_transformer_export.inference.logits import (
    log_sum_exp,
    row_seeds,
    row_uniforms,
    sample,
    sampling_weights,
    top,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Unfeasible length", "ignore:Using the model-agnostic default"
)


# ----------------------------------------------------------------------------------------- sampling

WARPERS = [
    dict(top_k=0),
    dict(top_k=0, temperature=0.7),
    dict(top_k=5),
    dict(top_k=1),
    dict(top_k=100_000),
    dict(top_k=0, top_p=0.6),
    dict(top_k=0, top_p=0.0),
    dict(top_k=0, top_p=0.97, temperature=1.5),
    dict(top_k=0, min_p=0.1),
    dict(top_k=20, top_p=0.8, temperature=0.8, min_p=0.02),
    dict(top_k=200, top_p=0.9),
]


def warp_logits(logits, temperature=1.0, top_k=50, top_p=1.0, min_p=0.0):
    """Return the scores of transformers' logits warpers, -inf for tokens that are filtered out."""
    scores = torch.from_numpy(logits.copy())
    warpers = [logits_process.TemperatureLogitsWarper(temperature)]
    warpers += [logits_process.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [logits_process.TopPLogitsWarper(top_p), logits_process.MinPLogitsWarper(min_p)]
    for warper in warpers:
        scores = warper(None, scores)
    return scores.numpy()


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.parametrize("vocabulary", [48, 40_001])
def test_sampling_weights_match_transformers(vocabulary, warpers):
    logits = 3 * np.random.default_rng(0).standard_normal((4, vocabulary), dtype=np.float32)
    logits[:, ::3] = -np.inf
    expected = warp_logits(logits, **warpers)
    weights, tokens = sampling_weights(logits.copy(), Options(do_sample=True, **warpers))
    for row, scores in enumerate(expected):
        allowed = weights[row] > 0
        actual = np.flatnonzero(allowed) if tokens is None else tokens[row, allowed]
        exact = np.exp(scores - scores.max(), dtype=np.float64)
        assert sorted(actual) == np.flatnonzero(exact).tolist()
        np.testing.assert_allclose(
            weights[row, allowed] / weights[row].sum(), (exact / exact.sum())[actual], rtol=2e-5
        )


def test_tokens_tied_with_kth_token_can_be_sampled():
    logits = np.repeat(np.array([[3, 2, 1, 1, 0]], np.float32), [1, 1, 700, 700, 300], axis=1)
    weights, tokens = sampling_weights(logits.copy(), Options(do_sample=True, top_k=5))
    assert (
        sorted(tokens[0, weights[0] > 0])
        == np.flatnonzero(warp_logits(logits, top_k=5)[0] > -np.inf).tolist()
    )


@pytest.mark.parametrize(
    "vocabulary, warpers", [*((48, warpers) for warpers in WARPERS[:10]), (1100, dict(top_k=0))]
)
def test_sampled_frequencies_match_probabilities(vocabulary, warpers):
    rows = 12_000
    logits = 2 * np.random.default_rng(1).standard_normal((1, vocabulary), dtype=np.float32)
    scores = warp_logits(logits, **warpers)[0].astype(np.float64)
    probabilities = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    uniforms = [row_uniforms(seed) for seed in row_seeds(0, rows)]
    options = Options(do_sample=True, **warpers)
    drawn = sample(np.repeat(logits, rows, axis=0), options, uniforms)
    counts, expected = np.bincount(drawn, minlength=vocabulary), rows * probabilities
    assert not counts[probabilities == 0].any()
    possible = probabilities > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom) + 4


@each_model
def test_same_seed_gives_same_tokens(pair, name):
    ids, mask = prompts(name)
    draw = functools.partial(pair.runtime.generate, ids, mask, do_sample=True, max_new_tokens=8)
    assert draw(seed=1).tolist() == draw(seed=1).tolist() != draw(seed=2).tolist()
    assert draw(top_k=1).tolist() == pair.runtime.generate(ids, mask, max_new_tokens=8).tolist()


@each_model
def test_each_row_has_generators_of_its_own(pair, name):
    """Row i draws from numpy's generator of a seed derived from `seed` and i, row 0 from that of
    `seed`. Batches do not change it."""
    ids, mask = prompts(name)
    options = dict(do_sample=True, max_new_tokens=8, num_return_sequences=3, temperature=2.0)
    expected = pair.runtime.generate(ids, mask, seed=7, **options)
    for row in range(len(ids)):
        sequence = np.random.SeedSequence([7, row])
        seed = int(sequence.generate_state(1, np.uint64)[0]) if row else 7
        actual = pair.runtime.generate(ids[[row]], mask[[row]], seed=seed, **options)
        rows = expected[3 * row : 3 * row + 3, : actual.shape[1]]
        np.testing.assert_array_equal(actual, rows)


@each_model
def test_num_return_sequences_sets_samples_per_input(pair, name):
    ids, mask = prompts(name)
    options = dict(max_new_tokens=6, do_sample=True, num_return_sequences=3)
    result = pair.runtime.generate(ids, mask, seed=0, temperature=3.0, **options)
    assert result.shape[0] == 12 and len({tuple(row) for row in result}) == 12
    certain = pair.runtime.generate(ids, mask, top_k=1, repetition_penalty=1.5, **options)
    assert (
        certain.tolist()
        == pair.in_torch(ids, mask, top_k=1, repetition_penalty=1.5, **options).tolist()
    )


def test_suppressing_all_tokens_raises(pairs):
    everything = list(range(VOCABULARY))
    for filters in ({}, dict(top_k=0), dict(top_k=0, top_p=0.5)):
        with pytest.raises(ValueError):
            pairs("causal-cpu").runtime.generate(
                *prompts("causal-cpu"), do_sample=True, suppress_tokens=everything, **filters
            )


# ---------------------------------------------------------------------------------- token selection


@pytest.mark.parametrize("width", [48, 1000, 3000, 40_000, 40_001])
@pytest.mark.parametrize("count", [1, 8, 48])
def test_top_tokens_match_full_sort_with_ties_by_index(width, count):
    rng = np.random.default_rng(0)
    for scores in (
        rng.standard_normal((3, width)),
        rng.integers(0, 40, (3, width)),
        np.zeros((3, width)),
    ):
        scores = scores.astype(np.float32)
        scores[1, 5:] = -np.inf
        values, indices = top(scores, count)
        expected = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        assert indices.tolist() == expected.tolist()
        assert values.tolist() == np.take_along_axis(scores, expected, axis=1).tolist()


def test_log_softmax_matches_torch():
    logits = 20 * np.random.default_rng(0).standard_normal((70, 9000), dtype=np.float32)
    maximum, log_sum = log_sum_exp(logits)
    expected = torch.from_numpy(logits).double().log_softmax(dim=-1).numpy()
    np.testing.assert_allclose(logits - maximum - log_sum, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([[np.nan] * 9] * 2, 2),
        ([[1, np.nan, 3], [2, 2, 2]], 2),  # one row has ties, the other has NaN
        ([[5, 5, np.nan]], 2),
        ([[1, np.nan, 3]], 3),
        ([[9] * 5 + [np.nan]], 1),
    ],
)
def test_nan_logits_raise(rows, count):
    with raises(ValueError, seen="NaN", expected="numbers"):
        top(np.array(rows, np.float32), count)
