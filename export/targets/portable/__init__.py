"""The portable target: standard operators, with caches that grow; any ONNX runtime runs its
graphs."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from ...specs.graph_spec import GraphSpec
from ..target import check_activations
from .specs import graph_specs

if TYPE_CHECKING:
    import onnx_ir as ir
    from transformers import PreTrainedModel

    from ...graphs.config import Config
    from ...graphs.context import TargetGraphs
    from ...one_graph.step import Step
    from .rows import LoadedExport, PortableRowsFactory


class Portable:
    """The portable `Target`: graphs of standard ONNX operators, which any ONNX runtime can run."""

    name = "portable"
    help = "standard operators"
    dtypes = ("fp32", "int8")
    opsets = (18, 19, 20, 21, 22, 23)
    default_device = "cpu"
    max_workers = None
    shares_weights = False
    is_standard = True
    integer_dtypes: tuple[str, ...] = ()

    def generation_step(self, graphs: "dict[str, ir.Model]") -> "Step":
        from .generation import PortableDecoderStep, PortableSeq2SeqStep

        return PortableSeq2SeqStep(graphs) if "encoder" in graphs else PortableDecoderStep(graphs)

    def devices(self, roles: Collection[str], dtype: str) -> tuple[str, ...]:
        """Return `"cpu"` and `"cuda"`, and `"tensorrt"` too if there is an fp32 graph `"encoder"`.

        TensorRT only runs that graph: it would compile a decoder again for each size of the caches.
        """
        return (
            ("cpu", "cuda", "tensorrt")
            if "encoder" in roles and dtype == "fp32"
            else ("cpu", "cuda")
        )

    def unsupported_fields(self, config: "Config") -> dict[str, str]:
        return {}

    def activations(self, model: "PreTrainedModel | None", dtype: str | None) -> str:
        return "fp32"

    def graph_specs(
        self, config: dict, architecture: str, dtype: str, activations: str
    ) -> dict[str, GraphSpec]:
        check_activations(activations, ("fp32",))
        return graph_specs(config, architecture, dtype)

    def step_role(self, config: dict, architecture: str) -> None:
        return None

    def graphs(self, dtype: str) -> "TargetGraphs":
        from .graphs import target_graphs

        return target_graphs(dtype)

    def parity_device(self, activations: str) -> str:
        return "cpu"

    def provider_options(self, role: str) -> dict[str, str]:
        return {}

    def open(self, export: "LoadedExport") -> "PortableRowsFactory":
        from .rows import PortableRowsFactory

        return PortableRowsFactory(export)
