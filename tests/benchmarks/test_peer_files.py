"""Tests of the graphs that other engines get."""

import pytest
import torch
from checkpoints import perturbed
from peer_files import Encoder


@pytest.mark.parametrize("window", [None, 4])
def test_trace_of_a_short_text_keeps_the_window_of_layers(window):
    fields = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 30}
    fields |= {"sliding_window": window}
    if window:
        fields |= {"layer_types": ["full_attention", "sliding_attention"]}
    model = perturbed("VanillaEncoderModel", fields).eval()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        traced = torch.jit.trace(Encoder(model), 2 * (torch.ones(2, 7, dtype=torch.long),))
        ids = torch.randint(3, 30, (2, 40))
        mask = (torch.arange(40) < torch.tensor([[40], [25]])).long()
        expected = model(ids, mask).last_hidden_state
        error = (traced(ids, mask) - expected)[mask.bool()].abs().max()
    assert error < 1e-5 * expected.abs().max()
