"""The cuda target: onnxruntime's own operators in half precision, with caches on the device. A
decode step is one CUDA graph, and so is a step of beam search."""

from typing import TYPE_CHECKING

from ...inference.session import ATTENTION_KERNELS
from ...specs.alignment import ROLE as ALIGNMENT
from ..target import Target
from .specs import CACHE_DTYPES, graph_specs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .rows import CudaRowsFactory, LoadedExport


def open_rows(export: "LoadedExport") -> "CudaRowsFactory":
    from .rows import CudaRowsFactory

    return CudaRowsFactory(export)


def activations(model: "PreTrainedModel | None", dtype: str | None) -> str:
    """Return the dtype in which graphs with weights of `dtype` compute activations.

    It is the dtype itself for `"fp32"` and `"bf16"`, else `"fp16"`. If `model`, run on random
    inputs, overflows in float16, it is `"bf16"` for integer weights and for `None`.

    Raises:
        ValueError: if `dtype` is `"fp16"` and `model` overflows in it.
    """
    if dtype in ("fp32", "bf16"):
        return dtype
    if model is None:
        return "fp16"
    from .overflow import FLOAT16_MAX, overflow

    problem = overflow(model)
    if problem and dtype == "fp16":
        raise ValueError(f"{problem}, and float16 holds {FLOAT16_MAX:.0f}: use --dtype bf16")
    return "bf16" if problem else "fp16"


def parity_device(activations: str) -> str:
    """Return `"cuda"` if onnxruntime can use a GPU of this machine, else `"cpu"`.

    Raises:
        OSError: without such a GPU if `activations` is `"bf16"`, which CPUs do not compute.
    """
    from ...inference.devices import require

    try:
        require("cuda")
    except OSError as error:
        if activations == "bf16":
            raise OSError(f"onnxruntime computes bf16 on a GPU only, and {error}") from None
        return "cpu"
    return "cuda"


def provider_options(role: str) -> dict[str, str]:
    """Return onnxruntime options of the CUDA provider for the graph `role`.

    Those that read whole sequences are not captured. The others run as CUDA graphs, without cuDNN's
    attention. cuDNN is onnxruntime's default from compute capability 9.0 on. It plans anew for each
    prompt length, and fails where it has no plan.
    """
    if role in ("encoder", ALIGNMENT):
        return {"enable_cuda_graph": "0"}
    return {"enable_cuda_graph": "1", "sdpa_kernel": str(sum(ATTENTION_KERNELS.values()))}


CUDA = Target(
    "cuda",
    __name__,
    help="onnxruntime's own operators for NVIDIA GPUs",
    dtypes=("fp32", "fp16", "bf16", "int8", "int4"),
    opsets=(24,),
    specs=graph_specs,
    open=open_rows,
    devices=lambda roles, dtype: ("cpu", "cuda"),
    default_device="cuda",
    computes=tuple(CACHE_DTYPES),
    max_workers=1,  # the GPU runs one batch at a time
    activations=activations,
    parity_device=parity_device,
    provider_options=provider_options,
)
