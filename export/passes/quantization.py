"""Rewrites that hold weights in integers. Each changes the model in place and returns how often it applied."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from ..activations import COLUMNS, Calibration, Steps, int8_columns
from .matching import array, bias_of, matmuls, replace, weight

INT8_COMPUTE = 4  # the `accuracy_level` of MatMulNBits that quantizes activations too
BLOCK = 32  # weights of one column that share a scale
EMBEDDING_BLOCK = 128  # weights of one row that share a scale
CALIBRATED = "calibrated"  # in `ir.Model.meta`: the `Calibration`, whose keys are `name_of_weights`
TUNED = "tuned"  # in `ir.Model.meta`: a matrix (K, N) -> the name of its product's `Way`
SLICE = 2**24  # weights quantized at a time: what is computed in between is several times as large


def quantize_products(model: ir.Model) -> int:
    """x W + b in int8, each product in the way of `INT8_PRODUCTS` that `model.meta` chooses for it, by default `"row"`."""
    choose = model.meta.get(TUNED, lambda matrix: DEFAULT)
    rounded: dict[ir.Value, tuple[ir.Value, ...]] = {}
    found = matmuls(model)
    for node in found:
        way = INT8_PRODUCTS[choose(array(node.inputs[1]))]
        if way.block is None:
            multiply_rows(model, node, way, rounded)
        else:
            multiply_blocks(model, node, way.bits, way.block)
    return len(found)


def multiply_rows(model: ir.Model, node: ir.Node, way: "Way", rounded: dict[ir.Value, tuple[ir.Value, ...]]) -> None:
    """x W with W in int8, one scale for each column, and x in 8 bits, one scale for each row, so that what a row gives does not
    depend on the others of its batch. `rounded` has what was rounded already."""
    source, matrix = node.inputs
    if source not in rounded:
        rounded[source] = rounded_rows(model, source, before=node)
    x, step, zero, largest = rounded[source]
    integers, scales = in_slices(way.quantize, array(matrix), axis=1, joined=1)
    quantized = weight(model, f"{matrix.name}.int8", integers), step, weight(model, f"{matrix.name}.scales", scales), zero
    product = ir.node("MatMulIntegerToFloat", [x, *quantized], domain="com.microsoft")
    replace(model, [node], [product, ir.node("Mul", [product.outputs[0], largest])])


def name_of_weights(matrix: np.ndarray) -> bytes:
    """What products are found by whose names a trace has lost, and beside which others may be packed: the first column."""
    return matrix[:, 0].tobytes()


def quantize_calibrated(model: ir.Model) -> int:
    """Quantize the products that `model.meta` has a `Calibration` of, with one scale for all rows and two nodes for each.

    Those that lose too much by it are left to `quantize_products`. In both ways no row changes the outputs of others.
    """
    calibration = model.meta.get(CALIBRATED, Calibration())
    sources: dict[ir.Value, list[ir.Node]] = {}
    for node in matmuls(model):
        if name_of_weights(array(node.inputs[1])) in calibration.inputs:
            sources.setdefault(node.inputs[0], []).append(node)
    return sum(quantize_source(model, source, nodes, calibration) for source, nodes in sources.items())


def quantize_source(model: ir.Model, source: ir.Value, nodes: list[ir.Node], calibration: Calibration) -> int:
    """Quantize the products `nodes` of `source`. Return their number, or 0 if each row keeps a scale."""
    matrices = [array(node.inputs[1]) for node in nodes]
    choice = calibration.choose(tuple(map(name_of_weights, matrices)), matrices)
    if choice.steps is None:
        return 0
    quantize_with(model, source, nodes, choice.steps)
    return len(nodes)


def quantize_with(model: ir.Model, source: ir.Value, nodes: list[ir.Node], steps: Steps) -> None:
    """The products `nodes` of `source`."""
    name = nodes[0].inputs[1].name
    scale, zero = weight(model, f"{name}.step", steps.scale), weight(model, f"{name}.zero", steps.zero)
    new = []
    if steps.smoothing is not None:
        new.append(ir.node("Mul", [source, weight(model, f"{name}.smoothing", 1 / steps.smoothing)]))
    new.append(ir.node("QuantizeLinear", [new[0].outputs[0] if new else source, scale, zero]))
    model.graph.insert_before(nodes[0], new)
    for node in nodes:
        matrix, add = node.inputs[1], bias_of(node)
        integers, scales = in_slices(steps.quantize, array(matrix), axis=1, joined=1)
        inputs = [new[-1].outputs[0], weight(model, f"{matrix.name}.int8", integers)]
        inputs += [scale, weight(model, f"{matrix.name}.scales", scales), zero]
        inputs += [] if add is None else [None, add.inputs[1]]
        product = ir.node("MatMulIntegerToFloat", inputs, domain="com.microsoft")
        replace(model, [node] if add is None else [node, add], [product])


def rounded_rows(model: ir.Model, source: ir.Value, before: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """`source` in 8 bits, its step and its zero point, all three of rows whose largest magnitude is 1, and what that is.

    A row of zeros is divided by 0; whatever integers that gives, the product is multiplied by 0."""
    producer = source.producer()
    is_positive = producer is not None and producer.op_type == "Relu"
    name, levels, zero = ("positive", 255, 0) if is_positive else ("signed", 127, 128)
    absolute = [] if is_positive else [ir.node("Abs", [source])]
    axes = weight(model, "rows.axes", np.array([-1]))
    largest = ir.node("ReduceMax", [absolute[0].outputs[0] if absolute else source, axes], {"keepdims": 1})
    scaled = ir.node("Div", [source, largest.outputs[0]])
    steps = weight(model, f"{name}.step", np.float32(1 / levels)), weight(model, f"{name}.zero", np.uint8(zero))
    integers = ir.node("QuantizeLinear", [scaled.outputs[0], *steps])
    model.graph.insert_before(before, [*absolute, largest, scaled, integers])
    return integers.outputs[0], *steps, largest.outputs[0]


def quantize_integers(model: ir.Model) -> int:
    """As `quantize_products`, in standard operators, and x as it is: a large row costs the others precision."""
    count = 0
    rounded = {}
    for node in matmuls(model):
        source, matrix = node.inputs
        integers, scales = in_slices(int8_columns, array(matrix), axis=1, joined=1)
        if source not in rounded:
            rounded[source] = ir.node("DynamicQuantizeLinear", [source], num_outputs=3)
            model.graph.insert_before(node, rounded[source])
        x, scale, zero = rounded[source].outputs
        product = ir.node("MatMulInteger", [x, weight(model, f"{matrix.name}.int8", integers), zero])
        cast = ir.node("Cast", product.outputs, {"to": ir.DataType.FLOAT})
        scale = ir.node("Mul", [scale, weight(model, f"{matrix.name}.scales", scales)])
        replace(model, [node], [product, cast, scale, ir.node("Mul", [cast.outputs[0], scale.outputs[0]])])
        count += 1
    return count


def in_slices(
    quantize: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], matrix: np.ndarray, axis: int, joined: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Integers and scales that `quantize` gives for slices of `matrix` along `axis`, the integers joined along `joined`."""
    parts = np.array_split(matrix, -(-matrix.size // SLICE), axis)
    integers, scales = zip(*map(quantize, parts))
    return np.concatenate(integers, joined), np.concatenate(scales)


def full_columns(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `int8_columns`, with all of the 8 bits: for processors that add products in 32 bits."""
    scales = np.maximum(np.abs(matrix).max(axis=0) / 127, np.finfo(np.float32).tiny).astype(np.float32)
    return np.rint(matrix / scales).astype(np.int8), scales


def quantize_blocks(model: ir.Model) -> int:
    """x W + b with W in 4 bits, one scale for each block of a column, and x in int8, one scale for each block of a row."""
    found = matmuls(model)
    for node in found:
        multiply_blocks(model, node, 4, BLOCK)
    return len(found)


def multiply_blocks(model: ir.Model, node: ir.Node, bits: int, block: int) -> None:
    """x W + b with W in `bits` bits and x in int8, both with one scale for each `block` along K."""
    inputs, attributes = in_blocks(model, node, bits, block)
    add = bias_of(node)
    if add is not None:
        inputs += [None, None, add.inputs[1]]
    new = ir.node("MatMulNBits", inputs, attributes | {"accuracy_level": INT8_COMPUTE}, domain="com.microsoft")
    replace(model, [node] if add is None else [node, add], [new])


def weight_only_int8(model: ir.Model) -> int:
    """x W with W in 8 bits, one scale for each block of a column, and x as it is."""
    return weight_only(model, 8)


def weight_only_int4(model: ir.Model) -> int:
    """As `weight_only_int8`, in 4 bits."""
    return weight_only(model, 4)


def weight_only(model: ir.Model, bits: int) -> int:
    found = matmuls(model)
    for node in found:
        inputs, attributes = in_blocks(model, node, bits)
        replace(model, [node], [ir.node("MatMulNBits", inputs, attributes, domain="com.microsoft")])
    return len(found)


def in_blocks(model: ir.Model, product: ir.Node, bits: int, block: int = BLOCK) -> tuple[list[ir.Value], dict[str, int]]:
    """What `MatMulNBits` takes instead of `product`: inputs and attributes."""
    source, matrix = product.inputs
    integers, scales = in_slices(partial({4: int4_blocks, 8: int8_blocks}[bits], block=block), array(matrix), axis=1)
    inputs = [source, weight(model, f"{matrix.name}.int{bits}", integers), weight(model, f"{matrix.name}.scales", scales)]
    return inputs, {"K": matrix.shape[0], "N": matrix.shape[1], "bits": bits, "block_size": block}


def int4_blocks(matrix: np.ndarray, block: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """(K, N) -> pairs of 4-bit integers (N, blocks, bytes) with zero point 8, and the scales (N, blocks), of the same type."""
    blocks = column_blocks(matrix, block)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2, keepdims=True), axis=2)
    scales = nonzero(largest / -8, matrix.dtype)  # the largest becomes -8, the one integer without a positive twin
    integers = np.clip(np.rint(blocks / scales) + 8, 0, 15).astype(np.uint8)
    return integers[..., ::2] | integers[..., 1::2] << 4, scales[..., 0]


def int8_blocks(matrix: np.ndarray, block: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """(K, N) -> 8-bit integers (N, blocks, bytes) with zero point 128, and the scales (N, blocks), of the same type."""
    blocks = column_blocks(matrix, block)
    scales = nonzero(np.abs(blocks).max(axis=2, keepdims=True) / 127, matrix.dtype)
    return np.clip(np.rint(blocks / scales) + 128, 1, 255).astype(np.uint8), scales[..., 0]


def column_blocks(matrix: np.ndarray, block: int) -> np.ndarray:
    """(K, N) -> float32 (N, blocks, `block`), the last block of a column padded with 0."""
    padded = np.pad(matrix.T.astype(np.float32), ((0, 0), (0, -len(matrix) % block)))
    return padded.reshape(len(padded), -1, block)


def nonzero(scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`scales` in `dtype`, in which the integers are found, and 1 where they are 0 in it."""
    rounded = scales.astype(dtype)
    rounded[rounded == 0] = 1
    return rounded


@dataclass(frozen=True)
class Way:
    """One in which a product is computed in integers.

    Args:
        quantize: (K, N) -> integers and scales.
        bits: of a weight.
        block: weights of a column that share a scale; all if `None`.
        needs: instructions of the processor, any of them, by their names in Linux: without, sums overflow. None if empty.
    """

    quantize: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    bits: int = 8
    block: int | None = None
    needs: tuple[str, ...] = ()

    def loss(self, matrix: np.ndarray) -> float:
        """The mean square of what the weights (K, N) lose."""
        integers, scales = self.quantize(matrix)
        if self.block is None:
            return mean_square(integers * scales - matrix)
        if self.bits == 4:
            integers = np.stack([integers & 15, integers >> 4], axis=-1).reshape(*scales.shape, self.block)
        centered = integers.astype(np.float32) - 2 ** (self.bits - 1)
        return mean_square(centered * scales[..., None] - column_blocks(matrix, self.block))


def mean_square(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).mean())


VNNI = ("avx512_vnni", "avx_vnni")
DEFAULT = "row"
# By name. Where 8 bits are used in full, only processors that add products in 32 bits give the right sums for sure.
INT8_PRODUCTS = {
    DEFAULT: Way(int8_columns),
    "row-full": Way(full_columns, needs=VNNI),
    "block-32": Way(partial(int8_blocks, block=32), block=32, needs=VNNI),
    "block-64": Way(partial(int8_blocks, block=64), block=64, needs=VNNI),
    "block-32-int4": Way(partial(int4_blocks, block=32), bits=4, block=32),
}


def holds_quality(name: str, matrix: np.ndarray) -> bool:
    """Whether the way `name` loses no more of the weights (K, N) than the default, in the first `COLUMNS` of them."""
    sample = matrix[:, :COLUMNS]
    return name == DEFAULT or INT8_PRODUCTS[name].loss(sample) <= INT8_PRODUCTS[DEFAULT].loss(sample)


def quantize_embeddings(model: ir.Model) -> int:
    """The table that `input_ids` are looked up in: 8 bits, one scale for each block of a row."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "Gather" and node.inputs[1].name == "input_ids"]:
        table = node.inputs[0]
        integers, scales = in_slices(uint8_blocks, array(table), axis=0)
        inputs = [weight(model, f"{table.name}.uint8", integers), node.inputs[1]]
        inputs.append(weight(model, f"{table.name}.scales", scales))
        attributes = {"bits": 8, "block_size": EMBEDDING_BLOCK, "gather_axis": 0, "quantize_axis": 1}
        replace(model, [node], [ir.node("GatherBlockQuantized", inputs, attributes, domain="com.microsoft")])
        count += 1
    return count


def quantize_lookups(model: ir.Model) -> int:
    """As `quantize_embeddings`, in standard operators: one scale for each row."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "Gather" and node.inputs[1].name == "input_ids"]:
        table, ids = node.inputs
        integers, scales = in_slices(int8_rows, array(table), axis=0)
        rows = ir.node("Gather", [weight(model, f"{table.name}.int8", integers), ids])
        cast = ir.node("Cast", rows.outputs, {"to": ir.DataType.FLOAT})
        scale = ir.node("Gather", [weight(model, f"{table.name}.scales", scales), ids])
        replace(model, [node], [rows, cast, scale, ir.node("Mul", [cast.outputs[0], scale.outputs[0]])])
        count += 1
    return count


def int8_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(V, D) float32 -> int8 (V, D), and the scales (V, 1)."""
    scales = np.maximum(np.abs(table).max(axis=1, keepdims=True) / 127, np.finfo(np.float32).tiny).astype(np.float32)
    return np.rint(table / scales).astype(np.int8), scales


def uint8_blocks(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(V, D) float32 -> uint8 (V, D) with zero point 128, and the scales (V, blocks)."""
    rows, width = table.shape
    blocks = np.pad(table, ((0, 0), (0, -width % EMBEDDING_BLOCK))).reshape(rows, -1, EMBEDDING_BLOCK)
    scales = np.maximum(np.abs(blocks).max(axis=2) / 127, np.finfo(np.float32).tiny).astype(np.float32)
    integers = (np.rint(blocks / scales[..., None]) + 128).astype(np.uint8).reshape(rows, -1)
    return np.ascontiguousarray(integers[:, :width]), scales
