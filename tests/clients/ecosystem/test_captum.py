"""Tests of captum: attributions to the characters of a prompt."""

import pytest
import torch
from captum.attr import FeatureAblation, LLMAttribution, TextTokenInput


def test_attribution_is_log_probability_lost_without_each_character(decoder):
    text, target, baseline = "ROMEO:", " I am", 3
    prompt = TextTokenInput(text, decoder.tokenizer, baselines=baseline)
    assert prompt.to_model_input().tolist() == [decoder.ids(text)]
    attribution = LLMAttribution(FeatureAblation(decoder.model), decoder.tokenizer)
    with torch.no_grad():  # captum 0.9 reads caches of transformers 5 wrongly, GPT-2's too
        attributed = attribution.attribute(prompt, target=target, use_cached_outputs=False)
    assert attributed.input_tokens == list(text)
    ids, rest = decoder.ids(text), decoder.ids(target)
    complete = decoder.log_probability(ids, rest)
    without = [
        decoder.log_probability([*ids[:place], baseline, *ids[place + 1 :]], rest)
        for place in range(len(ids))
    ]
    assert attributed.seq_attr.tolist() == pytest.approx(
        [complete - value for value in without], abs=1e-4
    )
