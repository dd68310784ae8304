"""Models of images: against ViT and DeiT of transformers, its PIL image processors and its
pipelines."""

import json
import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
import standins
import torch
import transformers
from checkpoints import (
    Exported,
    copy_folder,
    default_graphs,
    default_parity,
    edit_json,
    list_file,
    perturbed,
    seal,
)
from families import ARCHITECTURES, assert_exact, random_config, random_model
from models import VISION
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import vanilla_transformer
from vanilla_transformer import VanillaVisionConfig, VanillaVisionForImageClassification
from vanilla_transformer.attention_maps import image_attention_maps, plot, save_attention_maps
from vanilla_transformer.checkpoint import load_checkpoint, load_image_processor
from vanilla_transformer.conversion import convert, plan_conversion
from vanilla_transformer.errors import UsageError
from vanilla_transformer.info import info
from vanilla_transformer.training.averaging import average
from vanilla_transformer.training.recipe import Recipe, read_recipe
from vanilla_transformer.training.run import train
from vanilla_transformer_export import ImageRuntime, Runtime, TextRuntime, export, verify
from vanilla_transformer_export.cli.main import main
from vanilla_transformer_export.errors import UsageError as ExportUsageError
from vanilla_transformer_export.text.image_processor import ImageProcessor

SIZES = dict(
    hidden_size=24,
    intermediate_size=32,
    num_attention_heads=3,
    num_hidden_layers=2,
    image_size=18,
    patch_size=4,
)
LABELS = {index: f"label {index}" for index in range(7)}
CLASSIFIER = (
    "VanillaVisionForImageClassification",
    dict(SIZES, num_first_tokens=2, id2label=LABELS),
)
BODY = ("VanillaVisionModel", dict(SIZES, pooler_act="tanh"))
RANDOM = np.random.default_rng(0)


def picture(height, width, mode="RGB"):
    return Image.fromarray(RANDOM.integers(0, 256, (height, width, 4)).astype(np.uint8)).convert(
        mode
    )


PICTURES = [
    picture(30, 41),
    picture(18, 18),
    picture(1, 1),
    picture(9, 60, "LA"),
    picture(25, 20, "P"),
    picture(7, 8, "1"),
]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """The directories of a classifier and of a body, with image processors."""
    root = tmp_path_factory.mktemp("vision")
    for name, (architecture, fields) in {"classifier": CLASSIFIER, "body": BODY}.items():
        perturbed(architecture, fields).save_pretrained(root / name)
        ViTImageProcessorPil(size=18).save_pretrained(root / name)
    return root


@pytest.fixture(scope="session")
def classifier(checkpoints):
    directory = checkpoints / "classifier-cpu"
    export(checkpoints / "classifier", directory, target="cpu", cases=3)
    return Exported(
        load_checkpoint(checkpoints / "classifier"), checkpoints / "classifier", directory
    )


@pytest.fixture(scope="session")
def body(checkpoints):
    """Of any size."""
    directory = checkpoints / "body-portable"
    export(checkpoints / "body", directory, cases=6, image_size="free")
    return Exported(load_checkpoint(checkpoints / "body"), checkpoints / "body", directory)


# ------------------------------------------------------------------------------------------- config


def test_the_config_of_images_has_no_vocabulary_and_comes_back_the_same(tmp_path):
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
    "field, value, said",
    [
        ("image_size", 15, "image_size must be at least patch_size, 16, got 15"),
        ("image_size", [16, 12], "image_size must be at least patch_size"),
        ("image_size", [32, 32, 3], "image_size must be one or two numbers from 1 to"),
        ("patch_size", 0, "patch_size must be one or two numbers from 1 to"),
        ("num_channels", 0, "num_channels must be at least 1, got 0"),
        ("num_first_tokens", 0, "num_first_tokens must be at least 1, got 0"),
        ("hidden_act", "none", "hidden_act must be one of"),
        ("dropout", 1.0, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(field, value, said):
    with pytest.raises(ValueError, match=said):
        VanillaVisionConfig(**{field: value})


def test_a_near_miss_of_a_field_warns(caplog):
    logging.getLogger("transformers").propagate = True
    VanillaVisionConfig(imagesize=32)
    assert "has no field 'imagesize'; did you mean 'image_size'?" in caplog.text


# -------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize("name", VISION)
def test_auto_classes_load_a_saved_model_with_the_same_outputs(name, tmp_path):
    model = perturbed(VISION[name].__name__, dict(SIZES, pooler_act="tanh"))
    model.save_pretrained(tmp_path)
    again, facts = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
    images = torch.randn(2, 3, 18, 18)
    assert not any(facts.values()) and type(again) is type(model)
    with torch.no_grad():
        assert torch.equal(model(images)[0], again.eval()(images)[0])


def test_states_attentions_and_the_loss(checkpoints):
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


def test_the_classifier_reads_all_first_tokens_and_nothing_else(checkpoints):
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


def test_new_weights_have_the_initializer_s_deviation():
    model = VanillaVisionForImageClassification(
        VanillaVisionConfig(num_hidden_layers=1, initializer_range=0.1)
    )
    embeddings = model.model.embeddings
    for values in (embeddings.positions, embeddings.first_tokens, embeddings.embed_patches.weight):
        assert values.std().item() == pytest.approx(0.1, rel=0.1)


def test_images_that_the_model_does_not_read_are_refused(checkpoints):
    model = load_checkpoint(checkpoints / "classifier")
    with pytest.raises(
        ValueError,
        match=r"height and width \(18, 22\), expected image_size, \(18, 18\), or interpolate_pos",
    ):
        model(torch.randn(1, 3, 18, 22))
    with pytest.raises(ValueError, match="have 1 channels, expected num_channels, 3"):
        model(torch.randn(1, 1, 18, 18))


def test_interpolation_is_asked_for_by_the_call_or_by_the_config(checkpoints):
    model = load_checkpoint(checkpoints / "body")
    images = torch.randn(1, 3, 26, 31)
    expected = model(images, interpolate_pos_encoding=True).last_hidden_state
    assert expected.shape == (1, 1 + 6 * 7, 24)
    model.config.interpolate_pos_encoding = True
    assert torch.equal(model(images).last_hidden_state, expected)
    with pytest.raises(ValueError, match="expected image_size"):
        model(images, interpolate_pos_encoding=False)
    # where nothing is between, and what is beyond whole patches is not read
    own = torch.randn(1, 3, 18, 18)
    states = [model(own, interpolate_pos_encoding=flag).last_hidden_state for flag in (True, False)]
    torch.testing.assert_close(*states)
    own[..., 16:] = 0
    torch.testing.assert_close(model(own).last_hidden_state, states[0])


# --------------------------------------------------------------------------------------- conversion

DEIT = "DeiTForImageClassificationWithTeacher"


def converted(model, folder):
    model.save_pretrained(folder / "theirs")
    facts = convert(folder / "theirs", folder / "ours")
    return (
        getattr(vanilla_transformer, facts["architecture"]).from_pretrained(folder / "ours").eval()
    )


@pytest.mark.filterwarnings("error:The use of `x.T`")  # of a vector, which a later torch refuses
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
def test_other_sizes_give_the_source_s_outputs(architecture, dtype, tmp_path):
    family = next(name for name, names in ARCHITECTURES.items() if architecture in names)
    config = random_config(family, architecture, 0)
    # transformers interpolates neither pairs nor what is no square
    config.update(dict(image_size=13, patch_size=4))
    theirs = random_model(architecture, config, dtype)
    ours = converted(theirs, tmp_path)
    for size in ((13, 13), (4, 4), (30, 11), (7, 29)):
        images = torch.randn(2, config.num_channels, *size, dtype=dtype)
        with torch.no_grad():
            expected = theirs(
                images, **({} if family == "dinov2" else {"interpolate_pos_encoding": True})
            )
            got = ours(images, interpolate_pos_encoding=True)
            # which always interpolates
            assert torch.equal(ours(images)[0], got[0]) if family == "dinov2" else True
        for name in ("last_hidden_state", "pooler_output", "logits"):
            if name in expected and name in got:
                assert_exact(got[name], expected[name], dtype)


def test_both_spellings_of_names_are_read_and_the_one_on_the_hub_is_written(tmp_path):
    theirs = random_model(
        "ViTForImageClassification", random_config("vit", "ViTForImageClassification", 0)
    )
    converted(theirs, tmp_path)
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


def test_a_conversion_is_shown_with_the_tensors_that_become_one(tmp_path):
    random_model(DEIT, random_config("deit", DEIT, 0)).save_pretrained(tmp_path)
    shown = str(plan_conversion(tmp_path))
    assert (
        "cls_classifier.bias and distillation_classifier.bias -> classifier.bias [3]  (mean)"
        in shown
    )
    weights = load_file(tmp_path / "model.safetensors")
    del weights["distillation_classifier.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match="lacks tensors that .* needs: distillation_classifier.bias"
    ):
        plan_conversion(tmp_path)


def test_other_heads_are_refused_by_name(tmp_path):
    config = random_config("vit", "ViTForMaskedImageModeling", 0)
    transformers.ViTForMaskedImageModeling(config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match="'ViTForMaskedImageModeling'.* cannot be converted, expected one of ViTModel",
    ):
        convert(tmp_path, tmp_path / "ours")


def test_a_pooler_of_another_width_is_refused(tmp_path):
    config = random_config("vit", "ViTModel", 0)
    config.pooler_output_size = config.hidden_size + 1
    transformers.ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pooler_output_size=.* cannot be converted, expected"):
        convert(tmp_path, tmp_path / "ours")


def test_the_image_processor_goes_where_the_weights_go(checkpoints, tmp_path):
    theirs = random_model(
        "ViTForImageClassification", random_config("vit", "ViTForImageClassification", 0)
    )
    theirs.save_pretrained(tmp_path / "theirs")
    # names none
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
    assert load_image_processor(tmp_path / "back").to_dict() == expected.to_dict()
    average([checkpoints / "body"] * 2, tmp_path / "mean")
    assert load_image_processor(tmp_path / "mean").size.height == 18
    # a checkpoint with this file is ours to replace
    convert(tmp_path / "theirs", tmp_path / "ours", force=True)


# ----------------------------------------------------------------------------------------- pictures

PROCESSORS = {
    "ViT": (ViTImageProcessorPil, {}),
    "ViT, RGB": (ViTImageProcessorPil, dict(size=32, do_convert_rgb=True)),
    "DeiT": (transformers.DeiTImageProcessorPil, {}),
    "DINOv2": (transformers.BitImageProcessorPil, {}),
    "edge and crop": (
        transformers.DeiTImageProcessorPil,
        dict(size={"shortest_edge": 20}, crop_size=31, do_convert_rgb=True, resample=1),
    ),
    "both edges": (
        ViTImageProcessorPil,
        dict(size={"shortest_edge": 20, "longest_edge": 40}, do_rescale=False),
    ),
    "box": (
        ViTImageProcessorPil,
        dict(size={"max_height": 20, "max_width": 40}, do_normalize=False, resample=0),
    ),
    "one mean": (
        ViTImageProcessorPil,
        dict(do_resize=False, image_mean=0.3, image_std=[0.2, 0.3, 0.4], do_convert_rgb=True),
    ),
    "nothing": (ViTImageProcessorPil, dict(do_resize=False, do_rescale=False, do_normalize=False)),
    "crop": (
        ViTImageProcessorPil,
        dict(do_resize=False, do_center_crop=True, crop_size={"height": 9, "width": 40}),
    ),
    "pair": (ViTImageProcessorPil, dict(size=[18, 25], rescale_factor=1 / 127.5, resample=5)),
}


def images_of(height, width):
    """Of all modes that files have, and arrays."""
    for mode in ("RGB", "RGBA", "L", "LA", "1", "P", "CMYK"):
        yield picture(height, width, mode)
    transparent = picture(height, width, "P")
    transparent.info["transparency"] = 3
    pixels = RANDOM.integers(0, 256, (height, width, 4)).astype(np.uint8)
    deep = Image.fromarray(pixels[..., 0].astype(np.uint16) * 9)
    arrays = (pixels, pixels[..., :3], np.moveaxis(pixels[..., :3], -1, 0), pixels[..., :1])
    fractions = (
        RANDOM.random((height, width, 3)),
        RANDOM.random((4, height, width)).astype(np.float32),
    )
    yield from (
        transparent,
        deep,
        *arrays,
        *fractions,
        pixels[..., :3].astype(int) - 5,
        pixels[..., :3].astype(np.float32),
    )


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_the_image_processors_of_transformers(name):
    cls, settings = PROCESSORS[name]
    theirs = cls(**settings)
    ours = ImageProcessor.from_config(
        json.loads(theirs.to_json_string()), Path("preprocessor_config.json")
    )
    compared = 0
    for height, width in ((1, 1), (30, 44), (61, 33), (3, 90)):
        for image in images_of(height, width):
            try:
                expected = theirs(image, return_tensors="np")["pixel_values"][0].astype(np.float32)
            except ValueError:
                with pytest.raises(ValueError):
                    ours(image)
            else:
                np.testing.assert_array_equal(ours(image), expected)
                compared += 1
    assert compared >= 15


def test_a_step_that_is_null_is_not_done():
    nothing = dict.fromkeys(
        ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")
    )
    config = json.loads(transformers.BitImageProcessorPil().to_json_string()) | nothing
    theirs, image = transformers.BitImageProcessorPil.from_dict(config), picture(30, 41)
    expected = theirs(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(
        ImageProcessor.from_config(config, Path("preprocessor_config.json"))(image), expected
    )


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"image_processor_type": "LevitImageProcessor"},
            "image_processor_type 'LevitImageProcessor', expected one of ViT",
        ),
        (
            {"do_pad": True},
            "do_pad True, .*expected do_convert_rgb, do_resize",
        ),
        ({"do_flip_channel_order": True}, "do_flip_channel_order True, .*expected do_convert_rgb"),
        ({"crop_pct": 0.9}, "crop_pct 0.9, .*expected do_convert_rgb"),
        (
            {"size": {"longest_edge": 9}},
            "size {'longest_edge': 9}, expected height and width or shortest_edge",
        ),
        (
            {"size": {"height": 0, "width": 9}},
            "size {'height': 0, 'width': 9}, expected .* integers of at least 1",
        ),
        ({"resample": 9}, "resample 9, expected one of Pillow's filters, 0 to 5"),
        ({"do_rescale": "yes"}, "do_rescale 'yes', expected true or false"),
        ({"image_mean": []}, r"image_mean \[\], expected a number or a list of numbers"),
        ({"do_center_crop": True, "crop_size": None}, "crop_size None, expected"),
        (
            {"do_center_crop": True, "crop_size": {"shortest_edge": 9}},
            "crop_size {'shortest_edge': 9}, expected height and width",
        ),
        ({"image_processor_type": None}, "image_processor_type 'None', expected one of ViT"),
    ],
)
def test_a_step_that_is_not_known_is_refused_by_name(change, said):
    config = json.loads(ViTImageProcessorPil().to_json_string())
    with pytest.raises(ValueError, match=f"somewhere/preprocessor_config.json has (the )?{said}"):
        ImageProcessor.from_config(config | change, Path("somewhere/preprocessor_config.json"))


# ------------------------------------------------------------------------------------------ runtime


def test_labels_and_scores_are_those_of_the_pipeline(classifier, tmp_path):
    pipeline = transformers.pipeline("image-classification", model=str(classifier.checkpoint))
    turned = picture(20, 9)
    exif = turned.getexif()
    exif[0x0112] = 6  # the orientation
    turned.save(tmp_path / "turned.png", exif=exif)
    images = [*PICTURES, str(tmp_path / "turned.png"), Path(tmp_path / "turned.png")]
    runtime = ImageRuntime(classifier.directory)
    found = runtime.classify(images, top_k=9)
    for image, labels in zip(images, found, strict=True):
        expected = pipeline(str(image) if isinstance(image, Path) else image, top_k=7)
        assert [label["label"] for label in labels] == [label["label"] for label in expected]
        np.testing.assert_allclose(
            [each["score"] for each in labels], [each["score"] for each in expected], atol=1e-5
        )
    assert [labels[:5] for labels in found] == runtime.classify(images)
    array = np.array(PICTURES[0])
    assert runtime.classify([array]) == runtime.classify([PICTURES[0]])


@pytest.mark.parametrize(
    "problem, labels", [("regression", 3), ("multi_label_classification", 3), (None, 1)]
)
def test_scores_are_activated_as_the_pipeline_does(problem, labels):
    from transformers.pipelines.image_classification import ImageClassificationPipeline

    from vanilla_transformer_export.image_runtime import activated

    config = VanillaVisionConfig(**SIZES, num_labels=labels, problem_type=problem)
    pipeline = ImageClassificationPipeline(
        model=VanillaVisionForImageClassification(config),
        image_processor=ViTImageProcessorPil(size=18),
    )
    logits = torch.randn(1, labels)
    expected = {each["label"]: each["score"] for each in pipeline.postprocess({"logits": logits})}
    assert activated(logits.numpy(), problem)[0].tolist() == pytest.approx(
        list(map(expected.get, config.id2label.values()))
    )


def test_states_are_those_of_the_pipeline(body):
    pipeline = transformers.pipeline("image-feature-extraction", model=str(body.checkpoint))
    runtime = ImageRuntime(body.directory)
    states, pooled = runtime.embed(PICTURES), runtime.embed(PICTURES, pool=True)
    for image, own, own_pooled in zip(PICTURES, states, pooled, strict=True):
        np.testing.assert_allclose(own, np.array(pipeline(image))[0], atol=1e-5)
        np.testing.assert_allclose(own_pooled, np.array(pipeline(image, pool=True))[0], atol=1e-5)


def test_an_export_of_any_size_gives_what_torch_gives(body):
    runtime = Runtime(body.directory)
    for size in ((18, 18), (4, 4), (27, 50), (40, 5)):
        images = torch.randn(3, 3, *size)
        with torch.no_grad():
            expected = body.model(images, interpolate_pos_encoding=True)
        found = runtime.outputs(pixel_values=images.numpy())
        np.testing.assert_allclose(
            found["last_hidden_state"], expected.last_hidden_state, atol=2e-5
        )
        np.testing.assert_allclose(found["pooler_output"], expected.pooler_output, atol=2e-5)
    with pytest.raises(ValueError, match="the images are 3x50, expected at least 4x4, a patch"):
        runtime.outputs(pixel_values=np.zeros((1, 3, 3, 50), np.float32))
    config = runtime.info.config
    assert config["interpolate_pos_encoding"] and config["model_type"] == "vanilla-vision"
    # what Transformers.js knows
    assert json.loads((body.directory / "config.json").read_text())["model_type"] == "vit"
    assert verify(body.directory, load_checkpoint(body.checkpoint), cases=4).failures == []


def test_images_without_a_resize_have_their_own_sizes(body, tmp_path):
    directory = copy_folder(body.directory, tmp_path)
    edit_json(directory / "preprocessor_config.json", do_resize=False)
    seal(directory)
    runtime = ImageRuntime(directory)
    assert runtime.embed([picture(9, 22), picture(10, 23)]).shape == (2, 1 + 2 * 5, 24)
    with pytest.raises(
        ValueError,
        match=r"have the shapes \(11, 24\) and \(17, 24\), expected one: give images of one size",
    ):
        runtime.embed([picture(9, 22), picture(18, 18)])


def test_bad_images_are_errors_of_one_line(classifier, tmp_path):
    runtime = ImageRuntime(classifier.directory)
    picture(40, 40).save(tmp_path / "whole.png")
    content = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.png").write_text("no image")
    for images, error, said in (
        ([tmp_path / "half.png"], ValueError, "half.png: it is no whole image: "),
        ([tmp_path / "text.png"], ValueError, "text.png: it is no image that Pillow reads"),
        ([tmp_path], FileNotFoundError, "is no file, expected an image"),
        (["nothing.png"], FileNotFoundError, "'nothing.png' is no file, expected an image"),
        (
            "nothing.png",
            ValueError,
            "images must be a list of paths, Pillow images or arrays, got 'nothing.png'",
        ),
        ([], ValueError, "no images, expected at least one"),
        ([PICTURES[0], None], ValueError, "image 1 of 2: it is a NoneType, expected a path"),
        (
            [np.zeros((9, 9))],
            ValueError,
            r"image 0 of 1: the image is float64 of shape \(9, 9\), expected numbers",
        ),
        ([np.zeros((0, 9, 3))], ValueError, "expected numbers"),
        (
            [np.zeros((9, 9, 1))],
            ValueError,
            "image 0 of 1: the image has 1 channels, expected 3, as image_mean has",
        ),
        ([np.zeros((9, 9, 4))], ValueError, "the image has 4 channels, expected 3"),
        (
            [np.full((9, 9, 3), np.nan)],
            ValueError,
            "the image has values from nan to nan, expected 0 to 1",
        ),
    ):
        with pytest.raises(error, match=said):
            runtime.classify(images)
    with pytest.raises(ExportUsageError, match="top_k must be a whole number of at least 1, got 0"):
        runtime.classify(PICTURES, top_k=0)
    with pytest.raises(
        ValueError, match="ForImageClassification returns logits, expected last_hidden_state"
    ):
        runtime.embed(PICTURES)


def test_an_export_of_one_size_refuses_another(classifier, tmp_path):
    directory = copy_folder(classifier.directory, tmp_path)
    edit_json(directory / "preprocessor_config.json", size={"height": 18, "width": 22})
    seal(directory)
    with pytest.raises(ValueError, match="image 0 of 1 is 3x18x22 for the model, expected 3x18x18"):
        ImageRuntime(directory).classify(PICTURES[:1])
    with pytest.raises(
        ValueError,
        match=r"pixel_values must have shape \(batch_size, 3, 18, 18\), got shape \(1, 3, 18, 22\)",
    ):
        Runtime(directory).outputs(pixel_values=np.zeros((1, 3, 18, 22)))
    with pytest.raises(ValueError, match="takes no input_ids, expected pixel_values"):
        Runtime(directory).outputs(np.ones((1, 3), int))


def test_an_export_without_an_image_processor_or_of_text_is_refused(classifier, tmp_path):
    directory = copy_folder(classifier.directory, tmp_path)
    edit_json(directory / "preprocessor_config.json", do_pad=True)
    seal(directory)
    with pytest.raises(ValueError, match="do_pad True, .*expected do_convert_rgb"):
        ImageRuntime(directory)
    (directory / "preprocessor_config.json").unlink()
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["files"]["preprocessor_config.json"]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        FileNotFoundError, match="preprocessor_config.json is missing: the checkpoint had none"
    ):
        ImageRuntime(directory)
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        TextRuntime(directory)
    list_file(directory, "README.md")


def test_an_image_size_is_for_images(tmp_path, checkpoints):
    with pytest.raises(
        ExportUsageError, match="no image size 'any', expected one of trained, free"
    ):
        export(checkpoints / "classifier", tmp_path / "out", image_size="any")
    perturbed(
        "VanillaEncoderModel", dict(vocab_size=9, hidden_size=8, num_attention_heads=2)
    ).save_pretrained(tmp_path / "text")
    with pytest.raises(
        ExportUsageError,
        match="image size 'free' is for models of images, and .* has a VanillaEncoderModel",
    ):
        export(tmp_path / "text", tmp_path / "out", image_size="free")
    assert not (tmp_path / "out").exists()


def test_info_counts_patches(checkpoints):
    facts = info(checkpoints / "classifier")
    layer = 4 * 24 * 24 + 2 * 24 * 32
    assert (
        facts["flops"]["patch"] == 2 * (3 * 16 * 24 + 2 * layer)
        and facts["flops"]["image"] == 2 * 2 * 24 * 7
    )
    assert (
        facts["variant"] == "vision"
        and facts["shape"]["image_size"] == 18
        and facts["cache_values"] == 0
    )
    assert facts["total_parameters"] == load_checkpoint(checkpoints / "classifier").num_parameters()


@pytest.mark.slow
@pytest.mark.parametrize("image_size", ["trained", "free"])
@pytest.mark.parametrize(
    "target, dtype",
    [
        ("portable", "fp32"),
        ("portable", "int8"),
        ("cpu", "fp32"),
        ("cpu", "int8"),
        ("cuda", "fp32"),
    ],
)
@pytest.mark.parametrize("name", ["classifier", "body"])
def test_exports_of_every_target_give_what_torch_gives(
    checkpoints, name, target, dtype, image_size, tmp_path
):
    manifest = export(
        checkpoints / name,
        tmp_path / "out",
        target=target,
        dtype=dtype,
        image_size=image_size,
        cases=8,
    )
    parity = default_parity(manifest)
    assert parity["failures"] == 0 and parity["max_error"] < (1e-4 if dtype == "fp32" else 1)
    operators = [
        node.op_type
        for node in onnx.load(tmp_path / "out" / default_graphs(manifest)["encoder"]).graph.node
    ]
    integers = {"portable": "MatMulInteger", "cpu": "MatMulIntegerToFloat"}
    assert dtype == "fp32" or operators.count(integers[target]) >= 13
    runtime = ImageRuntime(tmp_path / "out", device="cpu")
    assert len(
        runtime.classify(PICTURES) if name == "classifier" else runtime.embed(PICTURES)
    ) == len(PICTURES)


@pytest.mark.slow
def test_half_precision_and_other_shapes_are_exported(tmp_path):
    fields = dict(
        image_size=[8, 15],
        patch_size=[4, 5],
        num_channels=1,
        head_dim=6,
        value_head_dim=10,
        norm_first=False,
    )
    perturbed(
        "VanillaVisionModel", dict(SIZES, **fields, gated=True, norm_type="rms_norm")
    ).save_pretrained(tmp_path / "model")
    for target, dtype in (
        ("cuda", "fp16"),
        ("cuda", "bf16"),
        ("cpu", "fp32"),
        ("portable", "fp32"),
    ):
        for image_size in ("trained", "free"):
            manifest = export(
                tmp_path / "model",
                tmp_path / "out",
                force=True,
                cases=6,
                target=target,
                dtype=dtype,
                image_size=image_size,
            )
            assert default_parity(manifest) is None or default_parity(manifest)["failures"] == 0


# ----------------------------------------------------------------------------------- attention maps


def test_maps_are_the_first_token_s_weights_over_the_picture_that_the_model_sees(
    checkpoints, tmp_path
):
    model, processor = (
        load_checkpoint(checkpoints / "classifier"),
        load_image_processor(checkpoints / "classifier"),
    )
    maps = image_attention_maps(model, processor, PICTURES[0])
    attentions = model.model(
        processor(PICTURES[0], return_tensors="pt")["pixel_values"], output_attentions=True
    ).attentions
    for layer, weights in enumerate(attentions):
        np.testing.assert_allclose(
            maps.weights[layer], weights[0, :, 0, 2:].reshape(3, 4, 4).detach(), atol=1e-7
        )
    np.testing.assert_array_equal(
        maps.picture, np.array(PICTURES[0].resize((18, 18), Image.Resampling.BILINEAR))
    )
    axes = plot(maps, layer=1, head=2).axes[0]
    below, above = axes.images
    np.testing.assert_array_equal(above.get_array(), maps.weights[1, 2])
    assert list(above.get_extent()) == [-0.5, 15.5, 15.5, -0.5] and [*below.get_extent()] == [
        -0.5,
        17.5,
        17.5,
        -0.5,
    ]


def test_the_command_draws_over_a_file_and_refuses_what_is_none(checkpoints, tmp_path, capsys):
    PICTURES[0].save(tmp_path / "in.png")
    main(
        [
            "attention",
            str(checkpoints / "classifier"),
            str(tmp_path / "in.png"),
            "--output",
            str(tmp_path / "out.png"),
        ]
    )
    assert Image.open(tmp_path / "out.png").width > 300
    for words, said in (
        ([str(tmp_path / "no.png")], "is no file, expected an image"),
        ([str(tmp_path / "in.png"), "a text"], "reads one image, got kind=None and 2 arguments"),
        (
            [str(tmp_path / "in.png"), "--kind", "cross"],
            "reads one image, got kind='cross' and 1 arguments",
        ),
    ):
        with pytest.raises((FileNotFoundError, UsageError), match=said):
            save_attention_maps(
                checkpoints / "classifier",
                tmp_path / "new.png",
                *words[: words.index("--kind") if "--kind" in words else 2],
                kind="cross" if "--kind" in words else None,
            )
    with pytest.raises(ValueError, match="test_vision.py is no whole image: cannot identify"):
        save_attention_maps(checkpoints / "classifier", tmp_path / "new.png", __file__)


# ----------------------------------------------------------------------------------------- training


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Images that are dark or bright, as a directory of splits and labels."""
    return Path(standins.pictures(tmp_path_factory.mktemp("images")))


def recipe(folder, **changes):
    tiny = dict(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=1,
    )
    training = dict(
        per_device_train_batch_size=8,
        num_train_epochs=8,
        learning_rate=1e-2,
        eval_strategy="epoch",
        logging_steps=3,
    )
    tables = {"data": {"dataset": str(folder)}, "model": tiny, "training": training, **changes}
    return Recipe("image-classification", **tables)


def test_a_recipe_trains_a_classifier_that_pipelines_and_exports_read(folder, tmp_path):
    metrics = train(recipe(folder), tmp_path / "out")
    assert metrics["validation_accuracy"] == 1.0
    record = json.loads((tmp_path / "out/training.json").read_text())
    assert record["seconds"] > 0 and {"out-run"} < {path.name for path in tmp_path.iterdir()}
    card = (tmp_path / "out/README.md").read_text()
    assert (
        "pipeline_tag: image-classification" in card and "AutoModelForImageClassification" in card
    )
    pipeline = transformers.pipeline("image-classification", model=str(tmp_path / "out"))
    image = sorted((folder / "validation/dark").iterdir())[0]
    assert pipeline(str(image))[0]["label"] == "dark"
    again = dict(
        model={"path": str(tmp_path / "out")},
        training=dict(per_device_train_batch_size=8, max_steps=1),
    )
    assert train(recipe(folder, **again), tmp_path / "again")["validation_accuracy"] == 1.0
    assert load_image_processor(tmp_path / "again").size.height == 8


def test_what_is_of_text_or_no_image_is_refused(folder, tmp_path):
    for changes, said in (
        (
            dict(training={"tokens_per_update": 100}),
            "tokens_per_update is 100, expected per_device_train_batch_size: images",
        ),
        (dict(tokenizer={"vocab_size": 100}), r"vocab_size"),
        (dict(training={"teachers": ["a"]}), "teachers"),
    ):
        with pytest.raises(UsageError, match=said):
            recipe(folder, **changes)
    with pytest.raises(ValueError, match="the data set has no column 'picture', expected one of"):
        train(
            recipe(folder, data={"dataset": str(folder), "columns": ["picture", "label"]}),
            tmp_path / "out",
        )
    broken = copy_folder(folder, tmp_path)
    [*_, last] = sorted((broken / "train/dark").iterdir())
    last.write_bytes(last.read_bytes()[:40])
    with pytest.raises(ValueError, match=f"{last.name} is no whole image"):
        train(recipe(broken), tmp_path / "out")


def test_the_shipped_recipe_is_of_the_digits():
    config = VanillaVisionConfig(**read_recipe("digits").model)
    assert config.grid_shape == (4, 4)
