"""Images in, labels or states out: a `Runtime` and the preprocessor_config.json that came with the
checkpoint, without transformers. The results are those of its pipelines for images."""

import base64
import binascii
import contextlib
import functools
import io
import itertools
import math
import os
import reprlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

try:
    from PIL import Image, ImageOps, UnidentifiedImageError
except ImportError:
    raise ImportError(
        "Pillow is not installed: pip install 'vanilla-transformer[images]'"
    ) from None

from .errors import MissingImage, UsageError
from .heads import IMAGE
from .inference.config import VISION
from .inference.export_info import IMAGE_PROCESSOR, json_object
from .runtime import Runtime
from .shared.files import check_no_pointer
from .specs.sequences import pair
from .text.checks import check_count, check_flags
from .text.image_processor import ImageProcessor
from .text.scores import FUNCTIONS, default_function, rank_labels
from .text.tasks.task import JsonObject, TaskCall

Input = str | os.PathLike | Image.Image | np.ndarray


class ImageRuntime:
    """An export of a vision model with its preprocessor_config.json, loaded; `options` as
    `Runtime`.

    An image is the path of a file or a Pillow image, which is turned as its EXIF data say and
    becomes RGB, as in the pipelines of transformers; or an array (H, W, C) or (C, H, W), of which
    as many channels are read as it has.

    Raises:
        FileNotFoundError: if the export has no preprocessor_config.json; see also `Runtime`.
        ValueError: if the export does not read images, if preprocessor_config.json is damaged or
            has a step that is not known; see also `Runtime`.
    """

    def __init__(self, directory: str | os.PathLike, threads: int | None = None, **options: Any):
        self.runtime = Runtime(directory, threads, **options)
        self.info = self.runtime.info
        if self.info.config["model_type"] != VISION:
            raise ValueError(f"{directory} is a {self.info.architecture}, expected a vision model")
        path = self.info.directory / IMAGE_PROCESSOR
        content = self.info.read(IMAGE_PROCESSOR)
        if content is None:
            raise FileNotFoundError(
                f"{path} is missing: the checkpoint had none, so this export takes only "
                f"pixel values"
            )
        self.processor = ImageProcessor.from_config(json_object(path, content), path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how pickle and `copy` open the export again, see `Runtime`."""
        return functools.partial(type(self), self.info.directory, **self.runtime.arguments), ()

    def close(self) -> None:
        """Free the memory of the graphs, see `Runtime.close`."""
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def classify(self, images: Sequence[Input], /, top_k: int = 5) -> list[list[JsonObject]]:
        """Return the `top_k` best labels of each image, best first, or all if there are fewer.

        A label is {"label": str, "score": float}. The score is the probability by softmax, or by
        the logistic function for independent labels and for a single label. The score of a
        regression is its output.

        Raises:
            UsageError: for a `top_k` below 1.
            ValueError: for a model without labels, no images, what is no image, and an image of a
                size or number of channels that the model does not read.
            FileNotFoundError: for a path where there is no file.
        """
        check_count("top_k", top_k)
        config = self.info.config
        scores = FUNCTIONS[default_function(config)](self._outputs(images, "logits"))
        names = [
            config["id2label"].get(str(index), f"LABEL_{index}") for index in range(scores.shape[1])
        ]
        return [rank_labels(names, row, top_k) for row in scores]

    def embed(self, images: Sequence[Input], /, pool: bool = False) -> np.ndarray:
        """Return the states of the first tokens and the patches (B, S, D), or with `pool` the
        output of the model's pooler (B, D).

        Raises:
            ValueError: for a model without states or, with `pool`, without a pooler; for no images,
                what is no image, and images whose sizes the model does not read or that differ in
                the number of states.
            FileNotFoundError: for a path where there is no file.
        """
        check_flags(pool=pool)
        return self._outputs(images, "pooler_output" if pool else "last_hidden_state")

    def pixel_values(self, images: Sequence[Input], /) -> Iterator[np.ndarray]:
        """Yield the model's input for each image, (C, H, W) float32.

        Raises:
            ValueError: for no list of images or an empty one, raised at once. While iterating, for
                what is no image, and an image of a size or number of channels that the model does
                not read.
            FileNotFoundError: while iterating, for a path where there is no file.
        """
        if isinstance(images, str | os.PathLike | Image.Image) or not isinstance(
            images, Sequence | np.ndarray
        ):
            raise ValueError(
                f"images must be a list of paths, Pillow images or arrays, got "
                f"{reprlib.repr(images)}"
            )
        if len(images) == 0:
            raise ValueError("images is empty, expected at least one image")
        return (
            self._pixel_values(image, f"image {index} of {len(images)}")
            for index, image in enumerate(images)
        )

    def _pixel_values(self, image: Input, name: str) -> np.ndarray:
        if isinstance(image, str | os.PathLike):
            name = os.fspath(image)
        try:
            pixels = self.processor(open_image(image))
        except MissingImage:  # names its path itself
            raise
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        expected = self.info.specs["encoder"].inputs[0].shape[1:]
        if any(
            isinstance(expected_size, int) and expected_size != size
            for expected_size, size in zip(expected, pixels.shape)
        ):
            got = "x".join(map(str, pixels.shape))
            raise ValueError(
                f"{name} has shape {got} after preprocessing, expected "
                f"{'x'.join(map(str, expected))}"
            )
        return pixels

    def _outputs(self, images: Sequence[Input], output: str) -> np.ndarray:
        known = [tensor.name for tensor in self.info.specs["encoder"].outputs]
        if output not in known:
            raise ValueError(
                f"a {self.info.architecture} returns {' and '.join(known)}, expected {output}"
            )
        outputs = [
            self.runtime.outputs(pixel_values=batch)[output]
            for batch in self._batches(self.pixel_values(images))
        ]
        if len({states.shape[1:] for states in outputs}) > 1:
            shapes = " and ".join(sorted({str(states.shape[1:]) for states in outputs}))
            raise ValueError(
                f"the hidden states of the images have the shapes {shapes}, expected one "
                "shape: pass images of the same size"
            )
        return np.concatenate(outputs)

    def _batches(self, pixels: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield batches (B, C, H, W) of consecutive images of one size. `pixels` yields the images
        (C, H, W). A batch has no more images than make a run faster."""
        patches = math.prod(pair(self.info.config["patch_size"]))
        for (_, height, width), group in itertools.groupby(pixels, key=np.shape):
            count = max(1, self.runtime.max_tokens * patches // (height * width))
            while batch := list(itertools.islice(group, count)):
                yield np.stack(batch)


def open_image(image: Input) -> Image.Image | np.ndarray:
    """Return an array unchanged, or a Pillow image or the image in a file as upright RGB.

    Raises FileNotFoundError for a path without a file, and ValueError for what is no image, and for
    git-lfs pointers.
    """
    if isinstance(image, np.ndarray):
        return image
    if isinstance(image, str | os.PathLike):
        if not Path(image).is_file():
            raise MissingImage(f"{os.fspath(image)!r} is not a file, expected an image")
        check_no_pointer(image)
        with image_errors(), Image.open(image) as file:
            return rotate_upright(file)
    if not isinstance(image, Image.Image):
        raise ValueError(
            f"it is a {type(image).__name__}, expected a path, a Pillow image or an array"
        )
    with image_errors():
        return rotate_upright(image)


def rotate_upright(image: Image.Image) -> Image.Image:
    """Return the image as RGB, rotated as its EXIF data say."""
    turned = ImageOps.exif_transpose(image)
    assert turned is not None  # it is only where the image itself is turned
    return turned.convert("RGB")


@contextlib.contextmanager
def image_errors() -> Iterator[None]:
    """Replace Pillow's errors in the block with a ValueError of one line, which says that it is no
    image or incomplete."""
    try:
        yield
    except UnidentifiedImageError:
        raise ValueError(
            "it is not an image that Pillow can read, expected one such as .png or .jpg"
        ) from None
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        raise ValueError(f"it is not a complete image: {' '.join(str(error).split())}") from None


# --------------------------------------------------------------------------------------- as JSON


def decode_image(value: Any) -> Image.Image:
    """Return the upright RGB image in `value`, bytes or base64, also as a data URL.

    Raises UsageError for all else.
    """
    if isinstance(value, str):
        try:
            value = base64.b64decode(
                value.rpartition(",")[2] if value.startswith("data:") else value, validate=True
            )
        except (binascii.Error, ValueError) as error:
            raise UsageError(
                f"inputs is {value!r:.40}, expected an image's bytes in base64: {error}"
            ) from None
    if not isinstance(value, bytes):
        raise UsageError(f"inputs is {reprlib.repr(value)}, expected an image's bytes in base64")
    try:
        with image_errors(), Image.open(io.BytesIO(value)) as file:
            return rotate_upright(file)
    except ValueError as error:
        raise UsageError(f"inputs: {error}") from None


def image_states(
    runtime: ImageRuntime, images: Sequence[Input], /, pool: bool = False
) -> list[np.ndarray]:
    """Return the states of each image, which may differ in size, as `ImageRuntime.embed` does."""
    return [runtime.embed([image], pool=pool)[0] for image in images]


PIPELINES = {
    "image-classification": TaskCall(ImageRuntime.classify, IMAGE, parse=decode_image),
    "image-feature-extraction": TaskCall(
        image_states,
        IMAGE,
        lambda states, row, options: states.tolist() if options.get("pool") else [states.tolist()],
        parse=decode_image,
    ),
}
