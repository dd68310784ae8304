"""Tests of attention maps of images."""

import numpy as np
import transformers
from command_line import main
from messages import raises
from pictures import PICTURES
from PIL import Image

from vanilla_transformer.attention_maps import image_attention_maps, plot, save_attention_maps
from vanilla_transformer.errors import UsageError
from vanilla_transformer_export import load_checkpoint


def test_maps_are_first_token_weights_over_preprocessed_image(checkpoints, tmp_path):
    model, processor = (
        load_checkpoint(checkpoints / "classifier"),
        transformers.AutoImageProcessor.from_pretrained(checkpoints / "classifier"),
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
        maps.image, np.array(PICTURES[0].resize((18, 18), Image.Resampling.BILINEAR))
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


def test_command_writes_figure_and_invalid_inputs_raise(checkpoints, tmp_path, capsys):
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
    for words, seen in (
        ([str(tmp_path / "no.png")], "no.png"),
        ([str(tmp_path / "in.png"), "a text"], ("kind", None, 2)),
        ([str(tmp_path / "in.png"), "--kind", "cross"], ("kind", "cross", 1)),
    ):
        with raises((FileNotFoundError, UsageError), seen=seen):
            save_attention_maps(
                checkpoints / "classifier",
                tmp_path / "new.png",
                *words[: words.index("--kind") if "--kind" in words else 2],
                kind="cross" if "--kind" in words else None,
            )
    with raises(ValueError, seen="test_attention_maps.py"):
        save_attention_maps(checkpoints / "classifier", tmp_path / "new.png", __file__)
