"""Rewrites of a graph. Each changes the model in place and returns how often it applied."""

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values
from onnx_ir.passes.common import RemoveUnusedNodesPass

INT8_COMPUTE = 4  # the `accuracy_level` of MatMulNBits that quantizes activations too
BLOCK = 32  # weights of one column that share a scale
EMBEDDING_BLOCK = 128  # weights of one row that share a scale
PIECES = 32  # of one `Split`
SELF_ATTENTION = ("GroupQueryAttention", "DecoderMaskedMultiHeadAttention")
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
NORMALIZED = ("LayerNormalization", "MultiHeadAttention", *SELF_ATTENTION)  # rows of like size
# What takes or arranges whole rows: these leave the size of each as it is.
ROWWISE = ("Gather", "GatherND", "Unsqueeze", "Squeeze", "Reshape")


def optimize(model: ir.Model, target: str, dtype: str) -> dict[str, int]:
    """All steps of `STEPS` for `target` and `dtype`, in order; how often each applied, by its name."""
    counts = {}
    for step in STEPS[target, dtype]:
        counts[step.__name__] = step(model)
        RemoveUnusedNodesPass()(model)
    if any(node.domain == "com.microsoft" for node in model.graph):
        model.opset_imports["com.microsoft"] = 1
    return counts


def fix_reshapes(model: ir.Model) -> int:
    """Shapes that are computed become constants: an axis that stays keeps its place (0), one other is what is left (-1). The
    cuda target can then replay a step, in which nothing may be computed on the host; and a portable step that projects no
    more of the source is valid: a computed 0 beside -1 is not, and onnxruntime before 1.29 refuses it."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "Reshape" and node.inputs[1].const_value is None]:
        before, after = node.inputs[0].shape, node.outputs[0].shape
        if before is None or after is None or after.has_unknown_dim():  # two sizes that are unknown would be the same
            continue
        kept = [0 if i < len(before) and before[i] == size else size for i, size in enumerate(after)]
        if sum(not isinstance(size, int) for size in kept) > 1:
            continue
        shape = np.array([size if isinstance(size, int) else -1 for size in kept])
        node.replace_input_with(1, weight(model, "shape." + ".".join(map(str, shape)), shape))
        node.attributes.pop("allowzero", None)  # with which 0 is a size
        count += 1
    return count


def strip_metadata(model: ir.Model) -> int:
    """The exporter records Python stack traces, with the paths of the machine it ran on, for every node; and shapes of all
    that nodes return, which later steps would make wrong."""
    graph = model.graph
    made = [value for node in graph for value in node.outputs]
    count = 0
    for owner in (model, graph, *graph, *graph.inputs, *graph.initializers.values(), *made):
        count += len(owner.metadata_props)
        owner.metadata_props.clear()
        owner.doc_string = None
    for value in set(made) - set(graph.outputs):
        value.type = value.shape = None
    return count


def drop_reshapes(model: ir.Model) -> int:
    """The heads that the modeling code splits and `cpu` joins again: onnxruntime's operators take and return (B, T, H * d)."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "Reshape"]:
        before = node.inputs[0].producer()
        if before is not None and before.op_type == "Reshape" and linear(before.inputs[0]):
            source = before.inputs[0]
        elif before is not None and before.op_type in SELF_ATTENTION:
            source = node.inputs[0]
        else:
            continue
        node.outputs[0].replace_all_uses_with(source)
        count += 1
    return count


def pack_projections(model: ir.Model) -> int:
    """Queries, keys and values of a decoder's self-attention come from one matrix product."""
    count = 0
    for node in [node for node in model.graph if node.op_type in SELF_ATTENTION]:
        found = [linear(value) for value in node.inputs[:3]]
        if None in found:  # something stands between, as rotation does
            continue
        new = side_by_side(model, found)
        inputs = [new[-1].outputs[0], None, None]  # GroupQueryAttention takes them as they are
        if node.op_type != "GroupQueryAttention":
            new.append(split(model, new[-1], [product.inputs[1].shape[1] for product, _ in found]))
            inputs = new[-1].outputs
        model.graph.insert_before(node, new)
        for index, value in enumerate(inputs):
            node.replace_input_with(index, value)
        count += 1
    return count


def pack_products(model: ir.Model) -> int:
    """Products x W + b that read the same x and return as many columns become one: queries, keys and values of a layer, and
    the keys and values that all layers' cross-attention reads.

    As many columns, and no more than `PIECES`: the sizes of others the CUDA provider's `Split` copies from the host, which
    cannot be replayed."""
    groups = {}
    for node in products(model):
        add = bias_of(node)
        alike = groups.setdefault((node.inputs[0], node.inputs[1].shape[1], add is None), [])
        if not alike or len(alike[-1]) == PIECES:
            alike.append([])
        alike[-1].append((node, add))
    count = 0
    for found in [found for alike in groups.values() for found in alike if len(found) > 1]:
        new = side_by_side(model, found)
        new.append(split(model, new[-1], [product.inputs[1].shape[1] for product, _ in found]))
        old = [[product] if add is None else [product, add] for product, add in found]
        values = [nodes[-1].outputs[0] for nodes in old]
        # Where the first of them is: others may read it before the last.
        replace_nodes_and_values(model.graph, old[0][0], sum(old, []), new, values, new[-1].outputs)
        count += 1
    return count


def side_by_side(model: ir.Model, found: list[tuple[ir.Node, ir.Node | None]]) -> list[ir.Node]:
    """One product, and its bias, with the columns of all that were `found`, each a product and the node that adds its bias."""
    first, add = found[0]
    name = f"{first.inputs[1].name}.packed"
    matrices = np.concatenate([array(product.inputs[1]) for product, _ in found], axis=1)
    new = [ir.node("MatMul", [first.inputs[0], weight(model, name, matrices)])]
    if add is not None:
        biases = np.concatenate([array(add.inputs[1]) for _, add in found])
        new.append(ir.node("Add", [new[-1].outputs[0], weight(model, f"{name}.bias", biases)]))
    return new


def split(model: ir.Model, node: ir.Node, widths: list[int]) -> ir.Node:
    sizes = weight(model, "widths." + ".".join(map(str, widths)), np.array(widths))
    return ir.node("Split", [node.outputs[0], sizes], {"axis": -1}, num_outputs=len(widths))


def fuse_residuals(model: ir.Model) -> int:
    """`LayerNormalization` of x + (a product + its bias) in one operator, which also returns the sum where others read it."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "LayerNormalization"]:
        add = node.inputs[0].producer()
        if add is None or add.op_type != "Add" or any(map(is_vector, add.inputs)) or not any(map(linear, add.inputs)):
            continue
        branch, skip = sorted(add.inputs, key=lambda value: linear(value) is None)
        inputs, old = [branch, skip, *node.inputs[1:]], [add, node]
        if (bias := linear(branch)[1]) is not None and len(branch.uses()) == 1:
            inputs = [bias.inputs[0], skip, *node.inputs[1:], *[None] * (3 - len(node.inputs)), bias.inputs[1]]
            old = [bias, *old]
        attributes = {"epsilon": node.attributes["epsilon"].as_float()}
        values = [node.outputs[0], *([add.outputs[0]] if len(add.outputs[0].uses()) > 1 else [])]
        outputs = [ir.Value(name=name) for name in (node.outputs[0].name, "", "", add.outputs[0].name)][: 3 * len(values) - 2]
        new = ir.node("SkipLayerNormalization", inputs, attributes, domain="com.microsoft", outputs=outputs)
        # Where the sum was made: others may read it before the node that normalizes it.
        replace_nodes_and_values(model.graph, add, old, [new], values, outputs[::3])
        count += 1
    return count


def fuse_gelus(model: ir.Model) -> int:
    """GELU of x W + b in one operator, which adds the bias: `BiasGelu`, or `FastGelu` for the approximation by a tanh."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "Gelu"]:
        _, add = linear(node.inputs[0]) or (None, None)
        if add is None or len(add.outputs[0].uses()) > 1:
            continue
        approximate = node.attributes.get_string("approximate", "none")
        name = {"none": "BiasGelu", "tanh": "FastGelu"}[approximate]
        replace(model, [add, node], [ir.node(name, add.inputs, domain="com.microsoft")])
        count += 1
    return count


def share_tied_weights(model: ir.Model) -> int:
    """A tied head is traced into a second, transposed copy of the embedding. Keeps one copy, and a `Transpose` that
    onnxruntime computes once, when it loads the file."""
    tables = [node.inputs[0] for node in model.graph if node.op_type == "Gather" and is_matrix(node.inputs[0])]
    copies = [value for value in model.graph.initializers.values() if is_matrix(value)]
    count = 0
    for table in dict.fromkeys(tables):
        transposed = array(table).T
        for value in copies:
            if value.shape == transposed.shape and np.array_equal(array(value), transposed):
                node = ir.node("Transpose", [table], {"perm": [1, 0]})
                model.graph.insert_before(model.graph[0], node)
                value.replace_all_uses_with(node.outputs[0])
                count += 1
    return count


def copy_transposed_weights(model: ir.Model) -> int:
    """A tied projection to the vocabulary reads the transposed embedding. With a matrix of its own it can be quantized, and
    onnxruntime, which keeps products' matrices in a layout of its own, then holds the embedding on disk only."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "Transpose" and is_matrix(node.inputs[0])]:
        table = node.inputs[0]
        node.outputs[0].replace_all_uses_with(weight(model, f"{table.name}.transposed", array(table).T))
        count += 1
    return count


def quantize_products(model: ir.Model) -> int:
    """x W + b with W in int8, one scale for each column, and x in 8 bits, one scale for all of it.

    What `LayerNormalization` returns has rows of like size, and so has attention, which averages what was made of them. Any
    other x is divided by the root mean square of each row first, and the product multiplied by it, so that a large row costs
    the others no precision."""
    count = 0
    for node in products(model):
        source, matrix = node.inputs
        integers, scales = int8_columns(array(matrix))
        quantized = [
            weight(model, f"{matrix.name}.int8", integers),
            weight(model, f"{matrix.name}.scales", scales),
            weight(model, f"{matrix.name}.zeros", np.zeros(len(scales), np.int8)),
        ]
        if is_normalized(source):
            add = bias_of(node)
            inputs = [source, *quantized, *([add.inputs[1]] if add else [])]
            new = [ir.node("DynamicQuantizeMatMul", inputs, domain="com.microsoft")]
            replace(model, [node, add] if add else [node], new)
        else:
            ones = weight(model, f"ones.{len(integers)}", np.ones(len(integers), np.float32))
            rows = ir.node("SimplifiedLayerNormalization", [source, ones], {"epsilon": 1e-12}, num_outputs=2)
            product = ir.node("DynamicQuantizeMatMul", [rows.outputs[0], *quantized], domain="com.microsoft")
            replace(model, [node], [rows, product, ir.node("Div", [product.outputs[0], rows.outputs[1]])])
        count += 1
    return count


def quantize_integers(model: ir.Model) -> int:
    """As `quantize_products`, in standard operators, and x as it is: a large row costs the others precision."""
    count, rounded = 0, {}
    for node in products(model):
        source, matrix = node.inputs
        integers, scales = int8_columns(array(matrix))
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


def int8_columns(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(K, N) float32 -> int8 and the scales (N,) of its columns.

    Processors without VNNI add two products, those of weights 2i and 2i + 1, in 16 bits. With activations of at most 255 no
    sum overflows where no two such weights add up to more than 128, and the scale sees to that."""
    pairs = matrix[: len(matrix) // 2 * 2]
    largest = np.maximum(np.abs(matrix).max(axis=0), np.abs(pairs[::2] + pairs[1::2]).max(axis=0, initial=0))
    scales = np.maximum(largest / 127, np.finfo(np.float32).tiny).astype(np.float32)
    return np.rint(matrix / scales).astype(np.int8), scales


def quantize_blocks(model: ir.Model) -> int:
    """x W + b with W in 4 bits, one scale for each block of a column, and x in int8, one scale for each block of a row."""
    count = 0
    for node in products(model):
        inputs, attributes = in_blocks(model, node, 4)
        if add := bias_of(node):
            inputs += [None, None, add.inputs[1]]
        new = ir.node("MatMulNBits", inputs, attributes | {"accuracy_level": INT8_COMPUTE}, domain="com.microsoft")
        replace(model, [node, add] if add else [node], [new])
        count += 1
    return count


def weight_only_int8(model: ir.Model) -> int:
    """x W with W in 8 bits, one scale for each block of a column, and x as it is."""
    return weight_only(model, 8)


def weight_only_int4(model: ir.Model) -> int:
    """As `weight_only_int8`, in 4 bits."""
    return weight_only(model, 4)


def weight_only(model: ir.Model, bits: int) -> int:
    found = products(model)
    for node in found:
        inputs, attributes = in_blocks(model, node, bits)
        replace(model, [node], [ir.node("MatMulNBits", inputs, attributes, domain="com.microsoft")])
    return len(found)


def in_blocks(model: ir.Model, product: ir.Node, bits: int) -> tuple[list[ir.Value], dict[str, int]]:
    """What `MatMulNBits` takes instead of `product`: inputs and attributes."""
    source, matrix = product.inputs
    integers, scales = {4: int4_blocks, 8: int8_blocks}[bits](array(matrix))
    inputs = [source, weight(model, f"{matrix.name}.int{bits}", integers), weight(model, f"{matrix.name}.scales", scales)]
    return inputs, {"K": matrix.shape[0], "N": matrix.shape[1], "bits": bits, "block_size": BLOCK}


def int4_blocks(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(K, N) -> pairs of 4-bit integers (N, blocks, bytes) with zero point 8, and the scales (N, blocks), of the same type."""
    blocks = column_blocks(matrix)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2, keepdims=True), axis=2)
    scales = nonzero(largest / -8, matrix.dtype)  # the largest becomes -8, the one integer without a positive twin
    integers = np.clip(np.rint(blocks / scales) + 8, 0, 15).astype(np.uint8)
    return integers[..., ::2] | integers[..., 1::2] << 4, scales[..., 0]


def int8_blocks(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(K, N) -> 8-bit integers (N, blocks, bytes) with zero point 128, and the scales (N, blocks), of the same type."""
    blocks = column_blocks(matrix)
    scales = nonzero(np.abs(blocks).max(axis=2, keepdims=True) / 127, matrix.dtype)
    return np.clip(np.rint(blocks / scales) + 128, 1, 255).astype(np.uint8), scales[..., 0]


def column_blocks(matrix: np.ndarray) -> np.ndarray:
    """(K, N) -> float32 (N, blocks, `BLOCK`), the last block of a column padded with 0."""
    padded = np.pad(matrix.T.astype(np.float32), ((0, 0), (0, -len(matrix) % BLOCK)))
    return padded.reshape(len(padded), -1, BLOCK)


def nonzero(scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`scales` in `dtype`, in which the integers are found, and 1 where they are 0 in it."""
    rounded = scales.astype(dtype)
    rounded[rounded == 0] = 1
    return rounded


def quantize_embeddings(model: ir.Model) -> int:
    """The table that `input_ids` are looked up in: 8 bits, one scale for each block of a row."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "Gather" and node.inputs[1].name == "input_ids"]:
        table = node.inputs[0]
        integers, scales = uint8_blocks(array(table))
        inputs = [weight(model, f"{table.name}.uint8", integers), node.inputs[1]]
        inputs.append(weight(model, f"{table.name}.scales", scales))
        attributes = {"bits": 8, "block_size": EMBEDDING_BLOCK, "gather_axis": 0, "quantize_axis": 1}
        replace(model, [node], [ir.node("GatherBlockQuantized", inputs, attributes, domain="com.microsoft")])
        count += 1
    return count


def uint8_blocks(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(V, D) float32 -> uint8 (V, D) with zero point 128, and the scales (V, blocks)."""
    rows, width = table.shape
    blocks = np.pad(table, ((0, 0), (0, -width % EMBEDDING_BLOCK))).reshape(rows, -1, EMBEDDING_BLOCK)
    scales = np.maximum(np.abs(blocks).max(axis=2) / 127, np.finfo(np.float32).tiny).astype(np.float32)
    integers = (np.rint(blocks / scales[..., None]) + 128).astype(np.uint8).reshape(rows, -1)
    return np.ascontiguousarray(integers[:, :width]), scales


def array(value: ir.Value) -> np.ndarray:
    return value.const_value.numpy()


def weight(model: ir.Model, name: str, values: np.ndarray) -> ir.Value:
    """`values` as a weight of the graph; what has the name already is the same."""
    if name not in model.graph.initializers:
        tensor = ir.tensor(np.ascontiguousarray(values), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        model.graph.register_initializer(value)
    return model.graph.initializers[name]


def replace(model: ir.Model, old: list[ir.Node], new: list[ir.Node]) -> None:
    """The last of `new` returns what the last of `old` returned."""
    replace_nodes_and_values(model.graph, old[-1], old, new, old[-1].outputs, new[-1].outputs)


def products(model: ir.Model) -> list[ir.Node]:
    """The products x W with a matrix of weights."""
    return [node for node in model.graph if node.op_type == "MatMul" and is_matrix(node.inputs[1])]


def is_matrix(value: ir.Value) -> bool:
    return value.const_value is not None and len(value.shape) == 2 and value.dtype in FLOATS


def is_vector(value: ir.Value) -> bool:
    return value.const_value is not None and len(value.shape) == 1


def bias_of(product: ir.Node) -> ir.Node | None:
    """The node that adds a bias to `product`, if that is all it is used for."""
    users = product.outputs[0].consumers()
    is_bias = len(users) == 1 and users[0].op_type == "Add" and is_vector(users[0].inputs[1])
    return users[0] if is_bias else None


def linear(value: ir.Value) -> tuple[ir.Node, ir.Node | None] | None:
    """What made `value`, if it is x W (+ b): the product, and the node that adds the bias."""
    node, add = value.producer(), None
    if node is not None and node.op_type == "Add" and is_vector(node.inputs[1]):
        node, add = node.inputs[0].producer(), node
    if node is None or node.op_type != "MatMul" or not is_matrix(node.inputs[1]):
        return None
    return node, add


def is_normalized(value: ir.Value) -> bool:
    node = value.producer()
    while node is not None and node.op_type in ROWWISE:
        node = node.inputs[0].producer()
    return node is not None and node.op_type in NORMALIZED


TRACED_FOR_CPU = (strip_metadata, drop_reshapes, pack_projections, copy_transposed_weights)
TRACED_FOR_CUDA = (fix_reshapes, strip_metadata, drop_reshapes, copy_transposed_weights, pack_products)
TRACED_FOR_CUDA += (fuse_residuals, fuse_gelus)
STEPS = {
    ("portable", "fp32"): (fix_reshapes, strip_metadata, share_tied_weights),
    ("portable", "int8"): (fix_reshapes, strip_metadata, copy_transposed_weights, quantize_integers),
    **dict.fromkeys([("cuda", "fp32"), ("cuda", "fp16"), ("cuda", "bf16")], TRACED_FOR_CUDA),
    ("cuda", "int8"): (*TRACED_FOR_CUDA, weight_only_int8),
    ("cuda", "int4"): (*TRACED_FOR_CUDA, weight_only_int4),
    ("cpu", "fp32"): TRACED_FOR_CPU,
    ("cpu", "int8"): (*TRACED_FOR_CPU, quantize_products, quantize_embeddings),
    ("cpu", "int4"): (*TRACED_FOR_CPU, quantize_blocks, quantize_embeddings),
}
