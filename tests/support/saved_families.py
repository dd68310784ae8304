"""Checkpoints of other families as conversion tests save, change and compare them."""

import torch
from families import assert_exact, compute_outputs, make_arguments, random_config, random_model

import vanilla_transformer
from vanilla_transformer.conversion import convert


def save_checkpoint(architecture, family, tmp_path, **changes):
    config = random_config(family, architecture, 0)
    config.update(changes)
    model = random_model(architecture, config)
    model.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs", model


def assert_converts(directory, theirs, tmp_path):
    result = convert(directory, tmp_path / "ours")
    ours = (
        getattr(vanilla_transformer, result["architecture"])
        .from_pretrained(tmp_path / "ours")
        .eval()
    )
    inputs = make_arguments(theirs)
    got, expected = compute_outputs(ours, inputs), compute_outputs(theirs, inputs)
    for name in expected:
        assert_exact(got[name], expected[name], torch.float32)
    return result
