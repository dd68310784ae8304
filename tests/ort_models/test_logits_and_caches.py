"""Tests of the logits and caches of generators, as loops of callers use them."""

import copy

import numpy as np
import pytest
import torch
from messages import raises
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from vanilla_transformer_export import Options
from vanilla_transformer_export.ort_models import (
    ORTModelForCausalLM,
    ORTModelForImageClassification,
    ORTModelForSeq2SeqLM,
)
from vanilla_transformer_export.ort_models.decoder_cache import DecoderCache
from vanilla_transformer_export.ort_models.generation import CACHE, with_source


@torch.no_grad()
def test_decoder_logits_match_torch(saved):
    exported = saved("causal")
    ours = ORTModelForCausalLM.from_pretrained(exported.directory)
    theirs = AutoModelForCausalLM.from_pretrained(exported.checkpoint).eval()
    ids = torch.randint(3, 48, (2, 6))
    for mask in ([0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]):
        mask = torch.tensor([mask, [1] * 6])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        expected = theirs(ids, attention_mask=mask, position_ids=positions).logits
        actual = ours(ids, attention_mask=mask).logits
        torch.testing.assert_close(actual[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-5)
    # in a loop of the caller the cache replaces the tokens already read
    output = ours(ids[:, :4], return_dict=False)
    following = ours(ids[:, 4:], **{CACHE: output[1]}).logits
    torch.testing.assert_close(following, theirs(ids).logits[:, 4:], rtol=1e-4, atol=1e-5)
    assert isinstance(output[1], DecoderCache)
    assert isinstance(ours(ids.numpy()).logits, np.ndarray)


@torch.no_grad()
def test_seq2seq_logits_and_states_match_torch(saved):
    exported = saved("seq2seq")
    ours = ORTModelForSeq2SeqLM.from_pretrained(exported.directory)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(exported.checkpoint).eval()
    ids, targets = torch.randint(3, 48, (2, 6)), torch.randint(3, 48, (2, 4))
    mask, targets_mask = torch.ones_like(ids), torch.ones_like(targets)
    mask[1, 4:] = targets_mask[0, 3:] = 0
    inputs = {"attention_mask": mask, "decoder_input_ids": targets}
    actual = ours(ids, mask, targets, targets_mask)
    expected = theirs(ids, decoder_attention_mask=targets_mask, **inputs)
    for name, real in (("logits", targets_mask), ("encoder_last_hidden_state", mask)):
        torch.testing.assert_close(
            actual[name][real == 1], expected[name][real == 1], rtol=1e-4, atol=1e-5
        )
    states = ours.get_encoder()(ids, attention_mask=mask)
    assert torch.equal(ours(encoder_outputs=states, **inputs).logits, actual.logits)
    tokens = ours.generate(encoder_outputs=states, attention_mask=mask, max_new_tokens=6)
    assert torch.equal(tokens, theirs.generate(ids, attention_mask=mask, max_new_tokens=6))
    prefix = {"decoder_input_ids": targets, "decoder_attention_mask": torch.ones_like(targets)}
    options = {"attention_mask": mask, "max_new_tokens": 4}
    expected = theirs.generate(ids, **prefix, **options)
    assert torch.equal(ours.generate(ids, **prefix, **options), expected)
    with raises(ValueError, seen="decoder_attention_mask", expected="zeros only on the right"):
        ours(ids, mask, targets, targets_mask.flip(1))
    with raises(ValueError, seen=torch.ones_like(mask).tolist(), expected=mask.tolist()):
        ours(None, torch.ones_like(mask), targets, None, states)
    with pytest.raises(ValueError, match="encoder_outputs has no source"):
        ours(encoder_outputs=theirs.get_encoder()(ids), **inputs)
    with pytest.raises(ValueError, match="decoder_input_ids has 1 rows, expected 2"):
        ours(ids, decoder_input_ids=targets[:1])
    with pytest.raises(ValueError, match="needs the input decoder_input_ids, got None"):
        ours(ids)


@torch.no_grad()
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_caches_are_cropped_and_reordered_and_other_changes_raise(saved, target):
    exported = saved("causal", target)
    ours = ORTModelForCausalLM.from_pretrained(exported.directory)
    theirs = AutoModelForCausalLM.from_pretrained(exported.checkpoint).eval()
    ids = torch.randint(3, 48, (2, 7))
    logits = []
    for model in (ours, theirs):
        cache = model(ids, logits_to_keep=1)[CACHE]
        cache.crop(-2)
        for _ in range(3):
            cache.reorder_cache(torch.tensor([1, 0]))
        # the third argument is that of optimum
        arguments = (ids[:, 5:6], None, cache) if model is ours else (ids[:, 5:6],)
        options = {} if model is ours else {CACHE: cache}
        logits.append(model(*arguments, logits_to_keep=1, **options).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    cache = ours(ids, logits_to_keep=1)[CACHE]
    for tokens in (3, -8):
        with raises(ValueError, seen=tokens, expected=(-7, 0)):
            cache.crop(tokens)
    for call in (cache.reset, lambda: cache.batch_select_indices([0]), lambda: copy.copy(cache)):
        with pytest.raises(NotImplementedError, match="reset|batch_select_indices|copy"):
            call()
    with raises(ValueError, seen=1, expected=2):
        ours(ids[:1, :1], **{CACHE: cache})
    again = ORTModelForCausalLM.from_pretrained(saved("causal").directory)
    for call in (
        lambda: again(ids, **{CACHE: cache}),
        lambda: again.generate(ids, **{CACHE: cache}),
    ):
        with raises(
            ValueError, seen=str(exported.directory), expected=str(saved("causal").directory)
        ):
            call()


@torch.no_grad()
def test_seq2seq_cache_is_cropped_where_the_decoder_can(saved):
    exported = saved("seq2seq")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(exported.checkpoint).eval()
    ids, targets = torch.randint(3, 48, (2, 6)), torch.randint(3, 48, (2, 5))
    expected = theirs(ids, decoder_input_ids=targets[:, :4]).logits[:, 3:]
    for target in ("portable", "cpu"):
        ours = ORTModelForSeq2SeqLM.from_pretrained(saved("seq2seq", target).directory)
        states = with_source(torch.zeros(2, 6, 1), ids, None)  # cpu exports return none
        inputs = {"encoder_outputs": states, "logits_to_keep": 1}
        cache = ours(decoder_input_ids=targets, **inputs)[CACHE]
        if target == "cpu":
            with raises(ValueError, seen=-2, expected=0):
                cache.crop(-2)
            continue
        cache.crop(-2)
        actual = ours(decoder_input_ids=targets[:, 3:4], **inputs, **{CACHE: cache}).logits
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    unused = DecoderCache(ours.runtime, Options(9))
    unused.crop(0)
    with raises(ValueError, seen=-1, expected=0):
        unused.crop(-1)


def test_padding_after_first_call_and_other_positions_raise(saved):
    model = ORTModelForCausalLM.from_pretrained(saved("causal").directory)
    ids, mask = torch.randint(3, 48, (2, 6)), torch.tensor([[0, 0, 1, 1, 0, 1], [1] * 6])
    cache = model(ids[:, :4], mask[:, :4])[CACHE]
    for column in (0, 1, 3, 4):
        changed = torch.ones_like(mask)
        changed[0, :2] = changed[1, column] = 0
        with raises(ValueError, seen=("attention_mask", [2, 1]), expected=[2, 0]):
            model(ids[:, 4:], changed, **{CACHE: cache})
    with raises(ValueError, seen=("attention_mask", [1, 0]), expected=[0, 0]):
        model(ids[:, 4:], mask[:, 4:], **{CACHE: cache})
    for ones in (torch.ones(2, 3), torch.ones(6), torch.ones(1, 2)):
        with raises(ValueError, seen=str(tuple(ones.shape)), expected=("(2, 6)", "(2, 2)")):
            model(ids[:, 4:], ones, **{CACHE: cache})
    whole = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    model(ids[:, 4:], whole, position_ids=torch.tensor([[2, 3], [4, 5]]), **{CACHE: cache})
    positions = torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]])
    model(ids[:, :4], mask[:, :4], position_ids=positions)
    with raises(ValueError, seen=positions.tolist(), expected=[[0, 1, 2, 3], [0, 1, 2, 3]]):
        model(ids[:, :4], position_ids=positions)


@torch.no_grad()
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_last_logits_of_padded_rows_match_torch(saved, target):
    exported = saved("causal", target)
    ours = ORTModelForCausalLM.from_pretrained(exported.directory)
    theirs = AutoModelForCausalLM.from_pretrained(exported.checkpoint).eval()
    ids = torch.randint(3, 48, (2, 7))
    for mask, kept in (([0] * 2 + [1] * 5, 5), ([1] * 4 + [0] * 3, 5), ([1] * 7, 9)):
        mask = torch.tensor([mask, [1] * 7])
        if target == "cpu" and not mask[:, -kept:].all():
            with raises(ValueError, seen="cpu", expected=("logits_to_keep", 1, "portable")):
                ours(ids, mask, logits_to_keep=kept)
            continue
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        expected = theirs(ids, attention_mask=mask, position_ids=positions).logits[:, -kept:]
        actual, real = ours(ids, mask, logits_to_keep=kept).logits, mask[:, -kept:] == 1
        torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-5)
    for kept in (-1, torch.tensor([0, 2])):
        with raises(ValueError, seen=("logits_to_keep", str(kept)), expected=0):
            ours(ids, logits_to_keep=kept)


def test_images_may_be_the_first_argument(saved):
    model = ORTModelForImageClassification.from_pretrained(saved("images").directory)
    size = model.config.image_size
    images = torch.rand(
        2, model.config.num_channels, *([size] * 2 if isinstance(size, int) else size)
    )
    assert torch.equal(model(images).logits, model(pixel_values=images).logits)


def test_cpu_target_raises_for_logits_it_does_not_return(saved):
    decoder = ORTModelForCausalLM.from_pretrained(saved("causal", "cpu").directory)
    ids = torch.randint(3, 48, (1, 6))
    with pytest.raises(ValueError, match="target 'cpu' returns only the logits after the last"):
        decoder(ids)
    assert decoder(ids, logits_to_keep=1).logits.shape == (1, 1, 48)
    seq2seq = ORTModelForSeq2SeqLM.from_pretrained(saved("seq2seq", "cpu").directory)
    with pytest.raises(ValueError, match="returns keys and values for its decoder only"):
        seq2seq(ids, decoder_input_ids=ids)


def test_invalid_tokens_and_masks_raise_and_error_names_values(saved):
    model = ORTModelForCausalLM.from_pretrained(saved("causal").directory)
    ids = torch.randint(3, 48, (2, 6))
    with raises(ValueError, seen=(3, 48), expected=("input_ids", 0, 47)):
        model(torch.tensor([[3, 48]]))
    with raises(ValueError, seen=("attention_mask", "row 1", "is 0"), expected="a token"):
        model(ids, attention_mask=torch.tensor([[1] * 6, [0] * 6]))
    with raises(ValueError, seen=("row 1", "attention_mask", "position 2"), expected="one block"):
        model(ids, attention_mask=torch.tensor([[1] * 6, [1, 0, 1, 1, 1, 1]]))
    with raises(ValueError, seen=61, expected=(60, "learned positions")):
        model(torch.full((1, 61), 5))
