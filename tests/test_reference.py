"""Every variant and switch against the paper's formulas in numpy."""

import numpy as np
import pytest
import torch
from reference import Paper, decoder_lm, encoder_lm, position_encoding, seq2seq_lm
from transformers import DynamicCache, EncoderDecoderCache

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaEncoderConfig,
    VanillaEncoderForMaskedLM,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
)

VOCABULARY, LENGTH, SOURCE_LENGTH = 23, 7, 5

# What differs from the paper: fields of our config, and the same said to the reference.
CHANGES = {
    "paper": ({}, {}),
    "pre-norm": (dict(norm_first=True), dict(norm_first=True)),
    "learned positions": (dict(position_embedding_type="learned", max_position_embeddings=7), dict(learned_positions=True)),
    "gelu": (dict(hidden_act="gelu"), dict(activation="gelu")),
    "d_k != d_v != D / h": (dict(head_dim=3, value_head_dim=5), dict(d_k=3, d_v=5)),
    "d_k alone": (dict(head_dim=5), dict(d_k=5, d_v=5)),
    "three heads": (dict(num_attention_heads=3), dict(h=3, d_k=4, d_v=4)),
    "five heads that do not divide D": (dict(h=5, head_dim=2, value_head_dim=3), dict(h=5, d_k=2, d_v=3)),
    "embedding norm": (dict(embedding_norm=True), dict(embedding_norm=True)),
    "no embedding scale": (dict(scale_embedding=False), dict(scale_embedding=False)),
    "no bias in the projection": (dict(lm_head_bias=False), dict(lm_head_bias=False)),
    "untied": (dict(tie_word_embeddings=False), dict(tied=False)),
    "large epsilon": (dict(layer_norm_eps=0.1), dict(eps=0.1)),
    "everything": (
        dict(norm_first=True, position_embedding_type="learned", max_position_embeddings=9, hidden_act="gelu", head_dim=3,
             value_head_dim=5, num_attention_heads=3, embedding_norm=True, scale_embedding=False, lm_head_bias=False,
             tie_word_embeddings=False),
        dict(norm_first=True, learned_positions=True, activation="gelu", h=3, d_k=3, d_v=5, embedding_norm=True,
             scale_embedding=False, lm_head_bias=False, tied=False),
    ),
}  # fmt: skip
TIED = ["lm_head.weight", "model.decoder.embeddings.embed_tokens.weight"]
VARIANTS = {
    "encoder": (VanillaEncoderConfig, VanillaEncoderForMaskedLM, dict(num_hidden_layers=2)),
    "decoder": (VanillaDecoderConfig, VanillaDecoderForCausalLM, dict(num_hidden_layers=2)),
    "seq2seq": (VanillaSeq2SeqConfig, VanillaSeq2SeqForConditionalGeneration, dict(encoder_layers=2, decoder_layers=2)),
}


def build(variant, change="paper", attention="eager", dtype=torch.float64):
    """A model with every parameter random, norms and biases included, and what the reference needs of it."""
    config_class, model_class, depth = VARIANTS[variant]
    ours, theirs = CHANGES[change]
    sizes = dict(vocab_size=VOCABULARY, hidden_size=12, intermediate_size=20, num_attention_heads=2) | depth
    if "h" in ours:
        del sizes["num_attention_heads"]
    model = model_class(config_class(**sizes | ours)).eval().to(dtype)
    model.set_attn_implementation(attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.7, 0.7)
    paper = Paper(**dict(d_model=12, h=2, d_k=6, d_v=6, N=2) | theirs)
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    if paper.tied:
        weights = {name: array for name, array in weights.items() if name not in TIED}
    return model, weights, paper


def token_rows(length):
    return torch.randint(0, VOCABULARY, (3, length))


# Three rows: one full, one padded on the right, one padded on the left.
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]])
POSITIONS = (MASK.cumsum(1) - 1).clamp(min=0)
SOURCE_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])


def assert_close(logits, expected, mask=None):
    """1e-10 in float64; 1e-5, relative beyond 1, in float32. Padded positions are nobody's business."""
    real = np.ones(expected.shape[:2], bool) if mask is None else mask.bool().numpy()
    got, expected = logits.detach().double().numpy()[real], expected[real]
    allowed = 1e-10 if logits.dtype == torch.float64 else 1e-5 * np.maximum(1, np.abs(expected))
    assert np.all(np.abs(got - expected) <= allowed), f"largest difference {np.abs(got - expected).max():.1e}"


def expected_logits(variant, weights, paper, batch):
    """The reference, sentence by sentence."""
    tokens, mask, positions = (batch[name].numpy() for name in ("tokens", "mask", "positions"))
    if variant == "seq2seq":
        rows = zip(batch["source"].numpy(), batch["source_mask"].numpy(), tokens, mask, positions, strict=True)
        return np.stack([seq2seq_lm(weights, paper, *row) for row in rows])
    lm = encoder_lm if variant == "encoder" else decoder_lm
    return np.stack([lm(weights, paper, *row) for row in zip(tokens, mask, positions, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_formulas(variant, change, padded, attention, dtype):
    model, weights, paper = build(variant, change, attention, dtype)
    mask = MASK if padded else torch.ones_like(MASK)
    source_mask = SOURCE_MASK if padded else torch.ones_like(SOURCE_MASK)
    positions = POSITIONS if padded else torch.arange(LENGTH).expand(3, -1)
    batch = dict(tokens=token_rows(LENGTH), mask=mask, positions=positions)
    batch |= dict(source=token_rows(SOURCE_LENGTH), source_mask=source_mask)

    if variant == "seq2seq":
        given = dict(input_ids=batch["source"], decoder_input_ids=batch["tokens"])
        if padded:
            given |= dict(attention_mask=source_mask, decoder_attention_mask=mask, decoder_position_ids=positions)
    else:
        given = dict(input_ids=batch["tokens"])
        if padded:
            given |= dict(attention_mask=mask, position_ids=positions)
    assert_close(model(**given).logits, expected_logits(variant, weights, paper, batch), mask)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("chunks", [[1] * 7, [4, 3], [3, 1, 1, 2], [6, 1]], ids=str)
@pytest.mark.parametrize("change", ["paper", "everything", "d_k != d_v != D / h", "learned positions"])
@pytest.mark.parametrize("variant", ["decoder", "seq2seq"])
def test_decoding_with_the_cache_is_one_full_pass(variant, change, chunks, attention):
    model, weights, paper = build(variant, change, attention)
    batch = dict(tokens=token_rows(LENGTH), mask=torch.ones_like(MASK), positions=torch.arange(7).expand(3, -1))
    batch |= dict(source=token_rows(SOURCE_LENGTH), source_mask=SOURCE_MASK)

    cache, logits = None, []
    for chunk in batch["tokens"].split(chunks, dim=1):
        if variant == "seq2seq":
            given = dict(input_ids=batch["source"], attention_mask=SOURCE_MASK, decoder_input_ids=chunk)
        else:
            given = dict(input_ids=chunk)
        outputs = model(**given, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        logits.append(outputs.logits)
    assert isinstance(cache, EncoderDecoderCache if variant == "seq2seq" else DynamicCache)
    assert_close(torch.cat(logits, dim=1), expected_logits(variant, weights, paper, batch))


@pytest.mark.parametrize("chunks", [[1] * 7, [4, 3]], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_decoding_padded_rows_with_the_cache_is_one_full_pass(attention, chunks):
    model, weights, paper = build("decoder", "paper", attention)
    batch = dict(tokens=token_rows(LENGTH), mask=MASK, positions=POSITIONS)
    cache, logits, seen = DynamicCache(), [], 0
    for length in chunks:
        seen += length
        now = slice(seen - length, seen)
        outputs = model(batch["tokens"][:, now], MASK[:, :seen], POSITIONS[:, now], past_key_values=cache, use_cache=True)
        logits.append(outputs.logits)
    assert_close(torch.cat(logits, dim=1), expected_logits("decoder", weights, paper, batch), MASK)


@pytest.mark.parametrize("first", [0, 4990, 100_000])
def test_sinusoids_are_the_formula_at_any_position(first):
    """The first hidden state is the scaled token plus its position."""
    model, weights, _ = build("decoder")
    positions = torch.arange(first, first + 10)
    states = model(torch.zeros(1, 10, dtype=int), position_ids=positions[None], output_hidden_states=True).hidden_states
    token = weights["model.embeddings.embed_tokens.weight"][0] * 12**0.5
    expected = np.stack([token + position_encoding(position, 12) for position in range(first, first + 10)])
    assert_close(states[0][0][None], expected[None])
