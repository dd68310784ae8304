"""Rewrites of a graph. Each changes the model in place and returns how often it applied."""

import numpy as np
import onnx
from onnx import numpy_helper


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
