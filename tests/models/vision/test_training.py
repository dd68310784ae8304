"""Tests of training of image classifiers."""

import json
from pathlib import Path

import pytest
import standins
import transformers
from checkpoints import copy_folder
from messages import raises

from vanilla_transformer import VanillaVisionConfig
from vanilla_transformer.errors import UsageError
from vanilla_transformer.training.recipe import Recipe, read_recipe
from vanilla_transformer.training.run import train


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
        num_train_epochs=4,
        learning_rate=1e-2,
        eval_strategy="epoch",
        logging_steps=3,
    )
    tables = {"data": {"dataset": str(folder)}, "model": tiny, "training": training, **changes}
    return Recipe("image-classification", **tables)


def test_recipe_trains_classifier_that_pipeline_and_fine_tuning_load(folder, tmp_path):
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
    assert transformers.AutoImageProcessor.from_pretrained(tmp_path / "again").size.height == 8


def test_text_settings_and_invalid_images_raise(folder, tmp_path):
    for changes, seen, expected in (
        (
            dict(training={"tokens_per_update": 100}),
            ("tokens_per_update", 100),
            "per_device_train_batch_size",
        ),
        (dict(tokenizer={"vocab_size": 100}), "vocab_size", ()),
        (dict(training={"teachers": ["a"]}), "teachers", ()),
    ):
        with raises(UsageError, seen=seen, expected=expected):
            recipe(folder, **changes)
    with raises(ValueError, seen="picture"):
        train(
            recipe(folder, data={"dataset": str(folder), "columns": ["picture", "label"]}),
            tmp_path / "out",
        )
    broken = copy_folder(folder, tmp_path)
    [*_, last] = sorted((broken / "train/dark").iterdir())
    last.write_bytes(last.read_bytes()[:40])
    with raises(ValueError, seen=last.name):
        train(recipe(broken), tmp_path / "out")


def test_shipped_digits_recipe_has_grid_of_4x4_patches():
    config = VanillaVisionConfig(**read_recipe("digits").model)
    assert config.grid_shape == (4, 4)
