"""The portable target: standard operators, with caches that grow; any ONNX runtime runs its
graphs."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from ..target import Target
from .specs import graph_specs

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...one_graph.step import Step
    from .rows import LoadedExport, PortableRowsFactory


def open_rows(export: "LoadedExport") -> "PortableRowsFactory":
    from .rows import PortableRowsFactory

    return PortableRowsFactory(export)


def generation_step(graphs: "dict[str, ir.Model]") -> "Step":
    from .generation import PortableDecoderStep, PortableSeq2SeqStep

    return PortableSeq2SeqStep(graphs) if "encoder" in graphs else PortableDecoderStep(graphs)


def devices(roles: Collection[str], dtype: str) -> tuple[str, ...]:
    """Return `"cpu"` and `"cuda"`, and `"tensorrt"` too if there is an fp32 graph `"encoder"`.

    TensorRT only runs that graph: it would compile a decoder again for each size of the caches.
    """
    others = ("tensorrt",) if "encoder" in roles and dtype == "fp32" else ()
    return ("cpu", "cuda", *others)


PORTABLE = Target(
    "portable",
    __name__,
    help="standard operators",
    dtypes=("fp32", "int8"),
    opsets=(18, 19, 20, 21, 22, 23),
    specs=graph_specs,
    open=open_rows,
    devices=devices,
    is_standard=True,
    generation_step=generation_step,
)
