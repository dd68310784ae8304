"""The cpu target: onnxruntime's own attention operators, caches written in place, and integer
matmuls."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from ...specs.graph_spec import GraphSpec
from ..target import check_activations
from .specs import graph_specs, step_role

if TYPE_CHECKING:
    import onnx_ir as ir
    from transformers import PreTrainedModel

    from ...graphs.config import Config
    from ...graphs.context import TargetGraphs
    from ...one_graph.step import Step
    from .rows import CpuRowsFactory, LoadedExport


class Cpu:
    """The cpu `Target`: graphs with onnxruntime's own operators for CPUs, which other ONNX runtimes
    do not have."""

    name = "cpu"
    help = "onnxruntime's own operators for CPUs"
    dtypes = ("fp32", "int8", "int4")
    opsets = (21,)
    default_device = "cpu"
    max_workers = None
    shares_weights = True
    is_standard = False
    integer_dtypes = ("int8",)

    def generation_step(self, graphs: "dict[str, ir.Model]") -> "Step":
        from .generation import CpuDecoderStep, CpuSeq2SeqStep

        return CpuSeq2SeqStep(graphs) if "encoder" in graphs else CpuDecoderStep(graphs)

    def devices(self, roles: Collection[str], dtype: str) -> tuple[str, ...]:
        return ("cpu",)

    def unsupported_fields(self, config: "Config") -> dict[str, str]:
        is_decoder = config.model_type == "vanilla-decoder"  # which `GroupQueryAttention` is for
        fields = {}
        if config.sliding_window is not None and config.model_type == "vanilla-seq2seq":
            fields["sliding_window"] = "None"
        if (
            config.model_type not in ("vanilla-encoder", "vanilla-vision")
            and config.value_head_dim != config.head_dim
        ):
            fields["value_head_dim"] = f"head_dim, {config.head_dim}"
        if (
            config.model_type == "vanilla-seq2seq"  # whose beam operator has no groups
            and config.num_key_value_heads != config.num_attention_heads
        ):
            fields["num_key_value_heads"] = f"num_attention_heads, {config.num_attention_heads}"
        if is_decoder and config.head_dim % 8:
            fields["head_dim"] = "a multiple of 8"
        return fields

    def activations(self, model: "PreTrainedModel | None", dtype: str | None) -> str:
        return "fp32"

    def graph_specs(
        self, config: dict, architecture: str, dtype: str, activations: str
    ) -> dict[str, GraphSpec]:
        check_activations(activations, ("fp32",))
        return graph_specs(config, architecture)

    def step_role(self, config: dict, architecture: str) -> str | None:
        return step_role(config, architecture)

    def graphs(self, dtype: str) -> "TargetGraphs":
        from .graphs import target_graphs

        return target_graphs(dtype)

    def parity_device(self, activations: str) -> str:
        return "cpu"

    def provider_options(self, role: str) -> dict[str, str]:
        return {}

    def open(self, export: "LoadedExport") -> "CpuRowsFactory":
        from .rows import CpuRowsFactory

        return CpuRowsFactory(export)
