"""The image processor that preprocessor_config.json describes, with Pillow and numpy. Pixels equal
those of transformers' image processors without torchvision
(`image_processing_backends.PilBackend`)."""

import math
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..shared.options import Kind, is_float32, is_int64, is_list

SIZE = Kind("an integer of at least 1", lambda value: is_int64(value) and value >= 1)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NUMBER = Kind("a number", is_float32)
NUMBERS = Kind(
    "a number or a list of numbers",
    lambda value: is_float32(value) or (bool(value) and is_list(value, is_float32)),
)
SIZES = (
    ("height", "width"),
    ("shortest_edge",),
    ("shortest_edge", "longest_edge"),
    ("max_height", "max_width"),
)
LAYOUTS = ("channels_first", "channels_last")
# settings in which the classes of transformers with these names differ from `DEFAULTS`
HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TYPES: dict[str, dict[str, Any]] = {
    "ViTImageProcessor": {"size": 224, "resample": 2},
    "DeiTImageProcessor": {"size": 256, "resample": 3, "do_center_crop": True, "crop_size": 224},
    "BitImageProcessor": {  # DINOv2's
        "size": 224,
        "default_to_square": False,
        "resample": 3,
        "do_center_crop": True,
        "crop_size": 224,
        "do_convert_rgb": True,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
}
DEFAULTS: dict[str, Any] = {
    "do_convert_rgb": False,
    "do_resize": True,
    "default_to_square": True,
    "do_center_crop": False,
    "crop_size": None,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": HALF,
    "image_std": HALF,
    "input_data_format": None,
}
KINDS = {
    **{name: FLAG for name, default in DEFAULTS.items() if isinstance(default, bool)},
    "resample": Kind(
        "one of Pillow's filters, 0 to 5", lambda value: is_int64(value) and 0 <= value <= 5
    ),
    "rescale_factor": NUMBER,
    "image_mean": NUMBERS,
    "image_std": NUMBERS,
    "input_data_format": Kind(" or ".join(LAYOUTS), lambda value: value in LAYOUTS),
}
# settings that do not change pixels
UNUSED = (
    "image_processor_type",
    "feature_extractor_type",
    "processor_class",
    "model_input_names",
    "data_format",
    "device",
    "return_tensors",
    "disable_grouping",
    "image_seq_length",
    "pad_size",
)


@dataclass(frozen=True)
class ImageProcessor:
    """The steps of preprocessor_config.json, in order: RGB, resizing, center crop, rescaling,
    normalization.

    Args:
        settings: the values of the keys of `DEFAULTS`, "size" and "resample"; sizes are
            dictionaries.
    """

    settings: dict[str, Any]

    @classmethod
    def from_config(cls, config: dict, path: Path) -> "ImageProcessor":
        """Return the processor with the settings `config`, the content of preprocessor_config.json
        at `path`.

        Raises:
            ValueError: if the image processor or a step is unknown, or a value has a wrong type or
                range.
        """
        name = str(config.get("image_processor_type") or config.get("feature_extractor_type"))
        base = (
            name.replace("FeatureExtractor", "ImageProcessor")
            .removesuffix("Fast")
            .removesuffix("Pil")
        )
        if base not in TYPES:
            raise ValueError(
                f"{path} has the image_processor_type {name!r:.100}, expected one of "
                f"{', '.join(TYPES)}"
            )
        settings = DEFAULTS | TYPES[base]
        for name, value in config.items():
            kind = KINDS.get(name)
            if value is None:
                settings |= {name: False} if kind is FLAG else {}  # as in transformers
            elif name not in settings:
                if name not in UNUSED and value is not False and not name.startswith("_"):
                    known = ", ".join(step for step in settings if step.startswith("do_"))
                    raise ValueError(
                        f"{path} has {name} {reprlib.repr(value)}, which is not supported: "
                        f"expected {known}"
                    )
            elif kind is None or kind.holds(value):
                settings[name] = value
            else:
                raise ValueError(
                    f"{path} has {name} {reprlib.repr(value)}, expected {kind.expected}"
                )
        settings["size"] = parse_size("size", settings["size"], settings["default_to_square"], path)
        if settings["do_center_crop"]:
            settings["crop_size"] = parse_size("crop_size", settings["crop_size"], True, path)
            if "height" not in settings["crop_size"]:
                raise ValueError(
                    f"{path} has crop_size {settings['crop_size']}, expected height and width"
                )
        return cls(settings)

    def __call__(self, image: Image.Image | np.ndarray) -> np.ndarray:
        """Return the pixel values of `image`, (C, H, W) float32, after all steps.

        `image` is a Pillow image or an array (H, W, C) or (C, H, W). Arrays hold whole numbers of 0
        to 255, or fractions of 0 to 1. Without the setting input_data_format, channels are first if
        the first and the last axis could both be channels (1, 3 or 4), as in transformers.

        Raises:
            ValueError: if the array has other axes or values, or another number of channels than
                image_mean.
        """
        settings = self.settings
        pixels = self.pixels(image)
        if settings["do_resize"]:
            pixels = resize(
                pixels, new_size(pixels.shape[1:], settings["size"]), settings["resample"]
            )
        if settings["do_center_crop"]:
            pixels = center_crop(
                pixels, settings["crop_size"]["height"], settings["crop_size"]["width"]
            )
        if settings["do_rescale"]:
            pixels = rescale(pixels, settings["rescale_factor"])
        if settings["do_normalize"]:
            pixels = normalize(pixels, settings["image_mean"], settings["image_std"])
        return pixels.astype(np.float32)

    def pixels(self, image: Image.Image | np.ndarray) -> np.ndarray:
        """Return the pixels (C, H, W) in the dtype of `image`, as RGB if the settings say so.

        Raises ValueError if an array is no image.
        """
        converts = self.settings["do_convert_rgb"]
        if isinstance(image, Image.Image):
            pixels = np.array(rgb(image) if converts else image)
            return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
        if image.ndim != 3 or image.size == 0 or image.dtype.kind not in "biuf":
            seen = f"{image.dtype} of shape {image.shape}"
            raise ValueError(
                f"the image is {seen}, expected numbers of shape (height, width, channels) or "
                f"(channels, height, width)"
            )
        if (self.settings["input_data_format"] or layout(image)) == "channels_last":
            image = np.moveaxis(image, -1, 0)
        return rgb_pixels(image) if converts else image


def parse_size(name: str, value: Any, is_square: bool, path: Path) -> dict[str, int]:
    """Return a size as a dict, such as {"height": 224, "width": 224}.

    `value` is that of the setting `name` in the file `path`. Older files have a number, which is
    both sides if `is_square`, else the shortest edge, or a list of height and width. Raises
    ValueError for another value.
    """
    if SIZE.holds(value):
        value = {"height": value, "width": value} if is_square else {"shortest_edge": value}
    elif isinstance(value, list) and len(value) == 2:
        value = dict(zip(("height", "width"), value))
    known = isinstance(value, dict) and any(value.keys() == set(names) for names in SIZES)
    if not known or not all(map(SIZE.holds, value.values())):
        expected = " or ".join(" and ".join(names) for names in SIZES)
        raise ValueError(
            f"{path} has {name} {reprlib.repr(value)}, expected {expected}, with integers "
            f"of at least 1"
        )
    return value


def layout(pixels: np.ndarray) -> str:
    """Return "channels_first" or "channels_last" for `pixels` with 3 axes; the former if both are
    possible.

    Raises:
        ValueError: if neither axis can be channels.
    """
    for name, axis in zip(LAYOUTS, (0, 2)):
        if pixels.shape[axis] in (1, 3, 4):
            return name
    raise ValueError(
        f"the image has shape {pixels.shape}, expected 1, 3 or 4 channels as first or last axis"
    )


def rgb(image: Image.Image) -> Image.Image:
    """Return `image` as RGB, on a white background."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    background = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(background, image.convert("RGBA")).convert("RGB")


def rgb_pixels(pixels: np.ndarray) -> np.ndarray:
    """Return pixels (C, H, W) as RGB (3, H, W): gray is repeated, and an alpha channel blended with
    white.

    Other numbers of channels are returned unchanged. Raises ValueError for fractions outside of 0
    to 1 with alpha.
    """
    if len(pixels) == 1:
        return np.repeat(pixels, 3, axis=0)
    if len(pixels) != 4:
        return pixels
    is_float = pixels.dtype.kind == "f"
    if is_float and (pixels.min() < 0 or pixels.max() > 1):
        raise ValueError(
            f"the image has values from {pixels.min()} to {pixels.max()}, expected 0 to 1 for an "
            "image with an alpha channel"
        )
    white = 1.0 if is_float else 255
    alpha = pixels[3:] / white
    blended = alpha * pixels[:3] + (1 - alpha) * white
    return (blended if is_float else np.round(blended)).astype(pixels.dtype)


def new_size(old: tuple[int, ...], size: dict[str, int]) -> tuple[int, int]:
    """Return the (height, width) to resize an image to, whose height and width are `old`.

    `size` is a setting such as {"shortest_edge": 224}. Without both sides in it the aspect ratio is
    kept.
    """
    height, width = old
    if "height" in size:
        return size["height"], size["width"]
    if "max_height" in size:
        scale = min(size["max_height"] / height, size["max_width"] / width)
        return int(height * scale), int(width * scale)
    short, long = sorted(old)
    new_short: float = size["shortest_edge"]
    new_long = int(new_short * long / short)
    if "longest_edge" in size and long / short * new_short > size["longest_edge"]:
        new_short = size["longest_edge"] * short / long
        new_long = int(new_short * long / short)
    if short == round(new_short):
        return height, width
    return (new_long, round(new_short)) if width <= height else (round(new_short), new_long)


def resize(pixels: np.ndarray, size: tuple[int, int], resample: int) -> np.ndarray:
    """Return `pixels` (C, H, W) resized to `size` (height, width) with Pillow's filter `resample`.

    Integers from 0 to 255 give uint8. Fractions from 0 to 1 give float32 from 0 to 1; for Pillow
    they are multiplied by 255 and truncated. An image of only 0 and 1 counts as integers.

    Raises:
        ValueError: for more than 4 channels, or for values outside of the range.
    """
    if len(pixels) > 4:
        raise ValueError(f"the image has {len(pixels)} channels, expected at most 4")
    with np.errstate(invalid="ignore"):  # values that are not finite are rejected below
        is_whole = pixels.dtype == np.uint8 or np.allclose(pixels, pixels.astype(int))
    highest = 255 if is_whole else 1
    if not (pixels.min() >= 0 and pixels.max() <= highest):
        kind = "integers" if is_whole else "fractions"
        raise ValueError(
            f"the image has values from {pixels.min()} to {pixels.max()}, expected {kind} from 0 "
            f"to {highest}"
        )
    levels = (pixels if is_whole else rescale(pixels, 255)).astype(np.uint8)
    image = Image.fromarray(
        levels[0] if len(levels) == 1 else np.ascontiguousarray(np.moveaxis(levels, 0, -1))
    )
    resized = np.array(image.resize(size[::-1], resample=resample))
    resized = resized[None] if resized.ndim == 2 else np.moveaxis(resized, -1, 0)
    return resized if is_whole else rescale(resized, 1 / 255)


def center_crop(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the center of `pixels` (C, H, W), (C, height, width).

    If the image is smaller, height or width are padded with zeros on both sides.
    """
    missing = [max(0, target - size) for target, size in zip((height, width), pixels.shape[1:])]
    pixels = np.pad(pixels, [(0, 0), *((math.ceil(margin / 2), margin // 2) for margin in missing)])
    top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
    return pixels[:, top : top + height, left : left + width]


def rescale(pixels: np.ndarray, factor: float) -> np.ndarray:
    return (pixels.astype(np.float64) * factor).astype(np.float32)


def normalize(
    pixels: np.ndarray, mean: float | list[float], std: float | list[float]
) -> np.ndarray:
    pixels = pixels if pixels.dtype.kind == "f" else pixels.astype(np.float32)
    for name, values in (("image_mean", mean), ("image_std", std)):
        if isinstance(values, list | tuple) and len(values) != len(pixels):
            raise ValueError(
                f"the image has {len(pixels)} channels, expected {len(values)} as in {name}"
            )
    return ((pixels.T - np.array(mean, pixels.dtype)) / np.array(std, pixels.dtype)).T
