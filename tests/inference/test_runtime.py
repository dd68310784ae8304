"""Tests of generated tokens and hidden states, against torch and `transformers.generate`."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from checkpoints import EOS, PAD
from messages import raises
from random_prompts import in_torch, new_from, prompts, prompts_for

from vanilla_transformer_export import Runtime

GENERATORS = ("seq2seq", "seq2seq-untied", "causal", "causal-learned")
every_generator = pytest.mark.parametrize("name", GENERATORS)


@every_generator
@pytest.mark.parametrize("seed", range(3))
def test_greedy_search_matches_transformers(exported, runtimes, name, seed):
    ids, mask = prompts_for(exported, name, seed=seed)
    result = runtimes(name).generate(ids, mask, max_new_tokens=16)
    np.testing.assert_array_equal(
        result, in_torch(exported, name, ids, mask, max_new_tokens=16, do_sample=False)
    )


@every_generator
def test_prompts_of_these_tests_end_after_different_lengths(exported, runtimes, name):
    lengths = set()
    for seed, beams in itertools.product(range(3), (1, 4)):
        ids, mask = prompts_for(exported, name, seed=seed)
        new = runtimes(name).generate(ids, mask, max_new_tokens=16, num_beams=beams)[
            :, new_from(name, ids) :
        ]
        lengths |= {int(row.argmax()) if row.any() else 16 for row in new == EOS}
    assert len(lengths) > 2


# Each length penalty with each way to stop early; "never", whose bound depends on most, with each
# number of beams, the others with one in turn.
BEAMS = [
    (stopping, penalty, num_beams)
    for first, stopping in enumerate([False, True, "never"])
    for second, penalty in enumerate([-1.0, 0.0, 0.6, 1.0, 2.0])
    for third, num_beams in enumerate([2, 3, 5])
    if stopping == "never" or (first + second) % 3 == third
]


@every_generator
@pytest.mark.parametrize("early_stopping, length_penalty, num_beams", BEAMS)
def test_beam_search_matches_transformers(
    exported, runtimes, name, early_stopping, length_penalty, num_beams
):
    options = dict(
        num_beams=num_beams,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
        max_new_tokens=10,
    )
    ids, mask = prompts_for(exported, name, seed=num_beams)
    result = runtimes(name).generate(ids, mask, **options)
    np.testing.assert_array_equal(result, in_torch(exported, name, ids, mask, **options))


@every_generator
@pytest.mark.parametrize("num_beams", [1, 4])
def test_short_and_long_prompts_match_transformers(exported, runtimes, name, num_beams):
    for length, new in ((1, 1), (1, 5), (2, 1), (13, 3), (30, 7)):
        ids, mask = prompts_for(exported, name, lengths=(length, 1, (length + 1) // 2))
        options = dict(num_beams=num_beams, max_new_tokens=new)
        actual, expected = (
            runtimes(name).generate(ids, mask, **options),
            in_torch(exported, name, ids, mask, **options),
        )
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
@every_generator
@pytest.mark.parametrize("num_beams", [1, 2, 3, 4, 5])
def test_random_batches_match_transformers(exported, runtimes, name, num_beams):
    for seed in range(40):
        rng = np.random.default_rng(seed)
        ids, mask = prompts_for(
            exported, name, lengths=tuple(rng.integers(1, 20, rng.integers(1, 8))), seed=seed
        )
        options = dict(num_beams=num_beams, max_new_tokens=int(rng.integers(1, 20)))
        if num_beams > 1:
            options |= dict(
                early_stopping=(False, True, "never")[seed % 3],
                length_penalty=float(rng.uniform(-1, 2)),
            )
        actual, expected = (
            runtimes(name).generate(ids, mask, **options),
            in_torch(exported, name, ids, mask, **options),
        )
        np.testing.assert_array_equal(actual, expected)


@every_generator
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_does_not_change_new_tokens(runtimes, name, num_beams, side):
    ids, mask = prompts(side=side)
    options = dict(num_beams=num_beams, max_new_tokens=8)
    together = runtimes(name).generate(ids, mask, **options)[:, new_from(name, ids) :]
    for row, real in enumerate(mask.astype(bool)):
        prompt = ids[row : row + 1, real]
        alone = runtimes(name).generate(prompt, np.ones_like(prompt), **options)[
            0, new_from(name, prompt) :
        ]
        width = min(len(alone), together.shape[1])
        np.testing.assert_array_equal(together[row, :width], alone[:width])
        assert EOS in alone[:width] or len(alone) == together.shape[1] == 8


def test_returned_prompt_is_padded_on_left(runtimes):
    ids, mask = prompts((2, 3))
    result = runtimes("causal").generate(ids, mask, max_new_tokens=1)
    np.testing.assert_array_equal(result[:, :3], [[PAD, *ids[0, :2]], ids[1]])


def prompts_with_holes(seed=0, lengths=(9, 6, 3, 7), side="right"):
    """Return rows of several lengths in which some inner tokens are masked."""
    ids, mask = prompts(lengths, side=side, seed=seed)
    rng = np.random.default_rng(seed)
    for row in mask:
        first, *inside, last = np.flatnonzero(row)
        row[rng.choice(inside, len(inside) // 2, replace=False)] = 0
    return ids, mask


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["seq2seq", "seq2seq-untied", "seq2seq-rotary"])
def test_masked_inner_source_tokens_count_as_positions(exported, runtimes, name, num_beams):
    """Tokens after a masked token keep their positions, as in transformers."""
    for seed in range(2):
        ids, mask = prompts_with_holes(seed)
        options = dict(max_new_tokens=8, num_beams=num_beams)
        actual, expected = (
            runtimes(name).generate(ids, mask, **options),
            in_torch(exported, name, ids, mask, **options),
        )
        np.testing.assert_array_equal(actual, expected)
        together = runtimes(name).generate(*remove_holes(ids, mask), **options)
        assert actual.tolist() != together.tolist()


def remove_holes(ids, mask):
    order = np.argsort(1 - mask, axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(mask, order, axis=1)


@pytest.mark.parametrize(
    "name", ["encoder", "masked-lm", "classification", "pretraining", "answers", "seq2seq"]
)
@torch.no_grad()
def test_masked_inner_tokens_are_ignored_as_in_torch(exported, runtimes, name):
    """The models have sinusoidal, learned, rotary or no positions, a window, and heads for tokens
    or for texts."""
    model = exported(name).model
    model = model.get_encoder() if name.startswith("seq2seq") else model
    for side in ("right", "left"):
        ids, mask = prompts_with_holes(side=side)
        expected = model(torch.from_numpy(ids), torch.from_numpy(mask))
        for key, actual in runtimes(name).outputs(ids, mask).items():
            reference = expected[key].numpy()
            real = mask == 1 if actual.ndim > 1 and actual.shape[:2] == mask.shape else slice(None)
            np.testing.assert_allclose(actual[real], reference[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["causal", "causal-relative", "causal-learned"])
def test_masked_inner_token_of_decoder_prompt_is_rejected(runtimes, name):
    ids, mask = prompts(side="left", pad=3)
    mask[0] = [0, 0, 1, 1, 0, 0, 1, 1, 1]
    with raises(ValueError, seen=(0, "attention_mask", 6)):
        runtimes(name).generate(ids, mask)
    with raises(ValueError, seen=(0, "attention_mask", 6)):
        runtimes(name).stream(ids, mask)


@every_generator
def test_pad_tokens_are_masked_when_no_mask_is_given(exported, runtimes, name):
    ids, mask = prompts_for(exported, name)
    with_mask = runtimes(name).generate(ids, mask, max_new_tokens=6)
    np.testing.assert_array_equal(runtimes(name).generate(ids, max_new_tokens=6), with_mask)


@pytest.mark.parametrize(
    "name", ["encoder", "masked-lm", "classification", "seq2seq", "seq2seq-untied"]
)
@torch.no_grad()
def test_encode_matches_torch(exported, runtimes, name):
    ids, mask = prompts()
    model = exported(name).model
    model = model.get_encoder() if name.startswith("seq2seq") else model
    expected = model(torch.from_numpy(ids), torch.from_numpy(mask))[0].numpy()
    actual = runtimes(name).encode(ids, mask)
    assert (actual.shape, actual.dtype) == (expected.shape, np.float32)
    real = mask == 1 if actual.ndim == 3 else slice(None)
    np.testing.assert_allclose(actual[real], expected[real], rtol=1e-4, atol=1e-4)
    full = model(torch.from_numpy(ids))[0].numpy()
    np.testing.assert_allclose(runtimes(name).encode(ids), full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["encoder", "masked-lm", "classification", "seq2seq"])
def test_row_of_padding_is_finite_and_does_not_affect_other_rows(runtimes, name):
    ids, mask = prompts((5, 3, 5))
    before = runtimes(name).encode(ids, mask)
    mask[1] = 0
    after = runtimes(name).encode(ids, mask)
    assert np.isfinite(after).all()
    np.testing.assert_allclose(after[[0, 2]], before[[0, 2]], rtol=1e-5, atol=1e-5)


def test_lists_small_integers_and_boolean_masks_are_accepted(runtimes):
    ids, mask = prompts()
    expected = runtimes("seq2seq").generate(ids, mask, max_new_tokens=5)
    for same_ids, same_mask in ((ids.tolist(), mask.tolist()), (ids.astype(np.uint8), mask == 1)):
        np.testing.assert_array_equal(
            runtimes("seq2seq").generate(same_ids, same_mask, max_new_tokens=5), expected
        )


def test_one_thread_gives_the_same_tokens(exported, runtimes):
    ids, mask = prompts()
    result = Runtime(exported("seq2seq").directory, threads=1).generate(ids, mask, max_new_tokens=5)
    np.testing.assert_array_equal(result, runtimes("seq2seq").generate(ids, mask, max_new_tokens=5))


def test_disabled_arena_gives_the_same_tokens(exported, runtimes):
    ids, mask = prompts()
    runtime = Runtime(exported("seq2seq").directory, arena=False)
    assert [
        session.inner.get_session_options().enable_cpu_mem_arena
        for session in runtime.model.loaded.sessions.values()
    ] == [False, False]
    session = runtimes("seq2seq").model.loaded.sessions["decoder"].inner
    assert session.get_session_options().enable_cpu_mem_arena
    expected = runtimes("seq2seq").generate(ids, mask, max_new_tokens=5)
    np.testing.assert_array_equal(runtime.generate(ids, mask, max_new_tokens=5), expected)


def test_runtime_generates_without_importing_torch_or_transformers(exported):
    code = """
import sys
import numpy as np
import vanilla_transformer_export as package
from vanilla_transformer_export import text_runtime
from vanilla_transformer_export.cli import main
from vanilla_transformer_export.engine import search
from vanilla_transformer_export.inference import export_info
from vanilla_transformer_export.targets import registry
loaded = package.Runtime(sys.argv[1])
print(loaded.generate(np.array([[5, 6, 7]]), num_beams=2, max_new_tokens=3).shape[0])
heavy = {"torch", "transformers", "onnx", "onnx_ir", "safetensors"}
print(sorted(heavy & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(exported("seq2seq").directory)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout.split("\n"), done.stderr) == (["1", "[]", ""], "")
