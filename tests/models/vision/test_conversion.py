"""Tests of conversion of ViT, DeiT and DINOv2, against transformers."""

import json

import pytest
import torch
import transformers
from families import ARCHITECTURES, assert_exact, random_config, random_model
from messages import raises
from safetensors.torch import load_file, save_file
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import vanilla_transformer
from vanilla_transformer.conversion import convert, plan_conversion
from vanilla_transformer.training.averaging import average

DEIT = "DeiTForImageClassificationWithTeacher"


def save_and_convert(model, folder):
    model.save_pretrained(folder / "theirs")
    facts = convert(folder / "theirs", folder / "ours")
    return (
        getattr(vanilla_transformer, facts["architecture"]).from_pretrained(folder / "ours").eval()
    )


# later versions of torch reject `x.T` of a vector
@pytest.mark.filterwarnings("error:The use of `x.T`")
@pytest.mark.parametrize(
    "architecture, dtype",
    [
        *(
            (name, torch.float32)
            for name in ("ViTModel", "ViTForImageClassification", "DeiTModel", DEIT, "Dinov2Model")
        ),
        *((name, torch.float64) for name in ("ViTModel", DEIT)),  # DINOv2 interpolates in float32
    ],
)
def test_converted_model_matches_source_at_other_image_sizes(architecture, dtype, tmp_path):
    family = next(name for name, names in ARCHITECTURES.items() if architecture in names)
    config = random_config(family, architecture, 0)
    # transformers interpolates only square sizes that are set as one number
    config.update(dict(image_size=13, patch_size=4))
    theirs = random_model(architecture, config, dtype)
    ours = save_and_convert(theirs, tmp_path)
    for size in ((13, 13), (4, 4), (30, 11), (7, 29)):
        images = torch.randn(2, config.num_channels, *size, dtype=dtype)
        with torch.no_grad():
            expected = theirs(
                images, **({} if family == "dinov2" else {"interpolate_pos_encoding": True})
            )
            got = ours(images, interpolate_pos_encoding=True)
            # DINOv2 always interpolates
            assert torch.equal(ours(images)[0], got[0]) if family == "dinov2" else True
        for name in ("last_hidden_state", "pooler_output", "logits"):
            if name in expected and name in got:
                assert_exact(got[name], expected[name], dtype)


def test_both_tensor_naming_schemes_are_read_and_hub_names_are_written(tmp_path):
    theirs = random_model(
        "ViTForImageClassification", random_config("vit", "ViTForImageClassification", 0)
    )
    save_and_convert(theirs, tmp_path)
    (tmp_path / "new").mkdir()
    theirs.config.save_pretrained(tmp_path / "new")
    save_file(
        {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()},
        tmp_path / "new/model.safetensors",
    )
    convert(tmp_path / "new", tmp_path / "ours-too")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "ours-too"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    convert(tmp_path / "ours", tmp_path / "back", to="vit")
    there, back = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert "vit.encoder.layer.0.attention.attention.query.weight" in back
    assert there.keys() == back.keys() and all(
        torch.equal(there[name], back[name]) for name in there
    )


def test_plan_lists_merged_tensors_and_missing_tensor_raises(tmp_path):
    random_model(DEIT, random_config("deit", DEIT, 0)).save_pretrained(tmp_path)
    plan_text = str(plan_conversion(tmp_path))
    assert (
        "cls_classifier.bias and distillation_classifier.bias -> classifier.bias [3]  (mean)"
        in plan_text
    )
    weights = load_file(tmp_path / "model.safetensors")
    del weights["distillation_classifier.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with raises(ValueError, seen="distillation_classifier.bias"):
        plan_conversion(tmp_path)


def test_unsupported_head_error_names_architecture(tmp_path):
    config = random_config("vit", "ViTForMaskedImageModeling", 0)
    transformers.ViTForMaskedImageModeling(config).save_pretrained(tmp_path)
    with raises(ValueError, seen="ViTForMaskedImageModeling", expected="ViTModel"):
        convert(tmp_path, tmp_path / "ours")


def test_pooler_of_other_width_raises(tmp_path):
    config = random_config("vit", "ViTModel", 0)
    config.pooler_output_size = config.hidden_size + 1
    transformers.ViTModel(config).save_pretrained(tmp_path)
    with raises(ValueError, seen="pooler_output_size"):
        convert(tmp_path, tmp_path / "ours")


def test_image_processor_is_copied_with_weights(checkpoints, tmp_path):
    theirs = random_model(
        "ViTForImageClassification", random_config("vit", "ViTForImageClassification", 0)
    )
    theirs.save_pretrained(tmp_path / "theirs")
    # names no class of image processor
    old = {
        "do_normalize": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.2] * 3,
        "size": 13,
    }
    (tmp_path / "theirs/preprocessor_config.json").write_text(json.dumps(old))
    convert(tmp_path / "theirs", tmp_path / "ours")
    expected = transformers.AutoImageProcessor.from_pretrained(tmp_path / "theirs")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "ours")
    assert type(processor) is ViTImageProcessorPil and processor.to_dict() == expected.to_dict()
    convert(tmp_path / "ours", tmp_path / "back", to="vit")
    assert (
        transformers.AutoImageProcessor.from_pretrained(tmp_path / "back").to_dict()
        == expected.to_dict()
    )
    average([checkpoints / "body"] * 2, tmp_path / "mean")
    assert transformers.AutoImageProcessor.from_pretrained(tmp_path / "mean").size.height == 18
    # force replaces a checkpoint that has this file
    convert(tmp_path / "theirs", tmp_path / "ours", force=True)
