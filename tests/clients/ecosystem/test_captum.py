"""captum attributes to the characters of a prompt, and to nothing else."""

import pytest
import torch
from captum.attr import FeatureAblation, LLMAttribution, TextTokenInput


def test_each_character_gets_what_the_log_probability_loses_without_it(decoder):
    text, target, baseline = "ROMEO:", " I am", 3
    given = TextTokenInput(text, decoder.tokenizer, baselines=baseline)
    assert given.to_model_input().tolist() == [decoder.ids(text)]
    attribution = LLMAttribution(FeatureAblation(decoder.model), decoder.tokenizer)
    with torch.no_grad():  # captum 0.9 reads caches of transformers 5 wrongly, GPT-2's too
        found = attribution.attribute(given, target=target, use_cached_outputs=False)
    assert found.input_tokens == list(text)
    ids, rest = decoder.ids(text), decoder.ids(target)
    whole = decoder.log_probability(ids, rest)
    without = [
        decoder.log_probability([*ids[:place], baseline, *ids[place + 1 :]], rest)
        for place in range(len(ids))
    ]
    assert found.seq_attr.tolist() == pytest.approx([whole - one for one in without], abs=1e-4)
