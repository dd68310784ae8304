"""A target: how graphs are written for one kind of runtime, and run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ..specs.graph_spec import GraphSpec

if TYPE_CHECKING:
    import onnx_ir as ir
    from transformers import PreTrainedModel

    from ..graphs.config import Config
    from ..graphs.context import TargetGraphs
    from ..inference.rows import RowsFactory
    from ..inference.session import LoadedExport
    from ..one_graph.step import Step

    Specs = dict[str, GraphSpec]  # by role


@dataclass(frozen=True)
class Target:
    """The facts and functions of a target, which is a folder of modules here and a line in the
    registry.

    Functions that need torch or onnx import them when they are called: the runtime has neither.

    Args:
        name: its name on the command line.
        package: the folder. Its module `graphs` has `target_graphs`.
        help: a short description for the help of the command line.
        dtypes: dtypes of weights, for example `"fp32"` and `"int8"`.
        opsets: versions of the ONNX operators; the first is the default.
        specs: (config, architecture, dtype, activations) -> inputs and outputs of each graph that
            an export has, see `graph_specs`.
        open: a loaded export with a decoder graph -> what opens its rows.
        devices: (roles, dtype) -> the devices that graphs with these roles and this dtype of
            weights support, for example `("cpu", "cuda")`. This machine may lack some of them.
        default_device: the device that an export runs on.
        computes: dtypes in which graphs compute activations.
        max_workers: maximum number of threads that serve an export; `None` for no limit.
        shares_weights: True if all graphs of an export read their weights from one shared file.
        is_standard: True if graphs have only standard operators. Other clients can run them, and
            one export may have several dtypes.
        integer_dtypes: dtypes whose matmuls compute in integers. A calibration text may set the
            scales of their activations, and `cpu` may choose their methods.
        independent_dtypes: dtypes in which the outputs of a row are the same bits alone and in any
            batch, on all CPUs.
        generation_step: the graphs by role (`{"decoder": model, …}`), which it changes -> the
            `Step` of an export with `--generate`; `None` for a target without.
        unsupported_fields: config -> `{field: expected value}` of the fields that the target cannot
            export, as text for a message.
        activations: (model, dtype) -> the dtype of activations for weights of `dtype`, or of both
            if it is `None`. It raises ValueError if activations of `model` overflow in the dtype;
            `model` is `None` where torch is not installed.
        step_role: (config, architecture) -> the role of the graph for batches in which rows join
            and leave at any time, or `None`. Rows may differ in length, and their results do not
            depend on the other rows. A graph that only serves this has the role `"step"`.
        parity_device: dtype of activations -> the device of this machine on which an export is
            compared with torch. It raises OSError if none computes in the dtype.
        provider_options: role -> onnxruntime options of the execution provider for this graph,
            which take precedence over those that all targets use.
    """

    name: str
    package: str
    help: str
    dtypes: tuple[str, ...]
    opsets: tuple[int, ...]
    specs: Callable[[dict, str, str, str], Specs]
    open: Callable[[LoadedExport], RowsFactory]
    devices: Callable[[Collection[str], str], tuple[str, ...]]
    default_device: str = "cpu"
    computes: tuple[str, ...] = ("fp32",)
    max_workers: int | None = None
    shares_weights: bool = False
    is_standard: bool = False
    integer_dtypes: tuple[str, ...] = ()
    independent_dtypes: tuple[str, ...] = ()
    generation_step: Callable[[dict[str, ir.Model]], Step] | None = None
    unsupported_fields: Callable[[Config], dict[str, str]] = lambda config: {}
    activations: Callable[[PreTrainedModel | None, str | None], str] = lambda model, dtype: "fp32"
    step_role: Callable[[dict, str], str | None] = lambda config, architecture: None
    parity_device: Callable[[str], str] = lambda activations: "cpu"
    provider_options: Callable[[str], dict[str, str]] = lambda role: {}

    def graph_specs(self, config: dict, architecture: str, dtype: str, activations: str) -> Specs:
        """Return `{role: spec}`, the inputs and outputs of each graph that the export has.

        The role `"encoder"` reads full sequences and `"decoder"` generates tokens. Targets may add
        others, for example `"step"`.

        Args:
            config: the fields of the model's config.json.
            architecture: the name of the model class, such as `VanillaDecoderForCausalLM`.
            dtype: the dtype of the weights.
            activations: the dtype that `activations` returned for `dtype`.

        Raises ValueError if the target does not compute in `activations`.
        """
        if activations not in self.computes:
            raise ValueError(
                f"the activations are {activations!r:.100}, expected one of "
                f"{', '.join(self.computes)}"
            )
        return self.specs(config, architecture, dtype, activations)

    def graphs(self, dtype: str) -> TargetGraphs:
        """Return the functions that write the nodes of graphs with weights of `dtype`."""
        return import_module(f"{self.package}.graphs").target_graphs(dtype)
