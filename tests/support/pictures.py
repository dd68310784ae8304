"""Sizes of small image models, and random pictures."""

import numpy as np
from PIL import Image

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
