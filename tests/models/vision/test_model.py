"""Tests of the config and the models for images."""

import json
import logging

import pytest
import torch
import transformers
from checkpoints import perturbed
from messages import check_message, raises
from models import VISION
from pictures import CLASSIFIER, SIZES
from torch.nn import functional as F

from vanilla_transformer import VanillaVisionConfig, VanillaVisionForImageClassification
from vanilla_transformer_export import load_checkpoint

# ------------------------------------------------------------------------------------------- config


def test_vision_config_has_no_text_fields_and_is_restored_from_file(tmp_path):
    config = VanillaVisionConfig(
        N=3, d_model=12, h=2, image_size=[8, 20], patch_size=4, num_first_tokens=2
    )
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    again = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert again | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}
    assert not content.keys() & {
        "vocab_size",
        "max_position_embeddings",
        "pad_token_id",
        "tie_word_embeddings",
        "sliding_window",
    }
    assert (config.num_hidden_layers, config.head_dim, config.grid_shape, config.final_norm) == (
        3,
        6,
        (2, 5),
        True,
    )


@pytest.mark.parametrize(
    "field, value, seen, expected",
    [
        ("image_size", 15, ("image_size", 15), ("patch_size", 16)),
        ("image_size", [16, 12], "image_size", "patch_size"),
        ("image_size", [32, 32, 3], "image_size", 1),
        ("patch_size", 0, "patch_size", 1),
        ("num_channels", 0, ("num_channels", 0), 1),
        ("num_first_tokens", 0, ("num_first_tokens", 0), 1),
        ("hidden_act", "none", "hidden_act", ()),
        ("dropout", 1.0, "1.0", ("dropout", 0, 1)),
    ],
)
def test_invalid_config_value_error_names_field(field, value, seen, expected):
    with raises(ValueError, seen=seen, expected=expected):
        VanillaVisionConfig(**{field: value})


def test_misspelled_config_field_warns(caplog):
    logging.getLogger("transformers").propagate = True
    VanillaVisionConfig(imagesize=32)
    check_message(caplog.text, seen="imagesize", expected="image_size")


# -------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize("name", VISION)
def test_auto_classes_load_saved_model_with_same_outputs(name, tmp_path):
    model = perturbed(VISION[name].__name__, dict(SIZES, pooler_act="tanh"))
    model.save_pretrained(tmp_path)
    again, facts = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
    images = torch.randn(2, 3, 18, 18)
    assert not any(facts.values()) and type(again) is type(model)
    with torch.no_grad():
        assert torch.equal(model(images)[0], again.eval()(images)[0])


def test_classifier_returns_loss_attentions_and_hidden_states(checkpoints):
    model = load_checkpoint(checkpoints / "classifier")
    images, labels = torch.randn(3, 3, 18, 18), torch.tensor([0, 3, 6])
    expected = model(images)
    model.set_attn_implementation("eager")
    outputs = model(images, labels=labels, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(outputs.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert outputs.loss.item() == pytest.approx(
        F.cross_entropy(outputs.logits, labels).item(), rel=1e-6
    )
    # 2 tokens and 4 x 4 patches
    assert [tuple(weights.shape) for weights in outputs.attentions] == [(3, 3, 18, 18)] * 2
    torch.testing.assert_close(outputs.attentions[0].sum(-1), torch.ones(3, 3, 18))
    assert len(outputs.hidden_states) == 3


def test_classifier_reads_only_first_tokens(checkpoints):
    model = load_checkpoint(checkpoints / "classifier").double()
    images = torch.randn(2, 3, 18, 18, dtype=torch.float64)
    states = model.model(images).last_hidden_state[:, :2].flatten(1)
    torch.testing.assert_close(
        model(images).logits, states @ model.classifier.weight.T + model.classifier.bias
    )


def test_gradient_checkpointing_gives_the_same_gradients():
    model = perturbed(*CLASSIFIER).double()
    images, labels = torch.randn(2, 3, 18, 18).double(), torch.tensor([1, 2])
    gradients = []
    for enable in (lambda: None, model.gradient_checkpointing_enable):
        enable()
        model.train().zero_grad()
        model(images, labels=labels).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients)) and all(gradient.any() for gradient in gradients[0])


def test_new_weights_have_standard_deviation_of_initializer_range():
    model = VanillaVisionForImageClassification(
        VanillaVisionConfig(num_hidden_layers=1, initializer_range=0.1)
    )
    embeddings = model.model.embeddings
    for values in (embeddings.positions, embeddings.first_tokens, embeddings.embed_patches.weight):
        assert values.std().item() == pytest.approx(0.1, rel=0.1)


def test_images_of_wrong_size_or_channels_raise(checkpoints):
    model = load_checkpoint(checkpoints / "classifier")
    with raises(ValueError, seen=(18, 22), expected=("image_size", 18)):
        model(torch.randn(1, 3, 18, 22))
    with raises(ValueError, seen=1, expected=("num_channels", 3)):
        model(torch.randn(1, 1, 18, 18))


def test_interpolation_is_enabled_by_call_or_config(checkpoints):
    model = load_checkpoint(checkpoints / "body")
    images = torch.randn(1, 3, 26, 31)
    expected = model(images, interpolate_pos_encoding=True).last_hidden_state
    assert expected.shape == (1, 1 + 6 * 7, 24)
    model.config.interpolate_pos_encoding = True
    assert torch.equal(model(images).last_hidden_state, expected)
    with raises(ValueError, expected="image_size"):
        model(images, interpolate_pos_encoding=False)
    # nothing is interpolated at the trained size, and pixels beyond whole patches are ignored
    pixels = torch.randn(1, 3, 18, 18)
    states = [
        model(pixels, interpolate_pos_encoding=flag).last_hidden_state for flag in (True, False)
    ]
    torch.testing.assert_close(*states)
    pixels[..., 16:] = 0
    torch.testing.assert_close(model(pixels).last_hidden_state, states[0])
