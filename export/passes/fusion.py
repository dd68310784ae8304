"""Rewrites that leave what a graph computes as it is, in fewer, larger nodes. Each changes the model in place and returns how
often it applied."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values

from ..targets.spec import LONG
from .matching import RMS_NORM, SELF_ATTENTION, array, bias_of, is_matrix, is_vector, match_linear, matmuls, replace, weight

MAX_SPLIT_OUTPUTS = 32
# Norms, and the operator of each that adds what comes before it.
WITH_RESIDUAL = {"LayerNormalization": "SkipLayerNormalization", RMS_NORM: "SkipSimplifiedLayerNormalization"}


def fix_reshapes(model: ir.Model) -> int:
    """Shapes that are computed become constants: an axis that stays keeps its place (0), one other is what is left (-1). The
    cuda target can then replay a step, in which nothing may be computed on the host; and a portable step that projects no
    more of the source is valid: a computed 0 beside -1 is not, and onnxruntime before 1.29 refuses it."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "Reshape" and node.inputs[1].const_value is None]:
        before = node.inputs[0].shape
        after = node.outputs[0].shape
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
        if before is not None and before.op_type == "Reshape" and match_linear(before.inputs[0]):
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
        found = [match_linear(value) for value in node.inputs[:3]]
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

    As many columns, and no more than `MAX_SPLIT_OUTPUTS`: the sizes of others the CUDA provider's `Split` copies from the host,
    which cannot be replayed."""
    groups = {}
    for node in matmuls(model):
        add = bias_of(node)
        alike = groups.setdefault((node.inputs[0], node.inputs[1].shape[1], add is None), [])
        if not alike or len(alike[-1]) == MAX_SPLIT_OUTPUTS:
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


def divide_by_roots(model: ir.Model) -> int:
    """x * (1 / sqrt(y)), as which RMSNorm is traced, becomes x / sqrt(y): a node less, and what onnxruntime looks for."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "Mul"]:
        states, inverse = node.inputs
        if (root := made_by(made_by(inverse, "Reciprocal"), "Sqrt")) is not None:
            replace(model, [node], [ir.node("Div", [states, root.outputs[0]])])
            count += 1
    return count


def attend_in_tiles(model: ir.Model) -> int:
    """Attention over `LONG` tokens or more, none of them padding, gets no mask: onnxruntime then works in tiles. This takes
    less time, and memory as the length instead of its square. With a mask, or biases, it does not."""
    found = [node for node in model.graph if reads_whole_sequences(node)]
    flags: dict[ir.Value, ir.Value] = {}
    for node in found:
        mask = node.inputs[4]
        if mask not in flags:
            made = is_long_and_full(model, mask)
            model.graph.insert_before(node, made)
            flags[mask] = made[-1].outputs[0]
        branches = {"then_branch": attention(node, node.inputs[:3]), "else_branch": attention(node, node.inputs)}
        replace(model, [node], [ir.node("If", [flags[mask]], branches)])
    return len(found)


def reads_whole_sequences(node: ir.Node) -> bool:
    """Whether this is attention with a mask, without biases, and not over keys of caches."""
    is_masked = node.op_type == "MultiHeadAttention" and len(node.inputs) == 5 and node.inputs[4] is not None
    return is_masked and not node.inputs[1].is_graph_input()


def is_long_and_full(model: ir.Model, mask: ir.Value) -> list[ir.Node]:
    """What finds out of a `mask` (B, S) whether S is `LONG` at least, and nothing is padding."""
    least = ir.node("ReduceMin", [mask], {"keepdims": 0})
    is_full = ir.node("Cast", least.outputs, {"to": ir.DataType.BOOL})
    length = ir.node("Shape", [mask], {"start": 1})
    is_long = ir.node("GreaterOrEqual", [length.outputs[0], weight(model, "long", np.array([LONG]))])
    return [least, is_full, length, is_long, ir.node("And", [is_full.outputs[0], is_long.outputs[0]])]


def attention(node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Graph:
    """A branch which is `node`, attention, of these `inputs`."""
    same = ir.node(node.op_type, inputs, dict(node.attributes), domain=node.domain)
    [output] = same.outputs
    output.name = f"{node.outputs[0].name}.{len(inputs)}"
    output.type = ir.TensorType(ir.DataType.FLOAT)
    return ir.Graph([], [output], nodes=[same], name=output.name)


def fuse_rms_norms(model: ir.Model) -> int:
    """RMSNorm in one operator, that of onnxruntime."""
    count = 0
    for node in [node for node in model.graph if node.op_type in ("Mul", "RMSNormalization")]:
        if (found := match_rms_norm(node)) is not None:
            states, scale, epsilon = found
            replace(model, [node], [ir.node(RMS_NORM, [states, scale], {"epsilon": epsilon})])
            count += 1
    return count


def match_rms_norm(node: ir.Node) -> tuple[ir.Value, ir.Value, float] | None:
    """What is normalized, its weights, and what is added to the mean square, if that is what `node` returns; before opset 23
    the operators are x * (1 / sqrt(mean(x^2) + epsilon)) * weight."""
    states, scale = node.inputs
    if node.op_type == "RMSNormalization":
        return states, scale, node.attributes["epsilon"].as_float()
    scaled = made_by(states, "Mul")
    if scaled is None or not is_vector(scale):
        return None
    states, inverse = scaled.inputs
    total = made_by(made_by(made_by(inverse, "Reciprocal"), "Sqrt"), "Add")
    square = made_by(made_by(total, "ReduceMean"), "Pow")
    if total is None or square is None or square.inputs[0] is not states:
        return None
    return states, scale, float(array(total.inputs[1]))


def select_before_products(model: ir.Model) -> int:
    """One token's x W + b of a row becomes the product of that token's x: nothing is computed for others, nor copied."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 1]:
        token = node.inputs[1].const_value
        product, add = match_linear(node.inputs[0]) or (None, None)
        if product is None or token is None or token.shape.rank() or len(node.inputs[0].uses()) > 1:
            continue
        new = [ir.node("Gather", [product.inputs[0], node.inputs[1]], {"axis": 1})]
        new.append(ir.node("MatMul", [new[0].outputs[0], product.inputs[1]]))
        if add is not None:
            new.append(ir.node("Add", [new[-1].outputs[0], add.inputs[1]]))
        replace(model, [product, *([add] if add is not None else []), node], new)
        count += 1
    return count


def sum_by_products(model: ir.Model) -> int:
    """Sums over the tokens of states (B, S, D) times weights (B, S, 1) become products of matrices. `ReduceSum` adds in one
    order for one row and in another for several, and there with more padding in yet another; a product of two rows of
    weights has one order."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "ReduceSum" and array(node.inputs[1]).tolist() == [1]]:
        weighted = made_by(node, "Mul")
        if weighted is None or made_by(made_by(weighted.inputs[1], "Cast"), "Unsqueeze") is None:
            continue
        states, weights = weighted.inputs
        rows = ir.node("Transpose", [weights], {"perm": [0, 2, 1]})
        twice = ir.node("Concat", [rows.outputs[0]] * 2, {"axis": 1})
        sums = ir.node("MatMul", [twice.outputs[0], states])
        first = ir.node("ReduceMax", [sums.outputs[0], node.inputs[1]], {"keepdims": node.attributes.get_int("keepdims", 1)})
        replace(model, [node], [rows, twice, sums, first])
        count += 1
    return count


def made_by(value: ir.Value | ir.Node | None, operator: str) -> ir.Node | None:
    """The node that made `value`, or the first input of that node, if it is an `operator`."""
    value = value.inputs[0] if isinstance(value, ir.Node) else value
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == operator else None


def fuse_residuals(model: ir.Model) -> int:
    """A norm of x + (a product + its bias) in one operator, which also returns the sum where others read it."""
    count = 0
    for node in [node for node in model.graph if node.op_type in WITH_RESIDUAL]:
        add = node.inputs[0].producer()
        if add is None or add.op_type != "Add" or any(map(is_vector, add.inputs)) or not any(map(match_linear, add.inputs)):
            continue
        branch, skip = sorted(add.inputs, key=lambda value: match_linear(value) is None)
        inputs = [branch, skip, *node.inputs[1:]]
        old = [add, node]
        if (bias := match_linear(branch)[1]) is not None and len(branch.uses()) == 1:
            shift = () if node.op_type == RMS_NORM else (node.inputs[2] if len(node.inputs) > 2 else None,)
            inputs = [bias.inputs[0], skip, node.inputs[1], *shift, bias.inputs[1]]
            old = [bias, *old]
        attributes = {"epsilon": node.attributes["epsilon"].as_float()}
        values = [node.outputs[0], *([add.outputs[0]] if len(add.outputs[0].uses()) > 1 else [])]
        outputs = [ir.Value(name=name) for name in (node.outputs[0].name, "", "", add.outputs[0].name)][: 3 * len(values) - 2]
        new = ir.node(WITH_RESIDUAL[node.op_type], inputs, attributes, domain="com.microsoft", outputs=outputs)
        # Where the sum was made: others may read it before the node that normalizes it.
        replace_nodes_and_values(model.graph, add, old, [new], values, outputs[::3])
        count += 1
    return count


def fuse_gelus(model: ir.Model) -> int:
    """GELU of x W + b in one operator, which adds the bias: `BiasGelu`, or `FastGelu` for the approximation by a tanh."""
    count = 0
    for node in [node for node in model.graph if node.op_type == "Gelu"]:
        _, add = match_linear(node.inputs[0]) or (None, None)
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
