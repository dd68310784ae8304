"""The cpu target: onnxruntime's own attention operators, caches written in place, and integer
matmuls. Other ONNX runtimes do not have these operators."""

from typing import TYPE_CHECKING

from ..target import Target
from .specs import graph_specs, step_role

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...graphs.config import Config
    from ...one_graph.step import Step
    from .rows import CpuRowsFactory, LoadedExport


def open_rows(export: "LoadedExport") -> "CpuRowsFactory":
    from .rows import CpuRowsFactory

    return CpuRowsFactory(export)


def generation_step(graphs: "dict[str, ir.Model]") -> "Step":
    from .generation import CpuDecoderStep, CpuSeq2SeqStep

    return CpuSeq2SeqStep(graphs) if "encoder" in graphs else CpuDecoderStep(graphs)


def unsupported_fields(config: "Config") -> dict[str, str]:
    is_decoder = config.model_type == "vanilla-decoder"  # which `GroupQueryAttention` is for
    is_seq2seq = config.model_type == "vanilla-seq2seq"  # whose beam operator has no groups
    fields = {}
    if config.sliding_window is not None and is_seq2seq:
        fields["sliding_window"] = "None"
    if (is_decoder or is_seq2seq) and config.value_head_dim != config.head_dim:
        fields["value_head_dim"] = f"head_dim, {config.head_dim}"
    if is_seq2seq and config.num_key_value_heads != config.num_attention_heads:
        fields["num_key_value_heads"] = f"num_attention_heads, {config.num_attention_heads}"
    if is_decoder and config.head_dim % 8:
        fields["head_dim"] = "a multiple of 8"
    return fields


CPU = Target(
    "cpu",
    __name__,
    help="onnxruntime's own operators for CPUs",
    dtypes=("fp32", "int8", "int4"),
    opsets=(23,),
    specs=graph_specs,
    open=open_rows,
    devices=lambda roles, dtype: ("cpu",),
    shares_weights=True,
    integer_dtypes=("int8",),
    independent_dtypes=("fp32", "int8"),
    generation_step=generation_step,
    unsupported_fields=unsupported_fields,
    step_role=step_role,
)
