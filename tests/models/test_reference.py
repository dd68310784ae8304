"""Tests of every variant and switch against the formulas of the papers in NumPy."""

import itertools

import pytest
import torch
from reference import Paper, pooled, stack
from reference_models import (
    CHANGES,
    LENGTH,
    MASK,
    SOURCE_LENGTH,
    VARIANTS,
    VOCABULARY,
    assert_close,
    build,
    expected_logits,
    randomize,
    token_rows,
)
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from vanilla_transformer import VanillaEncoderConfig, VanillaEncoderModel

ENCODER_ONLY = ["token types", "token types and a norm", "transform in front of the projection"]
ENCODER_ONLY += ["narrow embeddings, token types and a transform", "disentangled positions"]
ONE_STACK_ONLY = ["a window in the first layer", "a base for each type of layers"]
SEQ2SEQ_ONLY = ["each side its own embeddings"]
ALL = [
    (variant, change)
    for variant in VARIANTS
    for change in CHANGES
    if not (
        change in ENCODER_ONLY
        and variant != "encoder"
        or change in SEQ2SEQ_ONLY
        and variant != "seq2seq"
        or change in ONE_STACK_ONLY
        and variant == "seq2seq"
    )
]
ATTENTIONS = ("eager", "sdpa")
attentions = pytest.mark.parametrize("attention", ATTENTIONS)
POSITIONS = (MASK.cumsum(1) - 1).clamp(min=0)
SOURCE_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
# Without padding the model makes the mask and the positions, which other changes do not read.
BY_PLACE = ("paper", "position", "rotary", "window", "base", "everything")
FULL_OR_PADDED = [
    pytest.param(*case, padded, id="-".join([*case, "padded" if padded else "full"]))
    for case in ALL
    for padded in (False, True)
    if padded or any(part in case[1] for part in BY_PLACE)
]


@pytest.mark.parametrize("variant, change, padded", FULL_OR_PADDED)
def test_logits_match_formulas_in_double_and_single_precision(variant, change, padded):
    model, weights, paper = build(variant, change)
    mask = MASK if padded else torch.ones_like(MASK)
    source_mask = SOURCE_MASK if padded else torch.ones_like(SOURCE_MASK)
    positions = POSITIONS if padded else torch.arange(LENGTH).expand(3, -1)
    batch = dict(tokens=token_rows(LENGTH), mask=mask, positions=positions)
    batch |= dict(source=token_rows(SOURCE_LENGTH), source_mask=source_mask)

    if variant == "seq2seq":
        inputs = dict(input_ids=batch["source"], decoder_input_ids=batch["tokens"])
        if padded:
            inputs |= dict(
                attention_mask=source_mask,
                decoder_attention_mask=mask,
                decoder_position_ids=positions,
            )
    else:
        inputs = dict(input_ids=batch["tokens"])
        if padded:
            inputs |= dict(attention_mask=mask, position_ids=positions)
    if "type_vocab_size" in CHANGES[change][0]:
        batch["types"] = inputs["token_type_ids"] = torch.randint(0, 3, (3, LENGTH))
    expected = expected_logits(variant, weights, paper, batch)
    for dtype, attention in itertools.product((torch.float64, torch.float32), ATTENTIONS):
        model.to(dtype).set_attn_implementation(attention)
        assert_close(model(**inputs).logits, expected, mask)


def test_token_type_defaults_to_0():
    model, weights, paper = build("encoder", "token types")
    batch = dict(
        tokens=token_rows(LENGTH),
        mask=torch.ones_like(MASK),
        positions=torch.arange(LENGTH).expand(3, -1),
    )
    batch |= dict(types=torch.zeros_like(MASK))
    assert_close(model(batch["tokens"]).logits, expected_logits("encoder", weights, paper, batch))


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("act", ["tanh", "gelu"])
def test_pooler_applies_linear_map_and_activation_to_first_state(act, padded):
    config = VanillaEncoderConfig(
        vocab_size=VOCABULARY, d_model=12, d_ff=20, h=2, N=2, pooler_act=act
    )
    model = VanillaEncoderModel(config).eval()
    weights, paper = randomize(model), Paper(d_model=12, h=2, d_k=6, d_v=6, N=2)
    tokens, mask = token_rows(LENGTH), MASK[[0, 1, 1]] if padded else torch.ones_like(MASK)
    outputs = model.double()(tokens, **dict(attention_mask=mask) if padded else {})
    for row, real, states, got in zip(
        tokens, mask, outputs.last_hidden_state, outputs.pooler_output, strict=True
    ):
        table = weights["embeddings.embed_tokens.weight"]
        expected = stack(weights, "", paper, table, row.numpy(), range(LENGTH), real.numpy(), False)
        assert_close(states[None], expected[None], real[None])
        assert_close(got[None, None], pooled(weights, "pooler", act, expected)[None, None])


# ------------------------------------------------------------------------------------------- caches


CACHED = [
    "paper", "everything", "everything, rotary", "d_k != d_v != D / h", "learned positions",
    "rotary positions", "relative positions", "no positions", "window of two",
    "window of three, rotary", "window of three, relative", "narrow embeddings",
]  # fmt: skip


def cache_for(model, kind):
    """Return a static cache with spare positions, or None to let the model make a dynamic cache."""
    if kind == "dynamic":
        return None
    static = StaticCache(config=model.config, max_cache_len=LENGTH + 2)
    return (
        EncoderDecoderCache(static, DynamicCache()) if model.config.is_encoder_decoder else static
    )


# Each pair of a cache, a way to fill it, and an attention.
WAYS = [
    ("dynamic", [1] * 7, "eager"),
    ("dynamic", [3, 1, 3], "sdpa"),
    ("static", [1] * 7, "sdpa"),
    ("static", [3, 1, 3], "eager"),
]


@pytest.mark.parametrize("change", CACHED)
@pytest.mark.parametrize("variant", ["decoder", "seq2seq"])
def test_cached_decoding_matches_full_pass(variant, change):
    model, weights, paper = build(variant, change)
    batch = dict(
        tokens=token_rows(LENGTH),
        mask=torch.ones_like(MASK),
        positions=torch.arange(7).expand(3, -1),
    )
    batch |= dict(source=token_rows(SOURCE_LENGTH), source_mask=SOURCE_MASK)
    source = dict(input_ids=batch["source"], attention_mask=SOURCE_MASK)
    expected = expected_logits(variant, weights, paper, batch)
    for kind, chunks, attention in WAYS:
        model.set_attn_implementation(attention)
        cache, logits = cache_for(model, kind), []
        for chunk in batch["tokens"].split(chunks, dim=1):
            inputs = dict(input_ids=chunk)
            if variant == "seq2seq":
                inputs = source | dict(decoder_input_ids=chunk)
            outputs = model(**inputs, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            logits.append(outputs.logits)
        cache_class = StaticCache if kind == "static" else DynamicCache
        assert isinstance(cache, EncoderDecoderCache if variant == "seq2seq" else cache_class)
        assert_close(torch.cat(logits, dim=1), expected)


@pytest.mark.parametrize("change", CACHED)
def test_cached_decoding_of_padded_rows_matches_full_pass(change):
    model, weights, paper = build("decoder", change)
    batch = dict(tokens=token_rows(LENGTH), mask=MASK, positions=POSITIONS)
    expected = expected_logits("decoder", weights, paper, batch)
    for kind, chunks, attention in WAYS:
        model.set_attn_implementation(attention)
        cache, logits, seen = cache_for(model, kind), [], 0
        for length in chunks:
            seen += length
            chunk_slice = slice(seen - length, seen)
            outputs = model(
                batch["tokens"][:, chunk_slice],
                MASK[:, :seen],
                POSITIONS[:, chunk_slice],
                past_key_values=cache,
                use_cache=True,
            )
            cache = outputs.past_key_values
            logits.append(outputs.logits)
        assert_close(torch.cat(logits, dim=1), expected, MASK)
