"""Tests of every generation setting, against `transformers.generate`, on two targets."""

import itertools

import numpy as np
import pytest
import transformers
from checkpoints import copy_folder, edit_json, seal
from generation_pairs import CPU_MODELS, EOS, each_model, prompts

from vanilla_transformer_export import Options, Runtime
from vanilla_transformer_export.inference.logits import LogitsProcessors, Prompt
from vanilla_transformer_export.inference.options import NEUTRAL, SAMPLING_ONLY, WITHOUT_EFFECT
from vanilla_transformer_export.shared.generation_options import FIELDS as FIELDS_BY_NAME

pytestmark = pytest.mark.filterwarnings(
    "ignore:Unfeasible length", "ignore:Using the model-agnostic default"
)


FIELDS = [
    dict(max_length=14),
    dict(max_length=14, max_new_tokens=3),
    dict(max_length=10, max_new_tokens=None),
    dict(max_new_tokens=10, min_length=11),
    dict(max_new_tokens=10, min_length=1),
    dict(max_new_tokens=10, min_new_tokens=7),
    dict(max_new_tokens=10, min_new_tokens=2, min_length=16),
    dict(max_new_tokens=5, min_new_tokens=9),
    dict(max_new_tokens=10, repetition_penalty=1.7),
    dict(max_new_tokens=10, repetition_penalty=0.6),
    dict(max_new_tokens=12, no_repeat_ngram_size=1),
    dict(max_new_tokens=12, no_repeat_ngram_size=2),
    dict(max_new_tokens=12, no_repeat_ngram_size=3),
    dict(max_new_tokens=10, bad_words_ids=[[token] for token in range(4, 30)]),
    dict(max_new_tokens=10, bad_words_ids=[[EOS], [token for token in range(4, 20)], [5, 6, 7]]),
    dict(
        max_new_tokens=10,
        bad_words_ids=[[a, b] for a, b in itertools.product(range(4, 48), range(20, 48))],
    ),
    dict(max_new_tokens=10, forced_bos_token_id=9),
    dict(max_new_tokens=10, forced_eos_token_id=EOS),
    dict(max_new_tokens=10, forced_eos_token_id=[EOS, 17]),
    dict(max_new_tokens=1, forced_eos_token_id=EOS, forced_bos_token_id=9),
    dict(max_new_tokens=10, suppress_tokens=[EOS, *range(10, 30), 99]),
    dict(max_new_tokens=10, begin_suppress_tokens=[EOS, *range(10, 40)]),
    dict(max_new_tokens=10, begin_suppress_tokens=[*range(10, 40)], forced_bos_token_id=9),
    dict(
        max_new_tokens=10,
        bad_words_ids=[[token] for token in range(4, 44)],
        renormalize_logits=True,
    ),
    dict(
        max_new_tokens=10, forced_eos_token_id=EOS, forced_bos_token_id=9, renormalize_logits=True
    ),
    dict(max_new_tokens=10, eos_token_id=[EOS, *range(5, 25, 3)]),
    dict(max_new_tokens=10, eos_token_id=[EOS, *range(5, 25, 3)], min_new_tokens=4),
    dict(max_new_tokens=10, pad_token_id=6, repetition_penalty=1.3, no_repeat_ngram_size=2),
]


# Each setting for a model with a source and for a decoder, one of them for the cpu target.
IN_TURN = [
    pytest.param(name, options, id=f"{name}-{str(options)[5:60]}")
    for place, options in enumerate(FIELDS)
    for name in (("seq2seq-untied", "causal-cpu"), ("causal-learned", "seq2seq-cpu"))[place % 2]
]


@pytest.mark.parametrize("name, options", IN_TURN)
def test_each_setting_matches_transformers(pair, name, options):
    ids, mask = prompts(name)
    if "pad_token_id" in options:
        ids = np.where(mask == 1, ids, options["pad_token_id"])
    for num_beams in (1, 3):
        pair.check(ids, mask, **options, num_beams=num_beams)


def test_search_without_processor_settings_has_no_logits_processors():
    """Without processors a device can select tokens, and beam search computes log p only for the
    top tokens."""
    prompt = Prompt(np.ones((2, 1), np.int64), padding=np.zeros(2, np.int64))
    for options in (
        Options(eos_token_id=(EOS,)),
        Options(min_new_tokens=3),
        Options(eos_token_id=(EOS,), num_beams=4),
    ):
        assert not LogitsProcessors(options, prompt)
    assert LogitsProcessors(Options(eos_token_id=(EOS,), min_new_tokens=3), prompt)


@pytest.mark.parametrize("name", CPU_MODELS)
def test_most_settings_change_the_tokens(pair, name):
    """Otherwise the comparison of each setting with transformers would show nothing."""
    ids, mask = prompts(name)
    plain = pair.in_torch(ids, mask, max_new_tokens=10)[:, -10:].tolist()
    idle = 0
    for options in FIELDS:
        idle += (
            pair.in_torch(ids, mask, **{"max_new_tokens": 10, **options})[:, -10:].tolist() == plain
        )
    assert idle <= len(FIELDS) // 3


def random_options(rng):
    """Return several random settings."""
    draws = dict(
        min_new_tokens=lambda: int(rng.integers(0, 8)),
        min_length=lambda: int(rng.integers(0, 12)),
        repetition_penalty=lambda: float(rng.uniform(0.7, 2)),
        no_repeat_ngram_size=lambda: int(rng.integers(1, 4)),
        bad_words_ids=lambda: [rng.integers(4, 48, rng.integers(1, 3)).tolist() for _ in range(20)],
        forced_bos_token_id=lambda: int(rng.integers(4, 48)),
        forced_eos_token_id=lambda: EOS,
        suppress_tokens=lambda: rng.integers(4, 48, 8).tolist(),
        begin_suppress_tokens=lambda: rng.integers(0, 48, 12).tolist(),
        eos_token_id=lambda: [EOS, *rng.integers(4, 48, 2).tolist()],
    )
    options = {name: draw() for name, draw in draws.items() if rng.random() < 0.4}
    options |= dict(
        max_new_tokens=int(rng.integers(1, 13)), num_beams=int(rng.choice([1, 1, 2, 4]))
    )
    if options["num_beams"] > 1:
        options |= dict(
            length_penalty=float(rng.uniform(-1, 2)),
            early_stopping=[False, True, "never"][rng.integers(3)],
            num_return_sequences=int(rng.integers(1, options["num_beams"] + 1)),
        )
    return options


@pytest.mark.parametrize("seed", range(16))
@each_model
def test_random_settings_match_transformers(pair, name, seed):
    rng = np.random.default_rng(seed)
    ids, mask = prompts(name, seed, lengths=tuple(rng.integers(1, 8, rng.integers(1, 5))))
    pair.check(ids, mask, **random_options(rng))


@each_model
@pytest.mark.parametrize("num_beams, returned", [(2, 2), (4, 1), (4, 3)])
def test_beam_search_returns_num_return_sequences_per_input(pair, name, num_beams, returned):
    ids, mask = prompts(name)
    options = dict(num_beams=num_beams, num_return_sequences=returned, max_new_tokens=9)
    pair.check(ids, mask, **options)
    assert len(pair.runtime.generate(ids, mask, **options)) == returned * len(ids)


@each_model
def test_default_max_length_matches_transformers(pair, name):
    for length in (3, 16):
        pair.check(*prompts(name, lengths=(length, 2)), suppress_tokens=[EOS])


@each_model
def test_call_options_override_generation_config_as_in_transformers(pair, tmp_path, name):
    directory = copy_folder(pair.directory, tmp_path)
    saved = dict(
        max_new_tokens=6,
        max_length=30,
        min_length=2,
        num_beams=2,
        repetition_penalty=1.4,
        suppress_tokens=[7],
    )
    edit_json(directory / "generation_config.json", **saved)
    seal(directory)
    runtime, reference = Runtime(directory), pair.model
    ids, mask = prompts(name)
    before, reference.generation_config = (
        reference.generation_config,
        transformers.GenerationConfig.from_pretrained(directory),
    )
    try:
        calls = [
            {},
            dict(max_length=12),
            dict(max_length=12, max_new_tokens=None),
            dict(num_beams=1, repetition_penalty=1.0),
        ]
        for options in (*calls, dict(min_new_tokens=5, suppress_tokens=None)):
            expected = pair.in_torch(ids, mask, **options)
            assert runtime.generate(ids, mask, **options).tolist() == expected.tolist(), options
    finally:
        reference.generation_config = before


def test_no_option_is_among_the_fields_that_are_not_applied():
    """A field that becomes an option leaves these tables."""
    assert not FIELDS_BY_NAME.keys() & {*WITHOUT_EFFECT, *NEUTRAL, *SAMPLING_ONLY}
