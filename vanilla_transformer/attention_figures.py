"""Figures of attention maps, without torch. Drawing needs matplotlib."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .errors import UsageError
from .outputs import new_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

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
    one that reads `keys[s]`. They are NaN for heads that an export does not return."""

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


def check_length(tokens: int, maps: int) -> None:
    """Raise ValueError for a text of more `tokens` than the maps of so many heads can show."""
    limit = math.isqrt(MAX_MAP_VALUES // maps)
    if tokens > limit:
        raise ValueError(
            f"a text has {tokens} tokens, expected at most {limit} for the maps of {maps} "
            f"attention heads"
        )


def save_figure(
    out: str | os.PathLike,
    force: bool,
    inputs: Iterable[str | os.PathLike],
    draw: "Callable[[], Figure]",
) -> None:
    """Write the figure that `draw` returns to the file `out`, whose ending is the format.

    Raises:
        UsageError: if the ending is not an image format.
        FileExistsError, ValueError: if `out` exists without `force`, or is one of `inputs`.
    """
    if Path(out).suffix.lower().removeprefix(".") not in FORMATS:
        raise UsageError(
            f"{out} is not the name of an image, expected one that ends in .{', .'.join(FORMATS)}"
        )
    with new_file(out, force, inputs) as file:
        draw().savefig(file, dpi=DPI)


def plot(
    maps: AttentionMaps | ImageAttentionMaps, layer: int | None = None, head: int | None = None
) -> "Figure":
    """Draw the maps of all layers and heads as a grid, or of one `layer` or `head`, counted from 0.

    The tokens stand at the left and at the bottom, if they fit. Maps of an image are drawn over it.

    Raises:
        UsageError: for a layer or a head that does not exist, or has no weights.
    """
    from matplotlib.figure import Figure

    layers, heads = selected_heads(maps.weights, layer, head)
    # no pyplot, which would keep the figure alive
    figure = Figure(figsize=figure_size(maps, layers, heads), layout="constrained")
    grid = figure.subplots(len(layers), len(heads), squeeze=False)
    for row, layer in zip(grid, layers):
        for axes, head in zip(row, heads):
            if np.isnan(maps.weights[layer, head]).any():
                axes.set_axis_off()
                continue
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
    """Write the tokens of `maps` at the left and at the bottom of a `grid` of axes, if they fit: at
    the first map of each row and the last of each column."""
    size, max_tokens = None, math.inf
    if grid.size > 1:
        size, max_tokens = TINY_TEXT, MAP_INCHES * POINTS_PER_INCH / TINY_TEXT
    style = {"parse_math": False, "fontsize": size}  # a "$" in a token is not a formula
    if len(maps.keys) <= max_tokens:
        for column in grid.T[:, ::-1]:
            axes = next(axes for axes in column if axes.images)
            axes.set_xticks(range(len(maps.keys)), maps.keys, rotation=90, **style)
    if len(maps.queries) <= max_tokens:
        for row in grid:
            axes = next(axes for axes in row if axes.images)
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


def draw(
    axes: "Axes", maps: AttentionMaps | ImageAttentionMaps, weights: np.ndarray
) -> "AxesImage":
    """Draw `weights`, the map of one head, into `axes`, and return the drawn image.

    The color scale, from 0 to the largest weight in `maps`, is the same for all heads.
    """
    scale = {"vmin": 0, "vmax": np.nanmax(maps.weights)}
    if isinstance(maps, AttentionMaps):
        return axes.imshow(weights, cmap="Blues", aspect="auto", **scale)
    axes.imshow(maps.image)
    height, width = (count * side for count, side in zip(weights.shape, maps.patch))
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)  # pixel centers are whole numbers
    return axes.imshow(weights, cmap="inferno", alpha=0.6, extent=extent, **scale)


def selected_heads(
    weights: np.ndarray, layer: int | None, head: int | None
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the layers and the heads of the grid for `weights` (layers, heads, ...), without those
    whose weights are all NaN."""
    layers = selected_indices("layer", layer, weights.shape[0])
    heads = selected_indices("head", head, weights.shape[1])
    known = ~np.isnan(weights).any(axis=(2, 3))
    if not known[np.ix_(layers, heads)].any():
        expected = ", ".join(f"layer {one} head {other}" for one, other in np.argwhere(known))
        seen = f"layer is {layer} and head is {head}"
        raise UsageError(f"{seen}, which the export does not return, expected one of {expected}")
    return (
        [number for number in layers if known[number, heads].any()],
        [number for number in heads if known[layers, number].any()],
    )


def selected_indices(name: str, index: int | None, count: int) -> Sequence[int]:
    if index is not None and not 0 <= index < count:
        raise UsageError(f"{name} is {index}, expected one of 0 to {count - 1}")
    return range(count) if index is None else [index]
