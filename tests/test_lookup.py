"""Prompt lookup decoding: the tokens of greedy search, in fewer steps; the logits of each step; and where it is refused."""

import json

import numpy as np
import pytest
import torch
from checkpoints import EOS, PAD, copy_of, edit_json

from vanilla_transformer_export import Options, Runtime
from vanilla_transformer_export.engine.engine import Engine
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.runtime.lookup import NgramIndex, until_end
from vanilla_transformer_export.targets.cpu import decoder as cpu
from vanilla_transformer_export.targets.portable import decoder as portable

LOOKUP = dict(prompt_lookup_num_tokens=4)
NEW_TOKENS = 40
CASES = [
    ("seq2seq", "cpu"),
    ("causal-window", "cpu"),
    pytest.param("causal", "cpu", marks=pytest.mark.slow),
    pytest.param("causal-relative", "cpu", marks=pytest.mark.slow),
    ("causal-relative", "portable"),
    pytest.param("seq2seq-t5", "portable", marks=pytest.mark.slow),
]
each_export = pytest.mark.parametrize("name, target", CASES)


@pytest.fixture
def opened(exported, exported_for):
    """A name and a target -> the model, and its export, loaded."""

    def load(name, target):
        model, directory = exported_for(name, target)
        return model, Runtime(directory, threads=1)

    return load


def prompt(seed=0, length=12):
    """A row that repeats itself, as greedy search of these models does."""
    return np.random.default_rng(seed).integers(4, 9, (1, length))


@pytest.fixture
def step_sizes(monkeypatch):
    """How many tokens each step of a lookup has read, as they come."""
    sizes = []
    for module, name in ((cpu.LookupGraph, "run"), (portable.PortableDecoder, "run")):
        original = getattr(module, name)

        def counted(self, *args, original=original):
            tokens = next(each for each in args if isinstance(each, np.ndarray))
            sizes.append(tokens.shape[1])
            return original(self, *args)

        monkeypatch.setattr(module, name, counted)
    return sizes


# -------------------------------------------------------------------------------------------------------------- the tokens

SETTINGS = [
    dict(),
    dict(max_new_tokens=9),
    dict(min_new_tokens=17),
    dict(repetition_penalty=1.3),
    dict(no_repeat_ngram_size=3, min_new_tokens=NEW_TOKENS),
    dict(bad_words_ids=[[5], [6, 7]], min_new_tokens=10),
    dict(eos_token_id=[EOS, 6]),
    dict(forced_eos_token_id=EOS, max_new_tokens=11, min_new_tokens=11),
    dict(max_matching_ngram_size=1),
    dict(max_matching_ngram_size=3, prompt_lookup_num_tokens=300),
]


@each_export
def test_tokens_are_those_of_greedy_search_in_torch(opened, name, target, step_sizes):
    model, runtime = opened(name, target)
    for settings in SETTINGS:
        options = dict(max_new_tokens=NEW_TOKENS, eos_token_id=EOS, pad_token_id=PAD) | settings
        greedy = {key: value for key, value in options.items() if "lookup" not in key and "matching" not in key}
        for seed in range(3):
            ids = prompt(seed)
            expected = model.generate(torch.from_numpy(ids), do_sample=False, **greedy).tolist()
            assert runtime.generate(ids, **LOOKUP | options).tolist() == expected, (settings, seed)
            streamed = [int(token[0]) for token in runtime.stream(ids, **LOOKUP | options)]
            assert streamed == expected[0][-len(streamed) :]
    assert max(step_sizes) > 4  # several were checked at once


@pytest.mark.parametrize("name, target", [("causal-relative", "portable"), ("causal-window", "cpu")])
def test_tokens_are_those_of_prompt_lookup_in_transformers(opened, name, target):
    model, runtime = opened(name, target)
    ids = prompt(length=9)
    options = dict(**LOOKUP, max_new_tokens=NEW_TOKENS, eos_token_id=EOS, pad_token_id=PAD, min_new_tokens=NEW_TOKENS)
    expected = model.generate(torch.from_numpy(ids), do_sample=False, **options)
    assert runtime.generate(ids, **options).tolist() == expected.tolist()
