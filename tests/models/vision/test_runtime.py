"""Tests of exports of image models, against transformers' pipelines."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers
from checkpoints import (
    copy_folder,
    default_graphs,
    default_parity,
    edit_json,
    list_file,
    perturbed,
    seal,
)
from command_line import read_json
from messages import raises
from pictures import PICTURES, SIZES, picture
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from vanilla_transformer import VanillaVisionConfig, VanillaVisionForImageClassification
from vanilla_transformer_export import (
    ImageRuntime,
    Runtime,
    TextRuntime,
    export,
    load_checkpoint,
    verify,
)
from vanilla_transformer_export.errors import UsageError as ExportUsageError


def test_labels_and_scores_match_pipeline(classifier, tmp_path):
    pipeline = transformers.pipeline("image-classification", model=str(classifier.checkpoint))
    rotated = picture(20, 9)
    exif = rotated.getexif()
    exif[0x0112] = 6  # the orientation
    rotated.save(tmp_path / "turned.png", exif=exif)
    images = [*PICTURES, str(tmp_path / "turned.png"), Path(tmp_path / "turned.png")]
    runtime = ImageRuntime(classifier.directory)
    actual = runtime.classify(images, top_k=9)
    for image, labels in zip(images, actual, strict=True):
        expected = pipeline(str(image) if isinstance(image, Path) else image, top_k=7)
        assert [label["label"] for label in labels] == [label["label"] for label in expected]
        np.testing.assert_allclose(
            [entry["score"] for entry in labels], [entry["score"] for entry in expected], atol=1e-5
        )
    assert [labels[:5] for labels in actual] == runtime.classify(images)
    array = np.array(PICTURES[0])
    assert runtime.classify([array]) == runtime.classify([PICTURES[0]])


@pytest.mark.parametrize(
    "problem, labels", [("regression", 3), ("multi_label_classification", 3), (None, 1)]
)
def test_score_activation_matches_pipeline(problem, labels):
    from transformers.pipelines.image_classification import ImageClassificationPipeline

    from vanilla_transformer_export.text.scores import FUNCTIONS, default_function

    config = VanillaVisionConfig(**SIZES, num_labels=labels, problem_type=problem)
    pipeline = ImageClassificationPipeline(
        model=VanillaVisionForImageClassification(config),
        image_processor=ViTImageProcessorPil(size=18),
    )
    logits = torch.randn(1, labels)
    expected = {
        entry["label"]: entry["score"] for entry in pipeline.postprocess({"logits": logits})
    }
    function = FUNCTIONS[default_function(config.to_dict())]
    assert function(logits.numpy())[0].tolist() == pytest.approx(
        list(map(expected.get, config.id2label.values()))
    )


def test_embeddings_match_pipeline(body):
    pipeline = transformers.pipeline("image-feature-extraction", model=str(body.checkpoint))
    runtime = ImageRuntime(body.directory)
    states, pooled = runtime.embed(PICTURES), runtime.embed(PICTURES, pool=True)
    for image, state, pooled_state in zip(PICTURES, states, pooled, strict=True):
        np.testing.assert_allclose(state, np.array(pipeline(image))[0], atol=1e-5)
        np.testing.assert_allclose(pooled_state, np.array(pipeline(image, pool=True))[0], atol=1e-5)


def test_export_of_any_image_size_matches_torch(body):
    runtime = Runtime(body.directory)
    for size in ((18, 18), (4, 4), (27, 50), (40, 5)):
        images = torch.randn(3, 3, *size)
        with torch.no_grad():
            expected = body.model(images, interpolate_pos_encoding=True)
        actual = runtime.outputs(pixel_values=images.numpy())
        np.testing.assert_allclose(
            actual["last_hidden_state"], expected.last_hidden_state, atol=2e-5
        )
        np.testing.assert_allclose(actual["pooler_output"], expected.pooler_output, atol=2e-5)
    with raises(ValueError, seen="3x50", expected="4x4"):
        runtime.outputs(pixel_values=np.zeros((1, 3, 3, 50), np.float32))
    config = runtime.info.config
    assert config["interpolate_pos_encoding"] and config["model_type"] == "vanilla-vision"
    # a model type that Transformers.js supports
    assert json.loads((body.directory / "config.json").read_text())["model_type"] == "vit"
    assert verify(body.directory, load_checkpoint(body.checkpoint), cases=4).failures == []


def test_images_keep_their_size_without_resize(body, tmp_path):
    directory = copy_folder(body.directory, tmp_path)
    edit_json(directory / "preprocessor_config.json", do_resize=False)
    seal(directory)
    runtime = ImageRuntime(directory)
    assert runtime.embed([picture(9, 22), picture(10, 23)]).shape == (2, 1 + 2 * 5, 24)
    with raises(ValueError, seen=(11, 24, 17)):
        runtime.embed([picture(9, 22), picture(18, 18)])


def test_invalid_images_raise_and_error_names_value(classifier, tmp_path):
    runtime = ImageRuntime(classifier.directory)
    picture(40, 40).save(tmp_path / "whole.png")
    content = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.png").write_text("no image")
    for images, error, seen, expected in (
        ([tmp_path / "half.png"], ValueError, "half.png", ()),
        ([tmp_path / "text.png"], ValueError, "text.png", ()),
        ([tmp_path], FileNotFoundError, str(tmp_path), ()),
        (["nothing.png"], FileNotFoundError, "nothing.png", ()),
        ("nothing.png", ValueError, "nothing.png", ()),
        ([], ValueError, ("images", "empty"), "one"),
        ([PICTURES[0], None], ValueError, (1, 2, "NoneType"), ()),
        ([np.zeros((9, 9))], ValueError, (0, 1, "float64", 9), ()),
        ([np.zeros((0, 9, 3))], ValueError, ("float64", "(0, 9, 3)"), ()),
        ([np.zeros((9, 9, 1))], ValueError, (0, 1), (3, "image_mean")),
        ([np.zeros((9, 9, 4))], ValueError, 4, 3),
        ([np.full((9, 9, 3), np.nan)], ValueError, "nan", (0, 1)),
    ):
        with raises(error, seen=seen, expected=expected):
            runtime.classify(images)
    with raises(ExportUsageError, seen=("top_k", 0), expected=1):
        runtime.classify(PICTURES, top_k=0)
    with raises(ValueError, expected="last_hidden_state"):
        runtime.embed(PICTURES)


def test_export_of_fixed_image_size_rejects_other_sizes(classifier, tmp_path):
    directory = copy_folder(classifier.directory, tmp_path)
    edit_json(directory / "preprocessor_config.json", size={"height": 18, "width": 22})
    seal(directory)
    with raises(ValueError, seen=(0, 1, "3x18x22"), expected="3x18x18"):
        ImageRuntime(directory).classify(PICTURES[:1])
    with raises(ValueError, seen=("pixel_values", 1, 3, 18, 22), expected=("batch_size", 3, 18)):
        Runtime(directory).outputs(pixel_values=np.zeros((1, 3, 18, 22)))
    with raises(ValueError, seen="input_ids", expected="pixel_values"):
        Runtime(directory).outputs(np.ones((1, 3), int))


def test_unsupported_or_missing_preprocessor_raises(classifier, tmp_path):
    directory = copy_folder(classifier.directory, tmp_path)
    edit_json(directory / "preprocessor_config.json", do_pad=True)
    seal(directory)
    with raises(ValueError, seen=("do_pad", True)):
        ImageRuntime(directory)
    (directory / "preprocessor_config.json").unlink()
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["files"]["preprocessor_config.json"]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with raises(FileNotFoundError, seen="preprocessor_config.json"):
        ImageRuntime(directory)
    with raises(FileNotFoundError, seen="tokenizer.json"):
        TextRuntime(directory)
    list_file(directory, "README.md")


def test_export_of_text_model_is_rejected(exported):
    with raises(ValueError, seen=exported("encoder").model.__class__.__name__, expected="vision"):
        ImageRuntime(exported("encoder").directory)


def test_invalid_image_size_and_image_size_of_text_model_raise(tmp_path, checkpoints):
    with raises(ExportUsageError, seen="any", expected="free"):
        export(checkpoints / "classifier", tmp_path / "out", image_size="any")
    perturbed(
        "VanillaEncoderModel", dict(vocab_size=9, hidden_size=8, num_attention_heads=2)
    ).save_pretrained(tmp_path / "text")
    with raises(ExportUsageError, seen=("free", "VanillaEncoderModel")):
        export(tmp_path / "text", tmp_path / "out", image_size="free")
    assert not (tmp_path / "out").exists()


def test_info_counts_flops_and_parameters_of_image_model(checkpoints):
    facts = read_json("info", checkpoints / "classifier", "--json")
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
def test_exports_of_every_target_match_torch(
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
