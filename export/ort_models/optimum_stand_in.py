"""A module in place of `optimum.onnxruntime`, for libraries that import classes from it."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from .base import MODEL_CLASSES

PACKAGE, MODULE = "optimum", "optimum.onnxruntime"


class StandIn(ModuleType):
    """A module that is made in memory, not from a file, and that `importlib.util.find_spec`
    finds."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []


def stand_in_for_optimum() -> None:
    """Let `from optimum.onnxruntime import ...` return the classes of this package.

    It holds for this process. `backend="onnx"` of sentence-transformers then opens exports. Calling
    it again changes nothing.

    Raises:
        ImportError: if optimum-onnx is installed.
    """
    if isinstance(sys.modules.get(MODULE), StandIn):
        return
    has_package = importlib.util.find_spec(PACKAGE) is not None
    if has_package and importlib.util.find_spec(MODULE) is not None:
        raise ImportError(f"{MODULE} is installed, expected none: pip uninstall optimum-onnx")
    module = StandIn(MODULE)
    vars(module).update(MODEL_CLASSES, ONNX_WEIGHTS_NAME="model.onnx")
    package = importlib.import_module(PACKAGE) if has_package else StandIn(PACKAGE)
    vars(package)["onnxruntime"] = module
    sys.modules |= {PACKAGE: package, MODULE: module}
