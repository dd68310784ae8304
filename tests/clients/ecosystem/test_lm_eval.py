"""lm-eval scores and continues the prompt itself."""

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


@pytest.fixture(scope="module")
def harness(decoder):
    return HFLM(pretrained=decoder.path, device="cpu", batch_size=2)


def test_scores_are_the_model_s_own_log_probabilities(harness, decoder):
    pairs = [("ROMEO:", " I am"), ("To be or not", " to be"), ("ROMEO:", "\nThe")]
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    found = [score for score, _ in harness.loglikelihood(asked, disable_tqdm=True)]
    expected = [
        decoder.log_probability(decoder.ids(context), decoder.ids(rest)) for context, rest in pairs
    ]
    assert found == pytest.approx(expected, abs=1e-4)
    assert expected[0] == pytest.approx(-8.52, abs=0.01)


def test_what_is_generated_is_the_greedy_text(harness, decoder):
    options = {"until": ["~"], "max_gen_toks": 12, "do_sample": False}
    [found] = harness.generate_until(
        [Instance("generate_until", {}, ("ROMEO:", options), 0)], disable_tqdm=True
    )
    assert found == decoder.greedy("ROMEO:", 12)


def test_the_longest_text_is_that_of_the_positions(harness):
    assert harness.max_length == 64
