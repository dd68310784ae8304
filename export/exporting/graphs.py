"""The graphs of an export, from specs to files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx.helper import make_tensor_value_info
from onnx_ir import Value
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ..graphs.config import Config
from ..graphs.context import GraphContext, TargetGraphs
from ..graphs.input_scales import Calibration
from ..graphs.ops import CONTRIB, IR_VERSION, Ops, with_spec
from ..graphs.saving import save_graph
from ..graphs.weights import CheckpointWeights, WeightStore
from ..heads import HEADS
from ..specs.alignment import AlignmentHead
from ..specs.graph_spec import GraphSpec
from ..targets.target import Target

SHARED_WEIGHTS = "model.onnx_data"
SCRATCH = "weights.partial"  # removed when the weights are in the graphs
DTYPES = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class GraphSource:
    """A model whose graphs are written: its config and weights, the tokens of a shortlist, what its
    linear maps read, and the heads of its alignment graph."""

    config: Config
    weights: CheckpointWeights
    shortlist: list[int] | None = None
    calibration: Calibration | None = None
    alignment: Sequence[AlignmentHead] = ()


@dataclass(frozen=True)
class GraphFormat:
    """The choices of a user: the target, the dtype of the weights, the dtype of activations, and
    the opset."""

    target: Target
    dtype: str
    activations: str
    opset: int


def write_graphs(
    source: GraphSource, form: GraphFormat, specs: dict[str, GraphSpec], directory: Path
) -> None:
    """Write the graphs with these `specs` by role, and their weights, to the export `directory`.

    `source` is the model, and `form` has the target, the dtypes and the opset.
    """
    files = directory / "onnx"
    files.mkdir(parents=True, exist_ok=True)
    shared = files / (SHARED_WEIGHTS if form.target.shares_weights else SCRATCH)
    store = WeightStore(source.weights, DTYPES[form.activations], shared)
    for role, spec in specs.items():
        model = write_graph(source, store, form, role, spec)
        if form.target.is_standard:
            check_standard(model)
        if form.target.shares_weights:
            ir.save(model, directory / spec.file)
        else:
            save_graph(model, directory / spec.file)
    if not form.target.shares_weights:
        shared.unlink()


def write_graph(
    source: GraphSource, store: WeightStore, form: GraphFormat, role: str, spec: GraphSpec
) -> ir.Model:
    """Return the graph of `role` with the inputs and outputs of `spec`. `store` keeps weights that
    several graphs share.

    `source` is the model, and `form` has the target, the dtypes and the opset.
    """
    target: TargetGraphs = form.target.graphs(form.dtype)
    op = Ops(store.dtype)
    options = source.shortlist, source.calibration, source.alignment
    g = GraphContext(op, source.config, store, target, form.opset, *options)
    inputs = {tensor.name: with_spec(Value(), tensor) for tensor in spec.inputs}
    outputs = target.write[graph_kind(role, source.config)](g, dict(inputs))
    graph = ir.Graph(
        list(inputs.values()),
        [with_spec(value, tensor) for value, tensor in zip(outputs, spec.outputs, strict=True)],
        nodes=op.nodes,
        initializers=list(op.initializers.values()),
        opset_imports={
            "": form.opset,
            **({CONTRIB: 1} if any(node.domain for node in op.nodes) else {}),
        },
        name=role,
    )
    model = ir.Model(graph, ir_version=IR_VERSION, producer_name="vanilla-transformer")
    RemoveUnusedNodesPass()(model)
    return model


def check_standard(model: ir.Model) -> None:
    """Check that `model` is valid and has standard operators only.

    In the checked model the weights are inputs, so that they are not read.

    Raises:
        onnx.checker.ValidationError: if it is not valid.
        ValueError: for an operator that is not standard.
    """
    domains = {node.domain for node in ir.traversal.RecursiveGraphIterator(model.graph)} - {""}
    if domains:  # onnx's own check accepts operators of other domains
        seen = f"the graph {model.graph.name} has operators of {', '.join(sorted(domains))}"
        raise ValueError(f"{seen}, expected only standard ones")
    proto = ir.to_proto(model)
    weights = [
        make_tensor_value_info(weight.name, weight.data_type, weight.dims)
        for weight in proto.graph.initializer
    ]
    proto.graph.input.extend(weights)
    proto.graph.ClearField("initializer")
    onnx.checker.check_model(proto)


def graph_kind(role: str, config: Config) -> str:
    """Return the key in `TargetGraphs.write` of the function that writes the graph of `role`.

    It is `"sequence"` for a model that does not generate, `"seq2seq ROLE"` for an encoder-decoder
    model, and the role for a decoder-only model."""
    if not HEADS[config.architecture].generates:
        return "sequence"
    return f"seq2seq {role}" if config.is_seq2seq else role
