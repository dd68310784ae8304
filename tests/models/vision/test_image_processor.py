"""Tests of image preprocessing, against transformers' PIL image processors."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from messages import raises
from pictures import RANDOM, picture
from PIL import Image
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from vanilla_transformer_export.text.image_processor import ImageProcessor

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


def make_images(height, width):
    """Yield images of all modes of image files, and arrays."""
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
def test_pixels_match_image_processors_of_transformers(name):
    cls, settings = PROCESSORS[name]
    theirs = cls(**settings)
    ours = ImageProcessor.from_config(
        json.loads(theirs.to_json_string()), Path("preprocessor_config.json")
    )
    compared = 0
    for height, width in ((1, 1), (30, 44), (61, 33), (3, 90)):
        for image in make_images(height, width):
            try:
                expected = theirs(image, return_tensors="np")["pixel_values"][0].astype(np.float32)
            except ValueError:
                with pytest.raises(ValueError):
                    ours(image)
            else:
                np.testing.assert_array_equal(ours(image), expected)
                compared += 1
    assert compared >= 15


def test_null_steps_are_skipped():
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
    "change, seen, expected",
    [
        (
            {"image_processor_type": "LevitImageProcessor"},
            ("image_processor_type", "LevitImageProcessor"),
            (),
        ),
        ({"do_pad": True}, ("do_pad", True), ("do_convert_rgb", "do_resize")),
        ({"do_flip_channel_order": True}, ("do_flip_channel_order", True), ()),
        ({"crop_pct": 0.9}, ("crop_pct", 0.9), ()),
        ({"size": {"longest_edge": 9}}, ("longest_edge", 9), "shortest_edge"),
        ({"size": {"height": 0, "width": 9}}, ("height", 0, "width", 9), 1),
        ({"resample": 9}, ("resample", 9), (0, 5)),
        ({"do_rescale": "yes"}, ("do_rescale", "yes"), ()),
        ({"image_mean": []}, ("image_mean", "[]"), ()),
        ({"do_center_crop": True, "crop_size": None}, ("crop_size", None), ()),
        (
            {"do_center_crop": True, "crop_size": {"shortest_edge": 9}},
            ("crop_size", "shortest_edge", 9),
            (),
        ),
        ({"image_processor_type": None}, ("image_processor_type", None), ()),
    ],
)
def test_unsupported_setting_error_names_file_and_value(change, seen, expected):
    config = json.loads(ViTImageProcessorPil().to_json_string())
    with raises(ValueError, seen=("somewhere/preprocessor_config.json", *seen), expected=expected):
        ImageProcessor.from_config(config | change, Path("somewhere/preprocessor_config.json"))
