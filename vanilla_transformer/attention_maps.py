"""Attention maps: the weights of each head as arrays and as figures."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from PIL.Image import Image  # which matplotlib needs
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase
from transformers.image_utils import load_image

from .checkpoint import load_checkpoint, load_image_processor, load_tokenizer
from .checkpoint_files import readers_errors
from .errors import UsageError
from .files import check_no_pointer
from .info import depth_fields
from .modeling_vanilla_transformer import shift_tokens_right
from .outputs import new_file

# names of the outputs of seq2seq models by kind of attention
OUTPUTS = {
    "encoder": "encoder_attentions",
    "decoder": "decoder_attentions",
    "cross": "cross_attentions",
}
FORMATS = ("eps", "jpeg", "jpg", "pdf", "png", "ps", "svg", "svgz", "tif", "tiff", "webp")
DPI = 100
MAX_MAP_VALUES = 2**27  # weights of all layers and heads: one gigabyte
# Inches: around the maps; of a side of a map in a grid, of a token in a map alone, and of a figure
# at most.
MARGIN_INCHES = 1.5
MAP_INCHES = 1.5
TOKEN_INCHES = 0.25
MAX_INCHES = 50.0
POINTS_PER_INCH = 72
TINY_TEXT = 5  # points, for the tokens of one of several maps
IMAGE_INCHES = 4.0  # side of a single image


@dataclass
class AttentionMaps:
    """`weights` (layers, heads, T, S): how much the position that reads `queries[t]` looks at the
    one that reads `keys[s]`."""

    kind: str
    weights: np.ndarray
    queries: list[str]
    keys: list[str]


@dataclass
class ImageAttentionMaps:
    """The attention of the first token to each patch of an image.

    Attributes:
        weights: (layers, heads, rows, columns) of patches.
        image: the preprocessed image (H, W, 3), 0 to 255.
        patch: height and width of a patch in pixels.
    """

    weights: np.ndarray
    image: np.ndarray
    patch: tuple[int, int]


def save_attention_maps(
    checkpoint: str | os.PathLike,
    out: str | os.PathLike,
    *texts: str,
    layer: int | None = None,
    head: int | None = None,
    kind: str | None = None,
    force: bool = False,
    variant: str | None = None,
) -> None:
    """Draw the attention maps of `texts` with a checkpoint, and write the figure to the file `out`.

    `texts` are a source and, for a seq2seq model, a target. For a model of images, `texts` is the
    path of one image. The ending of `out` is the format. An existing `out` is replaced only with
    `force`. `layer` and `head`, counted from 0, select maps; by default all are drawn. `kind` is
    "encoder", "decoder" or "cross" for a seq2seq model. `variant` "fp16" reads the weights in
    model.fp16.safetensors.

    Raises:
        FileExistsError: if `out` exists without `force`.
        UsageError: if the ending of `out` is not an image format, for a kind, layer or head that
            the model does not have, and for a target that the model does not read.
        FileNotFoundError: if files of the checkpoint, or the image, are missing.
        ValueError: for damaged files, a text without tokens or with more than maps can show, and an
            image of a size that the model does not read.
    """
    if Path(out).suffix.lower().removeprefix(".") not in FORMATS:
        raise UsageError(
            f"{out} is not the name of an image, expected one that ends in .{', .'.join(FORMATS)}"
        )
    with new_file(out, force, [checkpoint]) as file:
        model = load_checkpoint(checkpoint, variant)
        figure = plot(compute_maps(model, checkpoint, texts, kind), layer, head)
        figure.savefig(file, dpi=DPI)


def compute_maps(
    model: PreTrainedModel, checkpoint: str | os.PathLike, texts: tuple[str, ...], kind: str | None
):
    if model.main_input_name != "pixel_values":
        return attention_maps(model, load_tokenizer(checkpoint), *texts, kind=kind)
    if kind is not None or len(texts) > 1:
        raise UsageError(
            f"{type(model).__name__} reads one image, got kind={kind!r} and {len(texts)} arguments"
        )
    [path] = texts
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path!r} is not a file, expected an image")
    check_no_pointer(path)
    try:
        image = load_image(path)
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path} is not a complete image: {error}") from None
    return image_attention_maps(model, load_image_processor(checkpoint), image)


def image_attention_maps(
    model: PreTrainedModel, processor: BaseImageProcessor, image: Image
) -> ImageAttentionMaps:
    """Return the attention from the first token to the patches of `image`, for each layer and head.

    `model` is left in evaluation mode, with the eager attention implementation. `processor` makes
    the model's input of the image.

    Raises:
        ValueError: for an image of a size that the model does not read.
    """
    model.eval().set_attn_implementation("eager")  # other implementations return no weights
    pixel_values = processor(image, return_tensors="pt")["pixel_values"]
    seen = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")[
        "pixel_values"
    ][0]
    with torch.no_grad():
        outputs = model.base_model(pixel_values, output_attentions=True)
    rows, columns = (
        side // patch for side, patch in zip(pixel_values.shape[2:], model.config.patch_shape)
    )
    weights = torch.cat(outputs.attentions)[:, :, 0, model.config.num_first_tokens :].unflatten(
        -1, (rows, columns)
    )
    pixels = np.broadcast_to(seen.transpose(1, 2, 0), (*seen.shape[1:], 3))  # one channel is gray
    return ImageAttentionMaps(weights.double().numpy(), pixels, model.config.patch_shape)


def attention_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    target: str | None = None,
    kind: str | None = None,
) -> AttentionMaps:
    """Return the attention maps of the text `source`, with special tokens except for a decoder.

    For seq2seq models `kind` is "encoder", "decoder" or "cross" (the default); other models have
    only their self-attention. The default `target` is the model's own translation, by its
    generation settings without sampling. `model` is left in evaluation mode, with the eager
    attention implementation.

    Raises:
        UsageError: for a kind that the model does not have, a target for a model that reads one
            text, and a missing target for one that cannot generate.
        ValueError: for a text without tokens or with more than maps can show.
    """
    name = type(model).__name__
    is_encoder_decoder = model.config.is_encoder_decoder
    kinds = (
        tuple(OUTPUTS)
        if is_encoder_decoder
        else (model.config.model_type.removeprefix("vanilla-"),)
    )
    kind = kinds[-1] if kind is None else kind
    if kind not in kinds:
        raise UsageError(f"{name} has no {kind!r} attention, expected one of {', '.join(kinds)}")
    if target is not None and not is_encoder_decoder:
        raise UsageError(f"{name} reads one text, got the target {target!r} too")
    for text in [source] if target is None else [source, target]:
        check_tokens(model, tokenizer, text)
    model.eval().set_attn_implementation("eager")  # other implementations return no weights
    # A decoder continues the text, so the text has no end token.
    has_ends = kinds != ("decoder",)
    ids = tokenizer(source, return_tensors="pt", add_special_tokens=has_ends)["input_ids"]
    inputs = {"input_ids": ids}
    read = {kinds[0]: ids}
    with torch.no_grad():
        if is_encoder_decoder:
            inputs["decoder_input_ids"] = read["decoder"] = decoder_input_ids(
                model, tokenizer, ids, target
            )
        outputs = model.base_model(**inputs, output_attentions=True)
    queries = read["decoder" if kind == "cross" else kind]
    keys = ids if kind == "cross" else queries
    weights = (
        torch.cat(outputs[OUTPUTS[kind] if is_encoder_decoder else "attentions"]).double().numpy()
    )
    return AttentionMaps(
        kind, weights, *(tokenizer.convert_ids_to_tokens(row[0]) for row in (queries, keys))
    )


def check_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    # a damaged tokenizer may panic here for the first time
    with readers_errors(tokenizer.name_or_path or "the tokenizer"):
        ids = tokenizer(text)["input_ids"]
        text_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not text_ids:
        raise ValueError(f"the text {text!r} has no tokens, expected at least one")
    largest = max(ids)
    size = model.config.vocab_size
    if largest >= size:
        raise ValueError(
            f"the tokenizer returned token id {largest}, expected less than vocab_size={size}"
        )
    maps = (
        max(getattr(model.config, name) for name in depth_fields(model.config))
        * model.config.num_attention_heads
    )
    max_tokens = math.isqrt(MAX_MAP_VALUES // maps)
    if len(ids) > max_tokens:
        raise ValueError(
            f"a text has {len(ids)} tokens, expected at most {max_tokens} for the maps of {maps} "
            f"attention heads"
        )


def decoder_input_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: torch.Tensor,
    target: str | None,
) -> torch.Tensor:
    """Return the inputs of the decoder (1, T): the start token and all target tokens but the last,
    which is only predicted.

    The target is the text `target`. If it is `None`, the model generates the target for the source
    tokens `ids`. Raise UsageError if the model cannot generate."""
    if target is not None:
        return shift_tokens_right(
            tokenizer(text_target=target, return_tensors="pt")["input_ids"], model.config
        )
    if not model.can_generate():
        raise UsageError(f"{type(model).__name__} cannot generate, expected a target")
    return model.generate(ids, do_sample=False, num_return_sequences=1)[:, :-1]


def plot(
    maps: AttentionMaps | ImageAttentionMaps, layer: int | None = None, head: int | None = None
) -> Figure:
    """Draw the maps of all layers and heads as a grid, or of one `layer` or `head`, counted from 0.

    The tokens stand at the left and at the bottom, if they fit. Maps of an image are drawn over it.

    Raises:
        UsageError: for a layer or a head that does not exist.
    """
    layers = selected_indices("layer", layer, maps.weights.shape[0])
    heads = selected_indices("head", head, maps.weights.shape[1])
    # no pyplot, which would keep the figure alive
    figure = Figure(figsize=figure_size(maps, layers, heads), layout="constrained")
    grid = figure.subplots(len(layers), len(heads), squeeze=False)
    for row, layer in zip(grid, layers):
        for axes, head in zip(row, heads):
            image = draw(axes, maps, maps.weights[layer, head])
            axes.set_title(f"layer {layer}, head {head}", fontsize=8)
            axes.set(xticks=[], yticks=[])
    if isinstance(maps, ImageAttentionMaps):
        figure.colorbar(image, ax=grid, label="attention of the first token")
        return figure
    label_tokens(grid, maps)
    figure.colorbar(image, ax=grid, label=f"{maps.kind} attention")
    figure.supxlabel("key")
    figure.supylabel("query")
    return figure


def label_tokens(grid: np.ndarray, maps: AttentionMaps) -> None:
    """Write the tokens of `maps` at the left and at the bottom of a `grid` of axes, if they fit."""
    size, max_tokens = None, math.inf
    if grid.size > 1:
        size, max_tokens = TINY_TEXT, MAP_INCHES * POINTS_PER_INCH / TINY_TEXT
    style = {"parse_math": False, "fontsize": size}  # a "$" in a token is not a formula
    if len(maps.keys) <= max_tokens:
        for axes in grid[-1]:
            axes.set_xticks(range(len(maps.keys)), maps.keys, rotation=90, **style)
    if len(maps.queries) <= max_tokens:
        for axes in grid[:, 0]:
            axes.set_yticks(range(len(maps.queries)), maps.queries, **style)


def figure_size(
    maps: AttentionMaps | ImageAttentionMaps, layers: Sequence[int], heads: Sequence[int]
) -> list[float]:
    """Return [width, height] in inches of a figure with the maps of `layers` and `heads`."""
    if len(layers) > 1 or len(heads) > 1:
        sides = [len(heads) * MAP_INCHES, len(layers) * MAP_INCHES]
    elif isinstance(maps, ImageAttentionMaps):
        sides = [IMAGE_INCHES, IMAGE_INCHES]
    else:
        sides = [len(maps.keys) * TOKEN_INCHES, len(maps.queries) * TOKEN_INCHES]
    return [min(MARGIN_INCHES + side, MAX_INCHES) for side in sides]


def draw(axes: Axes, maps: AttentionMaps | ImageAttentionMaps, weights: np.ndarray) -> AxesImage:
    """Draw `weights`, the map of one head, into `axes`, and return the drawn image.

    The color scale, from 0 to the largest weight in `maps`, is the same for all heads.
    """
    scale = {"vmin": 0, "vmax": maps.weights.max()}
    if isinstance(maps, AttentionMaps):
        return axes.imshow(weights, cmap="Blues", aspect="auto", **scale)
    axes.imshow(maps.image)
    height, width = (count * side for count, side in zip(weights.shape, maps.patch))
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)  # pixel centers are whole numbers
    return axes.imshow(weights, cmap="inferno", alpha=0.6, extent=extent, **scale)


def selected_indices(name: str, index: int | None, count: int) -> Sequence[int]:
    if index is not None and not 0 <= index < count:
        raise UsageError(f"{name} is {index}, expected one of 0 to {count - 1}")
    return range(count) if index is None else [index]
