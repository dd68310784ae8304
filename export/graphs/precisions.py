"""Matrix multiplications x W + b and embedding look-ups, for each dtype of the weights.

Matrices of a checkpoint are (N, K), those of graphs (K, N), those of several linear maps of one
input side by side.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from onnx_ir import Value

from .context import GraphContext, Precision
from .input_scales import Steps
from .quantization import (
    BLOCK,
    EMBEDDING_BLOCK,
    INT8_COMPUTE,
    Quantized,
    in_slices,
    int4_blocks,
    int8_blocks,
    int8_columns,
    int8_rows,
    uint8_blocks,
)
from .weights import bare

# MatMulNBits on CUDA multiplies by packed weights if their number of columns is a multiple
COLUMN_MULTIPLE = 8


def add_bias(g: GraphContext, result: Value, bias: Value | None) -> Value:
    return result if bias is None else g.op("Add", result, bias)


# ----------------------------------------------------------------------------------- floating point


def float_matmul(g: GraphContext, x: Value, names: Sequence[str], bias: Value | None) -> Value:
    return add_bias(g, g.op("MatMul", x, *g.matrices(names, side_by_side)), bias)


def float_look_up(g: GraphContext, table: str, ids: Value) -> Value:
    return g.op("Gather", g.weight(table), ids)


def tied_matmul(g: GraphContext, x: Value, names: Sequence[str], bias: Value | None) -> Value:
    """Return x W + b of the linear maps `names` side by side, in floating point.

    A projection that is tied to the embeddings reads their table through a `Transpose`. onnxruntime
    computes that once, when it loads the graph. `bias` is the b of all maps, or None.
    """
    table = f"{names[0]}.weight"
    if not g.store.weights.is_tied(table):
        return float_matmul(g, x, names, bias)
    return add_bias(g, g.op("MatMul", x, g.op("Transpose", g.weight(table), perm=[1, 0])), bias)


# -------------------------------------------------------------------------- integers of onnxruntime


def row_int8_matmul(g: GraphContext, x: Value, names: Sequence[str], bias: Value | None) -> Value:
    """Return x W + b of the linear maps `names` side by side, with int8 weights that have a scale
    for each column.

    x becomes 8 bits with a scale for each row, so a row does not depend on the other rows of its
    batch. Calibrated inputs have one scale for all rows. `bias` is the b of all maps, or None.
    """
    steps = calibrated_steps(g, x, names)
    if steps is not None:
        return calibrated_matmul(g, x, names, bias, steps)
    weights, scales = g.matrices(names, int8_matrices)
    integers, step, zero, largest = g.op.once(("rounded rows", x), lambda: quantize_rows(g, x))
    scaled = g.contrib("MatMulIntegerToFloat", integers, weights, step, scales, zero)
    return add_bias(g, g.op("Mul", scaled, largest), bias)


def quantize_rows(g: GraphContext, x: Value) -> tuple[Value, np.float32, np.uint8, Value]:
    """Return (integers, step, zero point, largest) for x (..., K) in 8 bits.

    `largest` (..., 1) are the largest magnitudes of the rows. Step and zero point are for rows
    divided by these. A row of zeros is divided by 0. Its matmul is multiplied by 0 in the end, so
    it is 0.
    """
    producer = x.producer()
    is_positive = producer is not None and producer.op_type == "Relu"
    step, zero = (
        (np.float32(1 / 255), np.uint8(0)) if is_positive else (np.float32(1 / 127), np.uint8(128))
    )
    largest = g.op("ReduceMax", x if is_positive else g.op("Abs", x), [-1], keepdims=1)
    return g.op("QuantizeLinear", g.op("Div", x, largest), step, zero), step, zero, largest


def calibrated_steps(g: GraphContext, x: Value, names: Sequence[str]) -> Steps | None:
    """Return the quantization of x with one scale for all rows, for the linear maps `names`.

    All linear maps that read x have the same. It is None without a calibration of these maps, and
    if `input_scales.choose` prefers a scale for each row.
    """
    name = bare(names[0])
    if g.calibration is None or name not in g.calibration.inputs:
        return None
    modules = g.op.once(("readers", x), lambda: names)
    matrices = [g.store.weights[f"{module}.weight"].T for module in modules]
    return g.calibration.choose(name, tuple(map(bare, modules)), matrices).steps


def calibrated_matmul(
    g: GraphContext, x: Value, names: Sequence[str], bias: Value | None, steps: Steps
) -> Value:
    """Return x W + b of the linear maps `names` side by side, with int8 weights that have a scale
    for each column.

    x becomes 8 bits by `steps`, with one scale for all rows. `bias` is the b of all maps, or None.
    """
    integers = g.op.once(("rounded", x), lambda: quantize_linear(g, x, steps))
    weights, scales = g.matrices(names, calibrated_matrices, steps)
    return g.contrib(
        "MatMulIntegerToFloat", integers, weights, steps.scale, scales, steps.zero, None, bias
    )


def quantize_linear(g: GraphContext, x: Value, steps: Steps) -> Value:
    divided = x if steps.smoothing is None else g.op("Mul", x, 1 / steps.smoothing)
    return g.op("QuantizeLinear", divided, steps.scale, steps.zero)


def block_int4_matmul(g: GraphContext, x: Value, names: Sequence[str], bias: Value | None) -> Value:
    """Return x W + b of the linear maps `names` side by side, with 4-bit weights and 8-bit x.

    A block of `BLOCK` numbers of a column of W or a row of x has one scale. `bias` is the b of all
    maps, or None.
    """
    return block_matmul(g, x, names, 4, (None, None, bias), accuracy_level=INT8_COMPUTE)


def block_weight_matmul(
    bits: int, g: GraphContext, x: Value, names: Sequence[str], bias: Value | None
) -> Value:
    """Return x W + b of the linear maps `names` side by side, with weights of `bits` bits; x is not
    quantized.

    A block of `BLOCK` weights of a column has one scale. Columns are padded to a multiple of
    `COLUMN_MULTIPLE`: the CUDA provider would unpack any other matrix before each matmul. `bias` is
    the b of all maps, or None.
    """
    count = columns(g, names)
    scaled = block_matmul(g, x, names, bits, multiple=COLUMN_MULTIPLE)
    return add_bias(
        g, g.op("Slice", scaled, [0], [count], [-1]) if count % COLUMN_MULTIPLE else scaled, bias
    )


def block_matmul(
    g: GraphContext,
    x: Value,
    names: Sequence[str],
    bits: int,
    more: Sequence[Value | None] = (),
    multiple: int = 1,
    **attributes: int,
) -> Value:
    count = columns(g, names)
    count += -count % multiple
    weights, scales = g.matrices(names, block_matrices, bits, count)
    attributes |= {
        "K": g.store.weights.shape(f"{names[0]}.weight")[1],
        "N": count,
        "bits": bits,
        "block_size": BLOCK,
    }
    return g.contrib("MatMulNBits", x, weights, scales, *more, **attributes)


def columns(g: GraphContext, names: Sequence[str]) -> int:
    """Return the number of columns of the matrices of the linear maps `names` side by side."""
    return sum(g.store.weights.shape(f"{name}.weight")[0] for name in names)


def block_look_up(g: GraphContext, table: str, ids: Value) -> Value:
    """Return the rows `ids` of the weights `table`, stored in 8 bits with a scale for each block of
    a row."""
    integers, scales = g.transform_weights([table], block_table)
    attributes = {"bits": 8, "block_size": EMBEDDING_BLOCK, "gather_axis": 0, "quantize_axis": 1}
    return g.contrib("GatherBlockQuantized", integers, ids, scales, **attributes)


# ------------------------------------------------------------------- integers in standard operators


def standard_int8_matmul(
    g: GraphContext, x: Value, names: Sequence[str], bias: Value | None
) -> Value:
    """Return x W + b of the linear maps `names` side by side, with int8 weights that have a scale
    for each column.

    x becomes 8 bits with one scale for all rows: a large row costs the others precision. `bias` is
    the b of all maps, or None.
    """
    op = g.op
    weights, scales = g.matrices(names, int8_matrices)
    integers, scale, zero = op.once(
        ("rounded", x), lambda: op.outputs(3, "DynamicQuantizeLinear", x)
    )
    scaled = op.cast(op("MatMulInteger", integers, weights, zero), "float32")
    return add_bias(g, op("Mul", scaled, op("Mul", scale, scales)), bias)


def row_look_up(g: GraphContext, table: str, ids: Value) -> Value:
    """Return the rows `ids` of the weights `table` in float32, written as nodes.

    The graph stores the table in int8 with a scale for each row; this function quantizes it.
    """
    integers, scales = g.transform_weights([table], int8_table)
    return g.op(
        "Mul", g.op.cast(g.op("Gather", integers, ids), "float32"), g.op("Gather", scales, ids)
    )


# ---------------------------------------------------------------------------- arrays of the weights


def side_by_side(*matrices: np.ndarray) -> tuple[np.ndarray]:
    return (
        np.concatenate([matrix.T for matrix in matrices], axis=1)
        if len(matrices) > 1
        else matrices[0].T,
    )


def int8_matrices(*matrices: np.ndarray) -> Quantized:
    return in_slices(int8_columns, side_by_side(*matrices)[0], axis=1, joined=1)


def calibrated_matrices(*arguments) -> Quantized:
    *matrices, steps = arguments
    return in_slices(steps.quantize, side_by_side(*matrices)[0], axis=1, joined=1)


def block_matrices(*arguments) -> Quantized:
    *matrices, bits, count = arguments
    integers, scales = in_slices(
        {4: int4_blocks, 8: int8_blocks}[bits], side_by_side(*matrices)[0], axis=1
    )
    missing = (0, count - len(integers))
    if not any(missing):
        return integers, scales
    return np.pad(integers, (missing, (0, 0), (0, 0))), np.pad(scales, (missing, (0, 0)))


def block_table(table: np.ndarray) -> Quantized:
    return in_slices(uint8_blocks, table, axis=0)


def int8_table(table: np.ndarray) -> Quantized:
    return in_slices(int8_rows, table, axis=0)


FLOAT = Precision(float_matmul, float_look_up)
TIED_FLOAT = Precision(tied_matmul, float_look_up)
ROW_INT8 = Precision(row_int8_matmul, block_look_up)
BLOCK_INT4 = Precision(block_int4_matmul, block_look_up)
STANDARD_INT8 = Precision(standard_int8_matmul, row_look_up)
WEIGHT_ONLY = {
    bits: Precision(partial(block_weight_matmul, bits), float_look_up) for bits in (8, 4)
}
