"""Tests of the cpu and cuda targets: generated tokens equal those of transformers.

The cuda target runs on the CPU here.
"""

import itertools

import numpy as np
import pytest
import torch
from checkpoints import EOS, PAD
from messages import raises
from targets import MODELS, NOT_ON_CPU, WITH_BIAS, build, generators, prompts

from vanilla_transformer_export import Runtime, export, verify
from vanilla_transformer_export.targets.cuda.rows import power_of_two

NAMES = ["cpu", "cuda"]
targets = pytest.mark.parametrize("target", NAMES)
PENALIZED = {"num_beams": 3, "no_repeat_ngram_size": 2}  # selects tokens on the host


# Exports take seconds: only one model with relative positions is in the fast tests.
FAST = [("seq2seq-t5", "cpu")]
BIASED = [
    pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow])
    for case in itertools.product(WITH_BIAS, NAMES)
]


OTHERS = [
    pytest.param(
        *case, marks=[pytest.mark.slow] if case[0] == "causal-window" and case[1] != "cpu" else []
    )
    for case in itertools.product([name for name in MODELS if name not in WITH_BIAS], NAMES)
]


@pytest.mark.parametrize("name, target", [*OTHERS, *BIASED])
def test_16_cases_agree_with_torch(exported_for, name, target):
    model, directory = exported_for(name, target)
    report = verify(directory, model, cases=16, seed=1, device="cpu")
    assert report.failures == [] and report.values > 4_000
    assert report.agreeing == report.choices


@targets
@pytest.mark.parametrize("beams", [1, 2, 5])
@generators
def test_generated_tokens_equal_transformers(exported_for, name, beams, target):
    model, directory = exported_for(name, target)
    runtime = Runtime(directory, device="cpu")
    check_tokens(runtime, model, *prompts(name, beams), dict(max_new_tokens=14, num_beams=beams))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", NOT_ON_CPU)
@pytest.mark.parametrize("target", ["portable", "cuda"])
def test_generation_of_models_that_cpu_rejects_equals_transformers(
    exported_for, name, target, beams
):
    model, directory = exported_for(name, target)
    check_tokens(
        Runtime(directory, device="cpu"),
        model,
        *prompts(name),
        dict(max_new_tokens=14, num_beams=beams),
    )


@pytest.mark.parametrize(
    "name, field, seen, expected",
    [
        ("causal-values", "value_head_dim", 12, 8),
        ("seq2seq-values", "value_head_dim", 12, 8),
        ("seq2seq-grouped", "num_key_value_heads", 2, 4),
    ],
)
def test_cpu_rejects_models_without_an_operator(tmp_path, name, field, seen, expected):
    build(name).save_pretrained(tmp_path / "model")
    with raises(ValueError, seen=(field, seen), expected=(expected, "portable")):
        export(tmp_path / "model", tmp_path / "out", target="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "name, target", [case for case in BIASED if "encoder" not in case.values[0]]
)
def test_generation_with_relative_positions_equals_transformers(
    exported_for, name, target, beams, monkeypatch
):
    """Cover growing caches and a logits processor on the host, too."""
    for module in ("rows", "slots"):
        path = f"vanilla_transformer_export.targets.cpu.{module}.INITIAL_CAPACITY"
        monkeypatch.setattr(path, 5)
    model, directory = exported_for(name, target)
    runtime = Runtime(directory, device="cpu")
    for seed in range(3):
        settings = dict(max_new_tokens=14, num_beams=beams)
        check_tokens(runtime, model, *prompts(name, seed), settings)
        check_tokens(runtime, model, *prompts(name, seed), settings | {"no_repeat_ngram_size": 2})


@targets
@generators
def test_beam_search_with_more_candidates_than_tokens_equals_transformers(
    exported_for, name, target
):
    """Search with 24 end tokens, so that 2 beams have 50 candidates for 48 tokens.

    The graph of the cuda target cannot select as many candidates from one beam.
    """
    model, directory = exported_for(name, target)
    settings = dict(max_new_tokens=8, num_beams=2, eos_token_id=[EOS, *range(25, 48)])
    check_tokens(Runtime(directory, device="cpu"), model, *prompts(name), settings)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2, "num_return_sequences": 2}, PENALIZED])
@generators
def test_batch_with_fewer_rows_than_caches_equals_transformers(exported_for, name, options):
    model, directory = exported_for(name, "cuda")
    runtime = Runtime(directory, device="cpu")
    ids, mask = (
        np.concatenate(parts)
        for parts in zip(*(prompts(name, seed) for seed in range(3)), strict=True)
    )
    for rows, sizes in ((3, [4]), (5, [4, 8]), (7, [4, 8])):
        check_tokens(runtime, model, ids[:rows], mask[:rows], {"max_new_tokens": 8, **options})
        assert (
            sorted(buffers.sizes["batch_size"] for buffers in runtime.model.factory.pool.free)
            == sizes
        )


def test_cache_rows_are_rounded_up_to_power_of_two():
    sizes = [power_of_two(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 128, 129)]
    assert sizes == [1, 2, 4, 4, 8, 8, 16, 16, 32, 128, 256]


def check_tokens(runtime, model, ids, mask, settings):
    with torch.no_grad():
        inputs = dict(attention_mask=torch.from_numpy(mask), do_sample=False)
        expected = model.generate(torch.from_numpy(ids), **inputs, **settings).numpy()
    actual = runtime.generate(ids, mask, **settings)
    np.testing.assert_array_equal(actual, expected)


@targets
@pytest.mark.parametrize("name", ["causal", "causal-window"])
def test_left_and_right_padding_do_not_change_generated_tokens(exported_for, name, target):
    runtime = Runtime(exported_for(name, target)[1], device="cpu")
    ids, mask = prompts(name)
    rows = [row[real == 1] for row, real in zip(ids, mask)]
    right = np.array([[*row, *[PAD] * (7 - len(row))] for row in rows])
    result = [runtime.generate(inputs, max_new_tokens=6)[:, 7:].tolist() for inputs in (ids, right)]
    assert result[0] == result[1]
    for row, generated in zip(rows, result[0]):
        alone = runtime.generate(row[None], max_new_tokens=6)[0, len(row) :].tolist()
        assert generated[: len(alone)] == alone


def test_window_moves_on_in_caches_of_fixed_size(exported_for):
    """After 256 tokens more than the window, the tokens that no other sees are dropped."""
    model, directory = exported_for("causal-window", "cpu")
    window = model.config.sliding_window
    ids = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])
    settings = dict(max_new_tokens=window + 270, suppress_tokens=[EOS])
    check_tokens(Runtime(directory, device="cpu"), model, ids, np.ones_like(ids), settings)


def test_prompt_longer_than_caches_of_a_window_is_read_in_parts(exported_for):
    model, directory = exported_for("causal-window", "cpu")
    ids = np.random.default_rng(0).integers(4, 40, (8, model.config.sliding_window + 257))
    mask = np.ones_like(ids)
    ids[1, :40], mask[1, :40] = PAD, 0
    settings = dict(max_new_tokens=6, suppress_tokens=[EOS])
    check_tokens(Runtime(directory, device="cpu"), model, ids, mask, settings)
