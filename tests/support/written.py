"""Parts of graphs, written by the functions of `graphs` and run by onnxruntime."""

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from safetensors.numpy import save_file

from vanilla_transformer import VanillaEncoderConfig
from vanilla_transformer_export.graphs.config import Config
from vanilla_transformer_export.graphs.context import GraphContext
from vanilla_transformer_export.graphs.ops import CONTRIB, Ops, data_type
from vanilla_transformer_export.graphs.weights import CheckpointWeights, WeightStore
from vanilla_transformer_export.targets.registry import get_target


def write(
    part, weights, inputs, target="cpu", dtype="fp32", opset=None, calibration=None, **fields
):
    """Return an ONNX model with the nodes that `part` writes and the values that it returns.

    `part` is called with a `GraphContext` and the values of `inputs`. The context has `weights`,
    and a config with `fields`.
    """
    config = Config(
        VanillaEncoderConfig(tie_word_embeddings=False, **fields), "VanillaEncoderModel"
    )
    kind = get_target(target)
    with tempfile.TemporaryDirectory() as folder:
        save_file(weights, Path(folder, "model.safetensors"))
        store = WeightStore(
            CheckpointWeights(Path(folder), config), np.dtype(np.float32), Path(folder, "data")
        )
        op = Ops()
        g = GraphContext(
            op, config, store, kind.graphs(dtype), opset or kind.opsets[0], None, calibration
        )
        values = {
            name: ir.Value(
                name=name,
                type=ir.TensorType(data_type(array.dtype.name)),
                shape=ir.Shape([None] * array.ndim),
            )
            for name, array in inputs.items()
        }
        outputs = part(g, *values.values())
        for number, output in enumerate(outputs):
            output.name, output.type, output.shape = (
                f"y{number}",
                ir.TensorType(ir.DataType.FLOAT),
                ir.Shape([None, None]),
            )
        opsets = {"": g.opset, **({CONTRIB: 1} if target != "portable" else {})}
        graph = ir.Graph(
            list(values.values()), outputs, nodes=op.nodes,
            initializers=list(op.initializers.values()), opset_imports=opsets, name="g",
        )  # fmt: skip
        return ir.to_proto(ir.external_data.load_to_model(ir.Model(graph, ir_version=10)))


def run(model, inputs):
    """Return the outputs of an ONNX `model` for `inputs`, {name: array}."""
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]
