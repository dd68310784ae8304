"""Tests of generation with NumPy numbers, huge limits and fixed caches."""

import tracemalloc

import numpy as np
import pytest
from generation_pairs import CPU_MODELS, EOS, PAD, SIZES, VOCABULARY, each_model, prompts
from messages import raises

import vanilla_transformer
from vanilla_transformer_export import Runtime
from vanilla_transformer_export.engine import search
from vanilla_transformer_export.errors import SessionError, UsageError
from vanilla_transformer_export.inference import rows as rows_module
from vanilla_transformer_export.inference.rows import position_bytes
from vanilla_transformer_export.targets.cpu import rows as cpu_rows
from vanilla_transformer_export.targets.cpu import slots as cpu_slots
from vanilla_transformer_export.targets.registry import get_target

pytestmark = pytest.mark.filterwarnings(
    "ignore:Unfeasible length", "ignore:Using the model-agnostic default"
)


# ------------------------------------------------------------------------------------ NumPy numbers

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
def test_numpy_options_give_same_tokens_as_python_options(on_each_target, kind, options):
    """Small NumPy integers would overflow in indices of slots and rows, so every target is
    tested."""
    python_options = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in options.items()
    }
    if "bad_words_ids" in python_options:
        python_options["bad_words_ids"] = [[5, 6], [7]]
    ids, mask = prompts(kind, lengths=(7, 2, 4, 6, 5))
    for runtime in on_each_target(kind):
        expected = runtime.generate(ids, mask, **python_options)
        assert runtime.generate(ids, mask, **options).tolist() == expected.tolist(), runtime.target


# -------------------------------------------------------------------------------------- huge limits

ENDS = [EOS, *range(6, VOCABULARY)]  # every row ends soon
HUGE_LIMITS = (
    dict(max_new_tokens=10**9),
    dict(max_length=2**62),
    dict(max_new_tokens=2**63 - 1, min_new_tokens=3),
)


def trace_peak(function, *args, **options):
    """Return the result of `function` and the peak of the bytes that Python and NumPy allocate."""
    tracemalloc.start()
    try:
        return function(*args, **options), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("options", HUGE_LIMITS, ids=str)
@pytest.mark.parametrize("name", ["seq2seq-untied", *CPU_MODELS])
def test_huge_length_limit_does_not_allocate_memory_in_advance(pair, name, options):
    ids, mask = prompts(name)
    for more in (
        {},
        dict(num_beams=3, early_stopping=True),
        dict(do_sample=True, seed=0, repetition_penalty=1.2),
    ):
        short_limit = {"max_new_tokens": 200, "min_new_tokens": options.get("min_new_tokens", 0)}
        expected = pair.runtime.generate(ids, mask, eos_token_id=ENDS, **short_limit, **more)
        actual, peak = trace_peak(
            pair.runtime.generate, ids, mask, eos_token_id=ENDS, **options, **more
        )
        assert actual.tolist() == expected.tolist() and actual.shape[1] < 100
        assert peak < 10e6  # token ids of the whole limit would take 8 GB or more


@each_model
@pytest.mark.parametrize("room", [1, 3])
def test_growing_capacity_does_not_change_tokens(pair, name, room, monkeypatch):
    """Caches of the cpu target, beam hypotheses and the history of logits processors double as
    tokens are added."""
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
    for module in (search, rows_module, cpu_rows, cpu_slots):
        monkeypatch.setattr(module, "INITIAL_CAPACITY", room)
    for options, tokens in zip(calls, expected, strict=True):
        assert pair.runtime.generate(ids, mask, max_new_tokens=20, **options).tolist() == tokens
    sampling = dict(do_sample=True, seed=1, num_return_sequences=2, max_new_tokens=20)
    assert pair.runtime.generate(ids, mask, **sampling).shape[0] == 2 * len(ids)
    pair.check(ids, mask, max_new_tokens=17, num_beams=2)


def test_max_new_tokens_beyond_positions_or_cache_is_rejected(pairs, on_each_target):
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
        ("VanillaDecoderForCausalLM", dict(num_hidden_layers=4, num_key_value_heads=2)),
        ("VanillaSeq2SeqForConditionalGeneration", dict(encoder_layers=1, decoder_layers=2)),
    ],
)
def test_position_bytes_count_keys_and_values_of_decoder_layers(architecture, layers):
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


def test_failed_cache_allocation_error_names_size(on_each_target, monkeypatch):
    """A device may have less memory than the machine."""
    on_cuda = on_each_target("seq2seq")[2]

    def raise_next_error(sizes):
        raise errors.pop()

    errors = [RuntimeError("CUDA failure 900: no copies in a capture"), MemoryError("no more")]
    monkeypatch.setattr(on_cuda.model.factory.pool, "take", raise_next_error)
    with raises(UsageError, seen=(256, "max_new_tokens")):
        on_cuda.generate(*prompts("seq2seq"), max_new_tokens=150)
    with raises(SessionError, seen=(256, 900)):  # not a fault of the request
        on_cuda.generate(*prompts("seq2seq"), max_new_tokens=150)


@each_model
def test_extreme_length_penalties_match_transformers(pair, name):
    ids, mask = prompts(name)
    for length_penalty in (29.6, 12, -4.6):
        pair.check(ids, mask, num_beams=3, max_new_tokens=20, length_penalty=length_penalty)


def test_length_penalty_has_no_effect_without_beams(pairs):
    ids, mask = prompts("causal-cpu")
    runtime = pairs("causal-cpu").runtime
    assert (
        runtime.generate(ids, mask, length_penalty=1000).tolist()
        == runtime.generate(ids, mask).tolist()
    )


def test_end_token_outside_vocabulary_matches_transformers(pairs):
    pairs("causal-cpu").check(*prompts("causal-cpu"), eos_token_id=[10**9], max_new_tokens=5)


@pytest.mark.parametrize("threads", [0, -1, 1025, 100_000, 2.5, "4", True])
def test_invalid_number_of_threads_error_names_range(pairs, threads):
    with raises(UsageError, seen=threads, expected=("threads", 1, 1024)):
        Runtime(pairs("causal-cpu").directory, threads=threads)


def test_numpy_number_of_threads_is_accepted(pairs):
    assert Runtime(pairs("causal-cpu").directory, threads=np.int64(1)).threads == 1
