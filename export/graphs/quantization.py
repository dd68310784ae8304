"""Matrices as integers and scales: weights of matrix multiplications (K, N), embeddings (V, D)."""

from collections.abc import Callable

import numpy as np

Quantized = tuple[np.ndarray, np.ndarray]  # integers and scales
TINY = np.finfo(np.float32).tiny
INT8_COMPUTE = 4  # the `accuracy_level` of MatMulNBits that quantizes activations too
BLOCK = 32  # weights of one column that share a scale
EMBEDDING_BLOCK = 128  # weights of one row that share a scale
SLICE = 2**21  # weights quantized at a time; intermediate arrays are several times as large


def in_slices(
    quantize: Callable[[np.ndarray], Quantized], matrix: np.ndarray, axis: int, joined: int = 0
) -> Quantized:
    """Return the integers and scales of `matrix`, quantized in slices along `axis` to save memory.

    `quantize` returns them for a slice. Integers are joined along the axis `joined`, scales along
    axis 0.
    """
    parts = np.array_split(matrix, -(-matrix.size // SLICE), axis)
    integers, scales = zip(*map(quantize, parts))
    return np.concatenate(integers, joined), np.concatenate(scales)


def int8_columns(matrix: np.ndarray) -> Quantized:
    """Return `matrix` (K, N) float32 as int8, and the scales (N,) of its columns.

    CPUs without VNNI add the products of weights 2i and 2i + 1 in 16 bits. With activations of at
    most 255, no sum overflows if two such weights add up to at most 128. So a column's scale comes
    from its largest weight or its largest sum of two such weights.
    """
    pairs = matrix[: len(matrix) // 2 * 2]
    largest = np.maximum(
        np.abs(matrix).max(axis=0), np.abs(pairs[::2] + pairs[1::2]).max(axis=0, initial=0)
    )
    return round_to_int8(matrix, largest)


def int4_blocks(matrix: np.ndarray) -> Quantized:
    """Return `matrix` (K, N) as 4-bit integers (N, blocks, BLOCK / 2 bytes) with zero point 8, and
    scales (N, blocks) in its dtype.

    A block is `BLOCK` weights of a column. A byte holds two weights, the first in its low half.
    """
    blocks = column_blocks(matrix)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2, keepdims=True), axis=2)
    # the largest weight becomes -8, which has no positive counterpart
    scales = nonzero(largest / -8, matrix.dtype)
    integers = np.clip(np.rint(blocks / scales) + 8, 0, 15).astype(np.uint8)
    return integers[..., ::2] | integers[..., 1::2] << 4, scales[..., 0]


def int8_blocks(matrix: np.ndarray) -> Quantized:
    """Return `matrix` (K, N) as 8-bit integers (N, blocks, BLOCK) with zero point 128, and the
    scales (N, blocks).

    The scales have the dtype of `matrix`.
    """
    blocks = column_blocks(matrix)
    scales = nonzero(np.abs(blocks).max(axis=2, keepdims=True) / 127, matrix.dtype)
    return np.clip(np.rint(blocks / scales) + 128, 1, 255).astype(np.uint8), scales[..., 0]


def column_blocks(matrix: np.ndarray) -> np.ndarray:
    """Return `matrix` (K, N) as float32 (N, blocks, BLOCK): each column is cut into blocks, of
    which the last is padded with 0."""
    padded = np.pad(matrix.T.astype(np.float32), ((0, 0), (0, -len(matrix) % BLOCK)))
    return padded.reshape(len(padded), -1, BLOCK)


def nonzero(scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return `scales` rounded to `dtype`, with 1 for scales that round to 0."""
    rounded = scales.astype(dtype)
    rounded[rounded == 0] = 1
    return rounded


def int8_rows(table: np.ndarray) -> Quantized:
    """Return `table` (V, D) float32 as int8 (V, D), and the scales (V, 1) of its rows."""
    return round_to_int8(table, np.abs(table).max(axis=1, keepdims=True))


def round_to_int8(values: np.ndarray, largest: np.ndarray) -> Quantized:
    """Return `values` as int8, and their float32 scales. A scale maps `largest`, the largest
    magnitude, to 127."""
    scales = positive_scales(largest)
    return np.rint(values / scales).astype(np.int8), scales


def positive_scales(largest: np.ndarray) -> np.ndarray:
    """Return the float32 scales that map `largest` to 127, at least `TINY`."""
    return np.maximum(largest / 127, TINY).astype(np.float32)


def uint8_blocks(table: np.ndarray) -> Quantized:
    """Return `table` (V, D) float32 as uint8 (V, D) with zero point 128, and the scales (V, blocks)
    of the blocks of its rows."""
    rows, width = table.shape
    blocks = np.pad(table, ((0, 0), (0, -width % EMBEDDING_BLOCK))).reshape(
        rows, -1, EMBEDDING_BLOCK
    )
    scales = positive_scales(np.abs(blocks).max(axis=2))
    integers = (np.rint(blocks / scales[..., None]) + 128).astype(np.uint8).reshape(rows, -1)
    return np.ascontiguousarray(integers[:, :width]), scales
