"""Tests of positions against the float64 reference of the paper."""

import numpy as np
import pytest
import torch
from reference import position_encoding, relative_bucket, rotation
from reference_models import LENGTH, MASK, assert_close, build, expected_logits, token_rows
from transformers.models.t5.modeling_t5 import T5Attention


@pytest.mark.parametrize("first", [0, 4990, 100_000])
def test_sinusoids_match_formula_at_any_position(first):
    """The first hidden state is the scaled token plus its position."""
    model, weights, _ = build("decoder")
    positions = torch.arange(first, first + 10)
    states = model(
        torch.zeros(1, 10, dtype=int), position_ids=positions[None], output_hidden_states=True
    ).hidden_states
    token = weights["model.embeddings.embed_tokens.weight"][0] * 12**0.5
    expected = np.stack(
        [token + position_encoding(position, 12) for position in range(first, first + 10)]
    )
    assert_close(states[0][0][None], expected[None])


@pytest.mark.parametrize("positions", ["rotary", "relative", "none"])
def test_rotary_relative_or_no_positions_leave_embeddings_unchanged(positions):
    model, weights, _ = build(
        "decoder", {"none": "no positions"}.get(positions, f"{positions} positions")
    )
    tokens = token_rows(LENGTH)
    states = model(tokens, output_hidden_states=True).hidden_states
    assert_close(
        states[0], weights["model.embeddings.embed_tokens.weight"][tokens.numpy()] * 12**0.5
    )


@pytest.mark.parametrize("first", [0, 4990, 100_000])
def test_rotary_positions_depend_on_distances_only_and_have_no_limit(first):
    model, weights, paper = build("decoder", "rotary positions")
    tokens, positions = token_rows(LENGTH), (first + torch.arange(LENGTH)).expand(3, -1)
    batch = dict(tokens=tokens, mask=torch.ones_like(MASK), positions=positions)
    expected = expected_logits("decoder", weights, paper, batch)
    logits = model(tokens, position_ids=positions).logits
    # Beyond 1e-10 float64 itself rounds the angle of position 100,000.
    np.testing.assert_allclose(logits.detach().numpy(), expected, atol=1e-9, rtol=0)
    np.testing.assert_allclose(
        logits.detach().numpy(), model(tokens).logits.detach().numpy(), atol=1e-9, rtol=0
    )


def test_reference_rotation_matches_complex_product_of_equation_12():
    """RoFormer, section 3.2.1: a pair of components is a complex number, times e^(i m theta)."""
    x = np.random.default_rng(0).normal(size=8)
    pairs = (x[0::2] + 1j * x[1::2]) * np.exp(1j * 5 * 10000.0 ** (-np.arange(4) / 4))
    rotated = rotation(5, 8, 10000.0, 1.0) @ x
    np.testing.assert_allclose(rotated[0::2] + 1j * rotated[1::2], pairs)


@pytest.mark.parametrize(
    "buckets, max_distance", [(32, 128), (8, 5), (4, 3), (64, 33), (32, 1000), (10, 17)]
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["both sides", "causal"])
def test_relative_position_buckets_match_definition_and_t5(is_causal, buckets, max_distance):
    model, _, _ = build("decoder" if is_causal else "encoder", "relative positions")
    positions = model.model.relative_positions
    positions.buckets, positions.max_distance = buckets, max_distance
    offsets = torch.arange(-1100, 1101)
    got = positions.bucket(offsets).tolist()
    assert got == [
        relative_bucket(offset, not is_causal, buckets, max_distance) for offset in offsets.tolist()
    ]
    assert (
        got
        == T5Attention._relative_position_bucket(
            offsets, not is_causal, buckets, max_distance
        ).tolist()
    )
