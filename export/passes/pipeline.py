"""Passes, one after the other."""

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


def apply(model: ir.Model, passes: tuple[Callable[[ir.Model], int], ...]) -> dict[str, int]:
    """All of `passes`, in order; how often each applied, by its name.

    Raises:
        ValueError: if one of them fails, naming it.
    """
    counts = {}
    for each in passes:
        name = getattr(each, "__name__", repr(each))
        try:
            counts[name] = each(model)
        except Exception as error:
            raise ValueError(f"the pass {name} failed on this graph: {type(error).__name__}: {error}") from error
        RemoveUnusedNodesPass()(model)
    if any(node.domain == "com.microsoft" for node in model.graph):
        model.opset_imports["com.microsoft"] = 1
    return counts
