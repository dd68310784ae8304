"""Fixtures: checkpoints of image models, and their exports."""

import pytest
from checkpoints import Exported, perturbed
from pictures import BODY, CLASSIFIER
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from vanilla_transformer.checkpoint import load_checkpoint
from vanilla_transformer_export import export


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
    """The body of an image model, with an export for images of any size."""
    directory = checkpoints / "body-portable"
    export(checkpoints / "body", directory, cases=6, image_size="free")
    return Exported(load_checkpoint(checkpoints / "body"), checkpoints / "body", directory)
