"""Tests of generation_config.json, against transformers."""

import numpy as np
import pytest
import torch
from checkpoints import EOS, copy_folder, edit_json, seal
from messages import raises
from random_prompts import LENGTHS, in_torch, new_from, prompts, prompts_for

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.errors import UsageError


def with_settings(exported, tmp_path, name, **settings):
    """Return a runtime and transformers' config, from a generation_config.json with `settings`."""
    directory = copy_folder(exported(name).directory, tmp_path)
    edit_json(directory / "generation_config.json", **settings)
    seal(directory)
    model = exported(name).model
    config = type(model.generation_config).from_pretrained(directory)
    return Runtime(directory), config


@pytest.mark.parametrize(
    "settings",
    [
        dict(max_new_tokens=3),
        dict(max_new_tokens=9, num_beams=4),
        dict(max_new_tokens=9, num_beams=3, length_penalty=0.0),
        dict(max_new_tokens=9, num_beams=3, length_penalty=2.0, early_stopping=True),
        dict(max_new_tokens=9, num_beams=3, length_penalty=-1.0, early_stopping="never"),
        dict(max_new_tokens=9, eos_token_id=[EOS, 7, 11]),
        dict(max_new_tokens=9, num_beams=3, eos_token_id=[EOS, 7, 11]),
        dict(max_new_tokens=9, num_beams=2, do_sample=False, use_cache=True, early_stopping=False),
        dict(max_new_tokens=9, pad_token_id=5),
        dict(max_length=12),
        dict(),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["seq2seq", "causal-learned"])
def test_generation_config_of_checkpoint_is_applied(exported, tmp_path, name, settings):
    runtime, config = with_settings(exported, tmp_path, name, **settings)
    ids, mask = prompts_for(exported, name)
    actual, expected = (
        runtime.generate(ids, mask),
        in_torch(exported, name, ids, mask, generation_config=config),
    )
    start = new_from(name, ids)
    np.testing.assert_array_equal(actual[:, start:], expected[:, start:])


@pytest.mark.parametrize(
    "beams", [{}, dict(num_beams=3), dict(num_beams=4, num_return_sequences=3)], ids=str
)
@pytest.mark.parametrize(
    "name, eos", [("seq2seq", EOS), ("causal", [11, 20, EOS])], ids=["seq2seq", "causal"]
)
@pytest.mark.parametrize("pad", [0, None, 5])
def test_finished_rows_are_padded_as_in_transformers(
    exported, tmp_path, monkeypatch, name, pad, eos, beams
):
    """Beam search of transformers treats pad token 0 as none, and pads with the first end token.
    Its greedy search does not."""
    runtime, config = with_settings(exported, tmp_path, name, pad_token_id=pad, eos_token_id=eos)
    monkeypatch.setattr(exported(name).model, "generation_config", config)
    ids, mask = prompts_for(exported, name, lengths=4 * LENGTHS)
    options = dict(max_new_tokens=12, **beams)
    actual, expected = (
        tokens[:, new_from(name, ids) :]
        for tokens in (
            runtime.generate(ids, mask, **options),
            in_torch(exported, name, ids, mask, **options),
        )
    )
    np.testing.assert_array_equal(actual, expected)
    fills = {int(row[-1]) for row in actual if np.isin(row[:-1], eos).any()}
    assert fills == {pad if pad or (pad == 0 and not beams) else np.ravel(eos)[0]}


@pytest.mark.parametrize("pad", [0, 5])
def test_finished_sampled_rows_are_filled_with_pad_token(exported, tmp_path, pad):
    """transformers pads them too. With top_k=1 both draw the only token that is left."""
    runtime, config = with_settings(exported, tmp_path, "seq2seq", pad_token_id=pad)
    ids, mask = prompts_for(exported, "seq2seq", seed=3)
    options = dict(max_new_tokens=12, do_sample=True, top_k=1)
    expected = in_torch(exported, "seq2seq", ids, mask, generation_config=config, **options)
    np.testing.assert_array_equal(runtime.generate(ids, mask, **options), expected)
    assert (expected[:, -1] == pad).any()


def test_options_override_generation_config(exported, tmp_path, runtimes):
    runtime, _ = with_settings(
        exported, tmp_path, "seq2seq", max_new_tokens=3, num_beams=4, length_penalty=0.5
    )
    ids, mask = prompts()
    result = runtime.generate(ids, mask, max_new_tokens=7, num_beams=1)
    np.testing.assert_array_equal(result, runtimes("seq2seq").generate(ids, mask, max_new_tokens=7))


@pytest.mark.parametrize(
    "field, value",
    [
        ("encoder_repetition_penalty", 1.2),
        ("encoder_no_repeat_ngram_size", 3),
        ("sequence_bias", [[[5], 1.5]]),
        ("exponential_decay_length_penalty", [3, 1.1]),
        ("diversity_penalty", 0.5),
        ("penalty_alpha", 0.6),
        ("stop_strings", ["."]),
        ("num_beam_groups", 2),
    ],
)
def test_unsupported_generation_config_field_error_names_field(exported, tmp_path, field, value):
    runtime, _ = with_settings(exported, tmp_path, "seq2seq", **{field: value})
    with raises(ValueError, seen=field) as caught:
        runtime.generate(*prompts())
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["seq2seq", "causal"])
def test_prompt_lookup_is_ignored_in_generation_config_and_rejected_as_an_option(
    exported, tmp_path, runtimes, name
):
    """It gives the tokens of greedy search."""
    runtime, _ = with_settings(
        exported, tmp_path, name, prompt_lookup_num_tokens=3, max_matching_ngram_size=2
    )
    ids, mask = prompts_for(exported, name)
    for options in (dict(num_beams=1), dict(num_beams=3), dict(do_sample=True, seed=1)):
        options |= dict(max_new_tokens=7)
        expected = runtimes(name).generate(ids, mask, **options)
        np.testing.assert_array_equal(runtime.generate(ids, mask, **options), expected)
    for option in ("prompt_lookup_num_tokens", "max_matching_ngram_size"):
        for value in (3, None):
            with raises(UsageError, seen=(option, value), expected="greedy search"):
                runtime.generate(ids, mask, **{option: value})
            with raises(UsageError, seen=(option, value), expected="greedy search"):
                next(runtime.stream(ids, mask, **{option: value}))


@pytest.mark.parametrize("pad, is_read", [(EOS, True), (3, False)])
def test_pad_tokens_are_read_without_a_mask_if_they_are_end_tokens(
    exported, tmp_path, pad, is_read
):
    """transformers takes end tokens in a prompt as text."""
    runtime, config = with_settings(exported, tmp_path, "causal", pad_token_id=pad)
    ids, _ = prompts_for(exported, "causal", lengths=8 * [6])
    ids[:, :4] = pad
    options = dict(max_new_tokens=8, suppress_tokens=[EOS])
    tokens = torch.from_numpy(ids)
    expected = exported("causal").model.generate(tokens, generation_config=config, **options)
    np.testing.assert_array_equal(runtime.generate(ids, **options), expected.numpy())
    read = runtime.generate(ids, np.ones_like(ids), **options)
    assert np.array_equal(read, expected) == is_read
