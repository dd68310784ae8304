"""Tests of transformers' `EncoderDecoderModel` with our encoder and decoder."""

import pytest
import torch
from messages import raises
from transformers import EncoderDecoderConfig, EncoderDecoderModel

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaEncoderConfig,
    VanillaEncoderForMaskedLM,
    VanillaEncoderModel,
)

SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=20,
    num_attention_heads=2,
    num_hidden_layers=2,
    eos_token_id=None,
)
SOURCE = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]])
MASK = (SOURCE != 0).long()


@pytest.fixture
def model(tmp_path):
    VanillaEncoderModel(VanillaEncoderConfig(**SIZES)).save_pretrained(tmp_path / "encoder")
    VanillaDecoderForCausalLM(VanillaDecoderConfig(**SIZES)).save_pretrained(tmp_path / "decoder")
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(
        tmp_path / "encoder", tmp_path / "decoder"
    )
    model.config.update(dict(decoder_start_token_id=1, pad_token_id=0))
    return model.eval()


def test_model_from_two_checkpoints_trains(model):
    loss = model(input_ids=SOURCE, attention_mask=MASK, labels=SOURCE).loss
    loss.backward()
    assert model.decoder.model.layers[0].cross_attn.k_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_is_equal_with_and_without_cache(model, beams):
    settings = dict(
        max_new_tokens=6, num_beams=beams, do_sample=False, decoder_start_token_id=1, pad_token_id=0
    )
    result = [
        model.generate(SOURCE, attention_mask=MASK, use_cache=use_cache, **settings).tolist()
        for use_cache in (True, False)
    ]
    assert result[0] == result[1]


def test_decoder_reads_source_but_not_masked_tokens(model):
    states = torch.randn(2, 5, 16)
    hidden = states.clone()
    hidden[1, 3:] = 1e6

    def logits(encoder_states):
        return model.decoder(
            SOURCE, encoder_hidden_states=encoder_states, encoder_attention_mask=MASK
        ).logits

    assert torch.equal(logits(states), logits(hidden))
    assert not torch.allclose(logits(states), logits(-states), atol=1e-3)


def test_saved_model_loads_with_equal_logits(model, tmp_path):
    model.save_pretrained(tmp_path / "pair")
    loaded = EncoderDecoderModel.from_pretrained(tmp_path / "pair").eval()
    batch = dict(input_ids=SOURCE, attention_mask=MASK, decoder_input_ids=SOURCE)
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits)


def test_encoder_as_decoder_raises(tmp_path):
    config = VanillaEncoderConfig(**SIZES)
    VanillaEncoderModel(config).save_pretrained(tmp_path)
    for make in (
        lambda: EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path, tmp_path),
        lambda: EncoderDecoderModel(
            encoder=VanillaEncoderModel(config), decoder=VanillaEncoderForMaskedLM(config)
        ),
        lambda: EncoderDecoderConfig.from_encoder_decoder_configs(config, config),
        lambda: VanillaEncoderConfig(**SIZES, is_decoder=True),
        lambda: VanillaEncoderConfig(**SIZES, add_cross_attention=True),
    ):
        with raises(ValueError, seen="VanillaEncoderConfig", expected="VanillaDecoderForCausalLM"):
            make()
    assert VanillaEncoderConfig(**SIZES, is_decoder=False).is_decoder is False
