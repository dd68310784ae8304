"""Graphs of models that read images (Dosovitskiy et al. 2021, ViT)."""

from typing import Any

import numpy as np
from onnx_ir import Value

from ..specs.sequences import pair
from .context import GraphContext
from .layers import linear, row_linear
from .positions import cast_to_float32, cast_to_graph_dtype


def image_labels(g: GraphContext, states: Value) -> Value:
    """Return the logits of an image's labels, (B, labels), from the states (B, S, D) of all first
    tokens."""
    count = g.config.num_first_tokens
    first = g.op("Slice", states, [0], [count], [1])
    return row_linear(g, g.op("Reshape", first, [0, count * g.config.hidden_size]), "classifier")


def patch_states(g: GraphContext, pixels: Value) -> Value:
    """Return learned first tokens and the embedded patches of `pixels` (B, C, H, W), plus
    positions, as (B, first tokens + patches, D).

    This is equation 1 of the ViT paper, written as nodes of the graph.
    """
    op, config = g.op, g.config
    name = f"{config.prefix}embeddings"
    grid = [
        op("Div", op.size(pixels, axis), side)
        for axis, side in zip((2, 3), pair(config.patch_size))
    ]
    patches = op("Reshape", split_patches(g, pixels, *grid), op.shape(0, op("Mul", *grid), -1))
    x = linear(g, patches, f"{name}.embed_patches")
    first = op("Unsqueeze", g.weight(f"{name}.first_tokens"), [0])
    first = op("Expand", first, op.shape(op.size(pixels, 0), 1, 1))
    table = f"{name}.positions"
    positions = (
        interpolate_positions(g, table, *grid)
        if config.interpolate_pos_encoding
        else g.weight(table)
    )
    return op("Add", op("Concat", first, x, axis=1), positions)


def split_patches(g: GraphContext, pixels: Value, rows: Value, columns: Value) -> Value:
    """Return the patches (B, rows, columns, C, height, width) of `pixels` (B, C, H, W).

    `rows` and `columns` count whole patches. Pixels beyond them are dropped.
    """
    op = g.op
    height, width = pair(g.config.patch_size)
    ends = op.shape(op("Mul", rows, height), op("Mul", columns, width))
    cropped = op("Slice", pixels, [0, 0], ends, [2, 3])
    return op(
        "Transpose",
        op("Reshape", cropped, op.shape(0, 0, rows, height, columns, width)),
        perm=[0, 2, 4, 1, 3, 5],
    )


def interpolate_positions(g: GraphContext, name: str, rows: Value, columns: Value) -> Value:
    """Return the position table `name` for `rows` times `columns` patches, (first tokens + patches,
    D).

    Positions of patches are interpolated (bicubic). Those of the first tokens stay.
    """
    op, config = g.op, g.config
    first, grid = g.transform_weights([name], first_and_grid, config.num_first_tokens, *config.grid)
    sizes = op.shape(1, config.hidden_size, rows, columns)
    bicubic: dict[str, Any] = {
        "mode": "cubic",
        "cubic_coeff_a": -0.75,
        "coordinate_transformation_mode": "half_pixel",
    }
    # in float32: onnxruntime has no `Resize` of bfloat16
    resized = op("Resize", cast_to_float32(g, grid), None, None, sizes, **bicubic)
    rows_of_grid = op("Reshape", cast_to_graph_dtype(g, resized), [config.hidden_size, -1])
    return op("Concat", first, op("Transpose", rows_of_grid, perm=[1, 0]), axis=0)


def first_and_grid(
    positions: np.ndarray, count: int, rows: int, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Split `positions` (count + rows * columns, D) into (count, D) and (1, D, rows, columns)."""
    return positions[:count], positions[count:].T.reshape(1, -1, rows, columns)
