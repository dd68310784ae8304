"""Tests of sequence scores and `decoder_input_ids` on every target, against transformers."""

import numpy as np
import pytest
import torch
from checkpoints import EOS, START
from messages import raises
from targets import GENERATORS, prompts

from vanilla_transformer_export import Runtime

TARGETS = ["portable", "cpu", "cuda"]
targets = pytest.mark.parametrize("target", TARGETS)
each_case = pytest.mark.parametrize(
    "name, target",
    [
        pytest.param(
            name,
            target,
            marks=[pytest.mark.slow] if (name, target) == ("causal-window", "portable") else [],
        )
        for name in GENERATORS
        for target in TARGETS
    ],
)
BEAMS = [
    dict(num_beams=2),
    dict(num_beams=4, num_return_sequences=3, length_penalty=0.4),
    dict(num_beams=3, num_return_sequences=3, length_penalty=-0.5, early_stopping=True),
    dict(
        num_beams=3,
        num_return_sequences=2,
        length_penalty=2.0,
        early_stopping="never",
        no_repeat_ngram_size=2,
    ),
]


@pytest.fixture(scope="module")
def pair(exported_for):
    def make(name, target):
        model, directory = exported_for(name, target)
        return model, Runtime(directory, device="cpu")

    return make


@torch.no_grad()
def generate_in_torch(model, ids, mask, **options):
    given = dict(attention_mask=torch.from_numpy(mask), max_new_tokens=10)
    given |= {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    return model.generate(
        torch.from_numpy(ids), return_dict_in_generate=True, output_scores=True, **given
    )


@each_case
def test_beam_search_scores_match_sequences_scores(pair, name, target):
    model, runtime = pair(name, target)
    for seed, options in enumerate(BEAMS):
        ids, mask = prompts(name, seed)
        tokens, scores = runtime.generate_with_scores(ids, mask, max_new_tokens=10, **options)
        expected = generate_in_torch(model, ids, mask, **options)
        np.testing.assert_array_equal(tokens, expected.sequences)
        np.testing.assert_allclose(scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(
            tokens, runtime.generate(ids, mask, max_new_tokens=10, **options)
        )


@each_case
@pytest.mark.parametrize(
    "options", [{}, dict(length_penalty=0.3, repetition_penalty=1.4, min_new_tokens=4)], ids=str
)
def test_greedy_scores_are_transition_scores_over_length(pair, name, options, target):
    """transformers documents this sum as the score of a sequence."""
    model, runtime = pair(name, target)
    ids, mask = prompts(name, seed=5)
    options = {**options, "eos_token_id": [EOS, *range(4, 48, 5)]}
    tokens, scores = runtime.generate_with_scores(ids, mask, max_new_tokens=10, **options)
    expected = generate_in_torch(model, ids, mask, **options)
    np.testing.assert_array_equal(tokens, expected.sequences)
    steps = (
        model.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
        .double()
        .numpy()
    )
    ends = np.isin(expected.sequences[:, -steps.shape[1] :].numpy(), options["eos_token_id"])
    is_scored = np.cumsum(ends, axis=1) - ends == 0
    rows_end_early = name != "causal-grouped" and not (
        name == "causal" and "min_new_tokens" in options
    )
    assert (len(set(is_scored.sum(axis=1))) > 1) >= rows_end_early
    reference = np.where(is_scored, steps, 0).sum(axis=1) / is_scored.sum(axis=1) ** options.get(
        "length_penalty", 1.0
    )
    np.testing.assert_allclose(scores, reference, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_sampling_scores_are_mean_log_probabilities_of_tokens(pair):
    """Temperature and filters do not change the scores."""
    model, runtime = pair("causal", "cpu")
    ids, mask = prompts("causal")
    ids, mask = ids[mask.all(axis=1)], mask[mask.all(axis=1)]
    options = dict(
        do_sample=True, temperature=2.0, top_k=9, seed=3, num_return_sequences=4, eos_token_id=None
    )
    tokens, scores = runtime.generate_with_scores(ids, mask, max_new_tokens=6, **options)
    log_p = model(torch.from_numpy(tokens)).logits.log_softmax(dim=-1)[:, ids.shape[1] - 1 : -1]
    expected = log_p.gather(2, torch.from_numpy(tokens[:, ids.shape[1] :, None]))[..., 0].mean(
        dim=1
    )
    assert len(set(scores.tolist())) == 4
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


@targets
@pytest.mark.parametrize(
    "options", [{}, dict(max_new_tokens=None, max_length=9, min_length=7), *BEAMS[:2]], ids=str
)
def test_decoder_input_ids_match_transformers(pair, options, target):
    model, runtime = pair("seq2seq", target)
    ids, mask = prompts("seq2seq", seed=1)
    rng = np.random.default_rng(0)
    for length in (1, 4):
        given = rng.integers(4, 48, (len(ids), length))
        for prefix in (given, np.concatenate([np.full((len(ids), 1), START), given], axis=1)):
            reference = (
                dict(max_new_tokens=10, **options) if "max_new_tokens" not in options else options
            )
            tokens, scores = runtime.generate_with_scores(ids, mask, prefix, **reference)
            expected = generate_in_torch(model, ids, mask, decoder_input_ids=prefix, **options)
            np.testing.assert_array_equal(tokens, expected.sequences)
            np.testing.assert_array_equal(
                tokens[:, 1 : length + 1], np.repeat(given, len(tokens) // len(ids), axis=0)
            )
            if "num_beams" in options:
                np.testing.assert_allclose(scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)


def test_invalid_decoder_input_ids_are_rejected(pair):
    _, runtime = pair("seq2seq", "portable")
    ids, mask = prompts("seq2seq")
    with raises(ValueError, seen=("decoder_input_ids", 1), expected=(4, "target_length")):
        runtime.generate(ids, mask, [[5]])
    with raises(ValueError, seen=("decoder_input_ids", 48), expected=(0, 47)):
        runtime.generate(ids, mask, [[48]] * 4)
    _, runtime = pair("causal", "portable")
    with raises(ValueError, seen=("decoder_input_ids", "input_ids")):
        runtime.generate(*prompts("causal"), [[5]] * 4)
