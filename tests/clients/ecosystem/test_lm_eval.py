"""Tests of lm-eval with a decoder: scores and generated text without added special tokens."""

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


@pytest.fixture(scope="module")
def harness(decoder):
    return HFLM(pretrained=decoder.path, device="cpu", batch_size=2)


def test_scores_are_log_probabilities_of_the_model(harness, decoder):
    pairs = [("ROMEO:", " I am"), ("To be or not", " to be"), ("ROMEO:", "\nThe")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    actual = [score for score, _ in harness.loglikelihood(requests, disable_tqdm=True)]
    expected = [
        decoder.log_probability(decoder.ids(context), decoder.ids(rest)) for context, rest in pairs
    ]
    assert actual == pytest.approx(expected, abs=1e-4)
    assert expected[0] == pytest.approx(-8.52, abs=0.01)


def test_generated_text_is_greedy(harness, decoder):
    options = {"until": ["~"], "max_gen_toks": 12, "do_sample": False}
    [actual] = harness.generate_until(
        [Instance("generate_until", {}, ("ROMEO:", options), 0)], disable_tqdm=True
    )
    assert actual == decoder.greedy("ROMEO:", 12)


def test_max_length_is_number_of_positions(harness):
    assert harness.max_length == 64
