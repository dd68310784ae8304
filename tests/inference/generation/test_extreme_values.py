"""Tests of generation with NumPy's numbers, huge limits and fixed caches."""

import numpy as np
import pytest
from generation_pairs import CPU_MODELS, EOS, PAD, SIZES, VOCABULARY, each_model, prompts
from messages import raises

import vanilla_transformer
from vanilla_transformer_export import Runtime
from vanilla_transformer_export.errors import SessionError, UsageError
from vanilla_transformer_export.inference import decoder as decoder_module
from vanilla_transformer_export.inference import search
from vanilla_transformer_export.inference.decoder import position_bytes
from vanilla_transformer_export.targets.cpu import decoder as cpu_decoder
from vanilla_transformer_export.targets.registry import get_target

pytestmark = pytest.mark.filterwarnings(
    "ignore:Unfeasible length", "ignore:Using the model-agnostic default"
)


# ---------------------------------------------------------------------------------- numpy's numbers

NUMPY = [
    dict(num_beams=np.int32(2), max_new_tokens=np.int8(7)),
    dict(
        num_beams=np.uint8(3),
        num_return_sequences=np.uint8(2),
        max_new_tokens=np.uint8(9),
        length_penalty=np.float32(0.5),
    ),
    dict(
        num_beams=np.int16(3),
        early_stopping=np.True_,
        max_new_tokens=np.array(6),
        eos_token_id=np.array([EOS, 9, 11]),
    ),
    dict(
        max_length=np.uint8(16),
        min_length=np.uint8(9),
        pad_token_id=np.int8(PAD),
        repetition_penalty=np.float64(1.3),
    ),
    dict(
        max_new_tokens=8,
        suppress_tokens=np.arange(10, 20, dtype=np.uint8),
        bad_words_ids=[np.array([5, 6]), (7,)],
    ),
    dict(
        max_new_tokens=8,
        do_sample=np.False_,
        no_repeat_ngram_size=np.uint8(2),
        forced_bos_token_id=np.uint8(9),
    ),
    dict(
        max_new_tokens=np.uint8(8),
        do_sample=np.True_,
        top_k=np.uint8(5),
        top_p=np.float32(0.5),
        seed=np.uint8(3),
    ),
]


@pytest.mark.parametrize("options", NUMPY, ids=lambda options: " ".join(options))
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seq2seq", "causal"])
def test_numpy_s_numbers_are_as_good_as_python_s(on_each_target, kind, options):
    """Small integers of NumPy would overflow in indices of slots and rows, so every target is
    tested."""
    own = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in options.items()
    }
    if "bad_words_ids" in own:
        own["bad_words_ids"] = [[5, 6], [7]]
    ids, mask = prompts(kind, lengths=(7, 2, 4, 6, 5))
    for runtime in on_each_target(kind):
        expected = runtime.generate(ids, mask, **own)
        assert runtime.generate(ids, mask, **options).tolist() == expected.tolist(), runtime.target


# ----------------------------------------------------------------------------------- absurd numbers

ENDS = [EOS, *range(6, VOCABULARY)]  # so that every row ends soon
LONGEST = (
    dict(max_new_tokens=10**9),
    dict(max_length=2**62),
    dict(max_new_tokens=2**63 - 1, min_new_tokens=3),
)


@pytest.mark.parametrize("options", LONGEST, ids=str)
@pytest.mark.parametrize("name", ["seq2seq-untied", *CPU_MODELS])
def test_memory_is_taken_for_what_is_generated_not_for_what_might_be(pair, name, options):
    ids, mask = prompts(name)
    for more in (
        {},
        dict(num_beams=3, early_stopping=True),
        dict(do_sample=True, seed=0, repetition_penalty=1.2),
    ):
        few = {"max_new_tokens": 200, "min_new_tokens": options.get("min_new_tokens", 0)}
        expected = pair.runtime.generate(ids, mask, eos_token_id=ENDS, **few, **more)
        actual = pair.runtime.generate(ids, mask, eos_token_id=ENDS, **options, **more)
        assert actual.tolist() == expected.tolist() and actual.shape[1] < 100


@each_model
@pytest.mark.parametrize("room", [1, 3])
def test_room_for_tokens_grows_and_nothing_changes(pair, name, room, monkeypatch):
    """Caches of the cpu target, the hypotheses of beam search and what processors see, all doubled
    as tokens come."""
    ids, mask = prompts(name)
    calls = [
        dict(num_beams=beams, no_repeat_ngram_size=2, suppress_tokens=[EOS]) for beams in (1, 3)
    ]
    calls += [
        dict(num_beams=4, num_return_sequences=3, eos_token_id=[EOS, 9, 17]),
        dict(repetition_penalty=1.4),
    ]
    expected = [
        pair.runtime.generate(ids, mask, max_new_tokens=20, **options).tolist() for options in calls
    ]
    for module in (search, decoder_module, cpu_decoder):
        monkeypatch.setattr(module, "INITIAL_CAPACITY", room)
    for options, tokens in zip(calls, expected, strict=True):
        assert pair.runtime.generate(ids, mask, max_new_tokens=20, **options).tolist() == tokens
    drawn = dict(do_sample=True, seed=1, num_return_sequences=2, max_new_tokens=20)
    assert pair.runtime.generate(ids, mask, **drawn).shape[0] == 2 * len(ids)
    pair.check(ids, mask, max_new_tokens=17, num_beams=2)


def test_what_positions_or_a_fixed_cache_cannot_hold_is_refused_with_the_limit(
    pairs, on_each_target
):
    ids, mask = prompts("causal-learned")
    with raises(ValueError, seen=1000000006, expected=40):
        pairs("causal-learned").runtime.generate(ids, mask, max_new_tokens=10**9)
    on_cuda = on_each_target("seq2seq")[2]
    for options, rows in ((dict(), 1), (dict(num_beams=3), 3)):
        with raises(UsageError, seen=(4, rows, "max_new_tokens", 1000000000)):
            on_cuda.generate(*prompts("seq2seq"), max_new_tokens=10**9, **options)


@pytest.mark.parametrize(
    "architecture, layers",
    [
        ("VanillaDecoderForCausalLM", dict(num_hidden_layers=2)),
        ("VanillaSeq2SeqForConditionalGeneration", dict(encoder_layers=1, decoder_layers=2)),
    ],
)
def test_a_token_takes_a_key_and_a_value_of_each_head_of_each_layer_of_the_decoder(
    architecture, layers
):
    model_class = getattr(vanilla_transformer, architecture)
    config = model_class.config_class(
        **{**SIZES, **layers, "head_dim": 8, "value_head_dim": 8}
    ).to_dict()
    for target, activations, size in (
        ("portable", "fp32", 4),
        ("cpu", "fp32", 4),
        ("cuda", "fp32", 4),
        ("cuda", "bf16", 2),
    ):
        spec = get_target(target).graph_specs(config, architecture, activations, activations)[
            "decoder"
        ]
        assert position_bytes(spec) == 2 * 4 * (8 + 8) * size


def test_a_cache_that_cannot_be_made_is_refused_by_its_size(on_each_target, monkeypatch):
    """A device may have less memory than the machine."""
    on_cuda = on_each_target("seq2seq")[2]

    def fails(sizes):
        raise errors.pop()

    errors = [RuntimeError("CUDA failure 900: no copies in a capture"), MemoryError("no more")]
    monkeypatch.setattr(on_cuda.model.decoders.pool, "take", fails)
    with raises(UsageError, seen=(256, "max_new_tokens")):
        on_cuda.generate(*prompts("seq2seq"), max_new_tokens=150)
    with raises(SessionError, seen=(256, 900)):  # not the fault of the request
        on_cuda.generate(*prompts("seq2seq"), max_new_tokens=150)


@each_model
def test_the_largest_length_penalties_give_the_tokens_of_transformers(pair, name):
    ids, mask = prompts(name)
    for length_penalty in (29.6, 12, -4.6):
        pair.check(ids, mask, num_beams=3, max_new_tokens=20, length_penalty=length_penalty)


def test_a_length_penalty_has_no_effect_without_beams(pairs):
    ids, mask = prompts("causal-cpu")
    runtime = pairs("causal-cpu").runtime
    assert (
        runtime.generate(ids, mask, length_penalty=1000).tolist()
        == runtime.generate(ids, mask).tolist()
    )


def test_an_end_token_outside_the_vocabulary_is_never_reached_as_in_transformers(pairs):
    pairs("causal-cpu").check(*prompts("causal-cpu"), eos_token_id=[10**9], max_new_tokens=5)


@pytest.mark.parametrize("threads", [0, -1, 1025, 100_000, 2.5, "4", True])
def test_a_number_of_threads_that_cannot_be_is_refused_with_the_range(pairs, threads):
    with raises(UsageError, seen=threads, expected=("threads", 1, 1024)):
        Runtime(pairs("causal-cpu").directory, threads=threads)


def test_numpy_s_threads_are_taken(pairs):
    assert Runtime(pairs("causal-cpu").directory, threads=np.int64(1)).threads == 1
