"""Rewrites of a graph. Each changes the model in place and returns how often it applied."""

import logging

import numpy as np
import onnx
from onnx import helper, numpy_helper

# Weights of one block share a scale. Smaller blocks for 4 bits, whose steps are coarser.
BITS = {"int8": 8, "int4": 4}
BLOCK_SIZE = {"int8": 128, "int4": 32}
INT8_COMPUTE = 4  # the `accuracy_level` of MatMulNBits that quantizes activations too


def optimize(model: onnx.ModelProto, target: str, dtype: str) -> dict[str, int]:
    """All that `target` and `dtype` ask for; how often each step applied, by its name."""
    counts = {"strip_metadata": strip_metadata(model)}
    if target == "cpu":
        counts["pack_projections"] = pack_projections(model)
    if dtype == "fp32":
        counts["share_tied_weights"] = share_tied_weights(model)
    else:
        counts["copy_transposed_weights"] = copy_transposed_weights(model)
        counts["quantize_weights"] = quantize_weights(model, BITS[dtype], BLOCK_SIZE[dtype])
    return counts


def pack_projections(model: onnx.ModelProto) -> int:
    """Queries, keys and values of a `GroupQueryAttention` come from one matrix product, which is what it takes best."""
    graph = model.graph
    weights = {weight.name: weight for weight in graph.initializer}
    made_by = {output: node for node in graph.node for output in node.output}
    count = 0
    for node in [node for node in graph.node if node.op_type == "GroupQueryAttention"]:
        found = [projection(name, made_by, weights) for name in node.input[:3]]
        if None in found or len({source for source, *_ in found}) > 1:
            continue
        name = f"packed_projections_{count}"
        matrix = np.concatenate([numpy_helper.to_array(weights[weight]) for _, weight, _, _ in found], axis=1)
        graph.initializer.append(numpy_helper.from_array(matrix, f"{name}.weight"))
        packed = [helper.make_node("MatMul", [found[0][0], f"{name}.weight"], [f"{name}.product"], name=f"{name}.product")]
        if found[0][2] is not None:
            bias = np.concatenate([numpy_helper.to_array(weights[bias]) for _, _, bias, _ in found])
            graph.initializer.append(numpy_helper.from_array(bias, f"{name}.bias"))
            packed.append(helper.make_node("Add", [f"{name}.product", f"{name}.bias"], [f"{name}.sum"], name=f"{name}.sum"))
        place = list(graph.node).index(node)
        for new in reversed(packed):
            graph.node.insert(place, new)
        node.input[0], node.input[1], node.input[2] = packed[-1].output[0], "", ""
        for old in [old for *_, nodes in found for old in nodes]:
            graph.node.remove(old)
        count += 1
    remove_unused_weights(graph)
    return count


def projection(name, made_by, weights):
    """What is behind the tensor `name`, if it is x W (+ b) reshaped: x, W, b (or None), and the nodes."""
    nodes, node = [], made_by.get(name)
    while node is not None and node.op_type == "Reshape":
        nodes, node = [*nodes, node], made_by.get(node.input[0])
    bias = None
    if node is not None and node.op_type == "Add" and node.input[1] in weights:
        bias, nodes, node = node.input[1], [*nodes, node], made_by.get(node.input[0])
    if node is None or node.op_type != "MatMul" or node.input[1] not in weights:
        return None
    return node.input[0], node.input[1], bias, [*nodes, node]


def remove_unused_weights(graph: onnx.GraphProto) -> None:
    used = {name for node in graph.node for name in node.input}
    for weight in [weight for weight in graph.initializer if weight.name not in used]:
        graph.initializer.remove(weight)


def copy_transposed_weights(model: onnx.ModelProto) -> int:
    """A tied projection to the vocabulary reads the transposed embedding; to be quantized it needs a matrix of its own."""
    graph = model.graph
    weights = {weight.name: weight for weight in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights]
    for node in nodes:
        matrix = np.ascontiguousarray(numpy_helper.to_array(weights[node.input[0]]).T)
        graph.initializer.append(numpy_helper.from_array(matrix, node.output[0]))
        graph.node.remove(node)
    return len(nodes)


def quantize_weights(model: onnx.ModelProto, bits: int, block_size: int) -> int:
    """Matrices that are multiplied with become integers with one scale per block of a column (`MatMulNBits`)."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    # Importing it makes every library's messages appear.
    root.setLevel(level)
    root.handlers[:] = handlers
    recipe = DefaultWeightOnlyQuantConfig(block_size=block_size, is_symmetric=True, accuracy_level=INT8_COMPUTE, bits=bits)
    quantizer = MatMulNBitsQuantizer(model, algo_config=recipe)
    quantizer.process()
    model.CopyFrom(quantizer.model.model)
    return sum(node.op_type == "MatMulNBits" for node in model.graph.node)


def share_tied_weights(model: onnx.ModelProto) -> int:
    """A tied head is traced into a second, transposed copy of the embedding. Keeps one copy, and a `Transpose` that
    onnxruntime computes once, when it loads the file."""
    weights = {w.name: w for w in model.graph.initializer if len(w.dims) == 2}
    tables = [node.input[0] for node in model.graph.node if node.op_type == "Gather" and node.input[0] in weights]
    count = 0
    for table in dict.fromkeys(tables):
        transposed = numpy_helper.to_array(weights[table]).T
        for name, weight in list(weights.items()):
            if tuple(weight.dims) != transposed.shape or not np.array_equal(numpy_helper.to_array(weight), transposed):
                continue
            model.graph.initializer.remove(weight)
            del weights[name]
            model.graph.node.insert(0, onnx.helper.make_node("Transpose", [table], [name], perm=[1, 0]))
            count += 1
    return count


def strip_metadata(model: onnx.ModelProto) -> int:
    """The exporter records Python stack traces, with the paths of the machine it ran on, for every node."""
    count = 0
    for owner in (
        model,
        model.graph,
        *model.graph.node,
        *model.graph.input,
        *model.graph.output,
        *model.graph.initializer,
    ):
        count += len(owner.metadata_props)
        del owner.metadata_props[:]
        owner.doc_string = ""
    del model.graph.value_info[:]
    return count
