"""Tests of sliding windows: cost is linear in the length of a text.

Tokens and logits equal those of the torch model, which keeps all keys and masks them.
"""

import json
import math
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from checkpoints import EOS, PAD, SIZES, perturbed
from transformers import DynamicCache

from vanilla_transformer_export import Options, Runtime, export
from vanilla_transformer_export.graphs import encoder_attention
from vanilla_transformer_export.inference.rows import GenerationRequest
from vanilla_transformer_export.specs.graph_spec import LONG
from vanilla_transformer_export.targets.cpu import rows as cpu
from vanilla_transformer_export.targets.cpu import slots
from vanilla_transformer_export.targets.portable import rows as portable

CAPACITY = 4
LENGTHS = (23, 2, 17, 9)  # shorter and longer than the window plus CAPACITY
NEW_TOKENS = 30


@pytest.fixture(autouse=True)
def small_capacity(monkeypatch):
    for module in (cpu, slots, portable):
        monkeypatch.setattr(module, "INITIAL_CAPACITY", CAPACITY)


@pytest.fixture
def open_model(exported_for):
    """Return a function from a name and a target to the torch model and its runtime."""

    def load(name, target):
        model, directory = exported_for(name, target)
        return model, Runtime(directory, threads=1)

    return load


def prompts(lengths=LENGTHS):
    """Return ids and mask of prompts, padded on the left."""
    rng = np.random.default_rng(0)
    ids, mask = (
        np.full((len(lengths), max(lengths)), PAD),
        np.zeros((len(lengths), max(lengths)), np.int64),
    )
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = rng.integers(4, 48, length), 1
    return ids, mask


def expected_tokens(model, ids, mask, **options):
    """Generate in torch with a cache that keeps all keys."""
    cache_inputs = {"attention_mask": torch.from_numpy(mask), "past_key_values": DynamicCache()}
    options |= dict(do_sample=False, eos_token_id=EOS, pad_token_id=PAD, max_new_tokens=NEW_TOKENS)
    return model.generate(torch.from_numpy(ids), **cache_inputs, **options).numpy()


CASES = [
    ("causal-window", "cpu"),
    # the layer without a window reads keys that the other no longer reads
    ("causal-grouped", "cpu"),
    ("causal-grouped", "portable"),
    # its caches grow, since relative biases depend on cache positions
    pytest.param("causal-relative", "cpu", marks=pytest.mark.slow),
    ("causal-relative", "portable"),
]


@pytest.mark.parametrize("name, target", CASES)
@pytest.mark.parametrize("beams", [1, 3])
def test_tokens_match_transformers_far_beyond_window(open_model, name, target, beams):
    model, runtime = open_model(name, target)
    ids, mask = prompts()
    settings = dict(num_beams=beams, min_new_tokens=NEW_TOKENS)
    result = runtime.generate(
        ids, mask, **settings, max_new_tokens=NEW_TOKENS, eos_token_id=EOS, pad_token_id=PAD
    )
    np.testing.assert_array_equal(result, expected_tokens(model, ids, mask, **settings))


@pytest.mark.parametrize("name, target", CASES)
def test_logits_of_every_step_match_full_sequence(open_model, name, target):
    model, runtime = open_model(name, target)
    ids, mask = prompts()
    new = np.random.default_rng(1).integers(4, 48, (len(ids), NEW_TOKENS))
    options = Options(max_new_tokens=NEW_TOKENS, eos_token_id=EOS, pad_token_id=PAD)
    decoder = runtime.model.factory.open(GenerationRequest(options, ids, mask))
    result = [decoder.prefill(ids, mask)[:, -1].copy()]
    result += [decoder.step(new[:, place : place + 1])[:, -1].copy() for place in range(NEW_TOKENS)]
    all_ids, all_mask = (
        np.concatenate([ids, new], axis=1),
        np.concatenate([mask, np.ones_like(new)], axis=1),
    )
    positions = torch.from_numpy(np.maximum(all_mask.cumsum(axis=1) - 1, 0))
    with torch.no_grad():
        logits = model(
            torch.from_numpy(all_ids), torch.from_numpy(all_mask), positions, use_cache=False
        ).logits.numpy()
    np.testing.assert_allclose(np.stack(result, axis=1), logits[:, ids.shape[1] - 1 :], atol=2e-5)


def test_cache_size_is_constant_and_follows_window(open_model):
    """Sizes are those of bound inputs (cpu) and of outputs (portable).

    The last step reads no more keys than the first.
    """
    ids, mask = prompts()
    options = dict(max_new_tokens=NEW_TOKENS, eos_token_id=EOS, pad_token_id=PAD)
    for name, target in (("causal-window", "cpu"), ("causal-relative", "portable")):
        model, runtime = open_model(name, target)
        window = model.config.sliding_window
        decoder = runtime.model.factory.open(GenerationRequest(Options(**options), ids, mask))
        decoder.prefill(ids, mask)
        sizes = set()
        for _ in range(NEW_TOKENS):
            decoder.step(np.full((len(ids), 1), 5))
            caches = decoder.caches if target == "cpu" else decoder.past.values()
            sizes |= {cache.shape[2] for cache in caches}
        assert sizes == {window + CAPACITY if target == "cpu" else window - 1}


def test_relative_positions_fit_layers_with_and_without_window():
    """Layers with a window keep fewer keys in their caches than the others."""
    types = ["full_attention", "sliding_attention"]
    fields = dict(
        num_hidden_layers=2, sliding_window=3, layer_types=types, position_embedding_type="relative"
    )
    model = perturbed("VanillaDecoderForCausalLM", SIZES | fields)
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, 48, (2, 7)))
    options = dict(max_new_tokens=6, eos_token_id=None, do_sample=False)
    cached, alone = (model.generate(ids, use_cache=cached, **options) for cached in (True, False))
    assert cached.tolist() == alone.tolist()


# ----------------------------------------------------------------------------------------- encoders


def sources(length):
    """Return three rows: without padding, with padding on the right, and of one token."""
    ids = np.random.default_rng(length).integers(4, 48, (3, length))
    ends = np.array([length, max(1, length // 2), 1])
    return ids, (np.arange(length) < ends[:, None]).astype(np.int64)


@pytest.mark.parametrize("target", ["portable", "cpu"])
@pytest.mark.parametrize("window", [1, 3, 6])
def test_block_attention_matches_masked_attention(window, target, monkeypatch, tmp_path):
    """Windows are smaller than a block or equal to it. Lengths are below, at and above multiples of
    the block."""
    for name, number in (("MIN_BLOCK", 4), ("MIN_BLOCKS", 0), ("LONG", 0)):
        monkeypatch.setattr(encoder_attention, name, number)
    model = perturbed(
        "VanillaEncoderModel", SIZES | dict(num_hidden_layers=2, sliding_window=window)
    )
    model.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", target=target, cases=1)
    runtime = Runtime(tmp_path / "out", threads=1)
    for length in (1, 2, 3, 4, 5, 8, 11, 12, 13, 31):
        ids, mask = sources(length)
        with torch.no_grad():
            expected = model(
                torch.from_numpy(ids), torch.from_numpy(mask)
            ).last_hidden_state.numpy()
        actual = runtime.outputs(ids, mask)["last_hidden_state"]
        np.testing.assert_allclose(actual[mask == 1], expected[mask == 1], atol=2e-5)
        assert np.isfinite(actual).all()


def test_attention_cost_is_linear_in_the_length_of_long_texts(exported, tmp_path):
    """Count the scores of queries and keys, by the shapes that onnxruntime saw."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(
        exported("answers").directory / "onnx/model.onnx", options
    )
    for length in (100, 512, 2048):
        ids = np.full((1, length), 5)
        session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    events = [event["args"] for event in json.loads(Path(session.end_profiling()).read_text())]
    short, *counts = (
        math.prod(event["output_type_shape"][0]["float"])
        for event in events
        if event.get("op_name") == "Softmax" and "output_type_shape" in event
    )
    assert short == 4 * 100 * 100  # of 4 heads
    assert counts[1] == 4 * counts[0] < 4 * 2048 * 2048 / 8


@pytest.mark.parametrize("target", ["portable", "cpu"])
@pytest.mark.parametrize("length", [3, 64, LONG - 1, LONG, LONG + 5, 2000])
def test_encoder_export_matches_torch_at_any_length(exported, tmp_path, length, target):
    model, directory = exported("answers").model, exported("answers").directory
    if target == "cpu":
        directory = tmp_path
        export(exported("answers").checkpoint, directory, target=target, cases=1)
    runtime = Runtime(directory, threads=1)
    ids, mask = sources(length)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids), torch.from_numpy(mask))
    actual = runtime.outputs(ids, mask)
    for name in ("start_logits", "end_logits"):
        np.testing.assert_allclose(
            actual[name][mask == 1], expected[name].numpy()[mask == 1], atol=1e-4
        )
