"""transformers' `EncoderDecoderModel` made of an encoder and a decoder of ours, each a checkpoint
of its own."""

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


def test_it_is_built_from_two_checkpoints_and_trains(model):
    loss = model(input_ids=SOURCE, attention_mask=MASK, labels=SOURCE).loss
    loss.backward()
    assert model.decoder.model.layers[0].cross_attn.k_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("beams", [1, 3])
def test_it_generates_the_same_with_and_without_caches(model, beams):
    settings = dict(
        max_new_tokens=6, num_beams=beams, do_sample=False, decoder_start_token_id=1, pad_token_id=0
    )
    result = [
        model.generate(SOURCE, attention_mask=MASK, use_cache=use, **settings).tolist()
        for use in (True, False)
    ]
    assert result[0] == result[1]


def test_the_decoder_reads_the_source_and_not_what_its_mask_hides(model):
    states = torch.randn(2, 5, 16)
    hidden = states.clone()
    hidden[1, 3:] = 1e6

    def logits(encoder_states):
        return model.decoder(
            SOURCE, encoder_hidden_states=encoder_states, encoder_attention_mask=MASK
        ).logits

    assert torch.equal(logits(states), logits(hidden))
    assert not torch.allclose(logits(states), logits(-states), atol=1e-3)


def test_a_saved_pair_comes_back(model, tmp_path):
    model.save_pretrained(tmp_path / "pair")
    again = EncoderDecoderModel.from_pretrained(tmp_path / "pair").eval()
    given = dict(input_ids=SOURCE, attention_mask=MASK, decoder_input_ids=SOURCE)
    torch.testing.assert_close(again(**given).logits, model(**given).logits)


def test_an_encoder_cannot_be_the_decoder(tmp_path):
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
