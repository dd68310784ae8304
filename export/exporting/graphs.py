"""The graphs of an export, from specs to files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from ..proof.compare import TOLERANCES, Report
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
class Graphs:
    """The graphs of an export: a model, and how it is written.

    Args:
        specs: the graphs, by the dtype of their weights and by role.
        shortlist: the tokens that have logits, None for all.
        calibration: what the linear maps read, to quantize it.
        alignment: the heads of the alignment graph.
        alignment_facts: fields of the manifest about the choice of these heads.
    """

    config: Config
    weights: CheckpointWeights
    target: Target
    activations: str
    opset: int
    specs: dict[str, dict[str, GraphSpec]]
    shortlist: list[int] | None = None
    calibration: Calibration | None = None
    alignment: Sequence[AlignmentHead] = ()
    alignment_facts: dict[str, float] = field(default_factory=dict)

    @property
    def dtypes(self) -> list[str]:
        return list(self.specs)

    @property
    def files(self) -> dict[str, str]:
        """{role: file} of the graphs of the first dtype."""
        return {role: spec.file for role, spec in self.specs[self.dtypes[0]].items()}

    def facts(self, reports: Mapping[str, Report]) -> dict[str, Any]:
        """Return the fields `default_dtype` and `variants` of the manifest.

        `variants` has an entry for each dtype of weights, with the files of its graphs, the
        tolerance of its errors and its `parity`. `reports` are those of the comparison with torch,
        by dtype; without one, the parity is None."""
        variants: dict[str, dict[str, Any]] = {}
        for dtype, specs in self.specs.items():
            report = reports.get(dtype)
            variants[dtype] = {
                "graphs": {role: spec.file for role, spec in specs.items()},
                "tolerance": (report.tolerance if report else TOLERANCES[dtype])._asdict(),
                "parity": report and report.summary(),
            }
        return {"default_dtype": self.dtypes[0], "variants": variants}


def write_graphs(graphs: Graphs, directory: Path) -> None:
    """Write the ONNX files of all `graphs`, and their weights, to the export `directory`."""
    files, target = directory / "onnx", graphs.target
    files.mkdir(parents=True, exist_ok=True)
    for dtype, specs in graphs.specs.items():
        shared = files / (SHARED_WEIGHTS if target.shares_weights else SCRATCH)
        store = WeightStore(graphs.weights, DTYPES[graphs.activations], shared)
        for role, spec in specs.items():
            model = make_graph(graphs, store, target.graphs(dtype), role, spec)
            if target.is_standard:
                check_standard(model)
            if target.shares_weights:
                ir.save(model, directory / spec.file)
            else:
                save_graph(model, directory / spec.file)
        if not target.shares_weights:
            shared.unlink()


def make_graph(
    graphs: Graphs, store: WeightStore, target: TargetGraphs, role: str, spec: GraphSpec
) -> ir.Model:
    """Return the graph of `role` with the inputs and outputs of `spec`. `store` keeps weights that
    several graphs share, and `target` writes the operators."""
    op, config = Ops(store.dtype), graphs.config
    options = graphs.shortlist, graphs.calibration, graphs.alignment
    g = GraphContext(op, config, store, target, graphs.opset, *options)
    inputs = {tensor.name: with_spec(Value(), tensor) for tensor in spec.inputs}
    outputs = target.write[graph_kind(role, config)](g, dict(inputs))
    contrib = {CONTRIB: 1} if any(node.domain for node in op.nodes) else {}
    graph = ir.Graph(
        list(inputs.values()),
        [with_spec(value, tensor) for value, tensor in zip(outputs, spec.outputs, strict=True)],
        nodes=op.nodes,
        initializers=list(op.initializers.values()),
        opset_imports={"": graphs.opset, **contrib},
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
