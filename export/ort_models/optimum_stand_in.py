"""This package in place of `optimum.onnxruntime`, for libraries that import classes from it."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec

PACKAGE, MODULE = "optimum", "optimum.onnxruntime"


def stand_in_for_optimum() -> None:
    """Let `from optimum.onnxruntime import ...` return the classes of this package.

    It holds for this process. `backend="onnx"` of sentence-transformers then opens exports. Calling
    it again changes nothing.

    Raises:
        ImportError: if optimum-onnx is installed.
    """
    ort_models = sys.modules[__package__]
    if sys.modules.get(MODULE) is ort_models:
        return
    has_package = importlib.util.find_spec(PACKAGE) is not None
    if has_package and importlib.util.find_spec(MODULE) is not None:
        raise ImportError(f"{MODULE} is installed, expected none: pip uninstall optimum-onnx")
    if not has_package:
        spec = ModuleSpec(PACKAGE, None, is_package=True)
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    vars(importlib.import_module(PACKAGE))["onnxruntime"] = ort_models
    sys.modules[MODULE] = ort_models
