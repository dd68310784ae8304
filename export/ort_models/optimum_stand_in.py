"""A module in place of `optimum.onnxruntime`, for libraries that import its classes."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from .generation import ORTModelForCausalLM
from .task_models import (
    ORTModelForFeatureExtraction,
    ORTModelForMaskedLM,
    ORTModelForSequenceClassification,
)

PACKAGE, MODULE = "optimum", "optimum.onnxruntime"
CLASSES = (
    ORTModelForCausalLM,
    ORTModelForFeatureExtraction,
    ORTModelForMaskedLM,
    ORTModelForSequenceClassification,
)


def stand_in_for_optimum() -> None:
    """Let `from optimum.onnxruntime import ...` give the classes of this package, in this process.

    `SentenceTransformer(..., backend="onnx")`, `CrossEncoder` and `SparseEncoder` then open
    exports. Calling it again changes nothing.

    Raises:
        ImportError: if optimum-onnx is installed.
    """
    if isinstance(sys.modules.get(MODULE), StandIn):
        return
    has_package = importlib.util.find_spec(PACKAGE) is not None
    if has_package and importlib.util.find_spec(MODULE) is not None:
        raise ImportError(
            f"{MODULE} is installed, expected none: pip uninstall optimum-onnx, or import its "
            "classes from it"
        )
    module = StandIn(MODULE)
    module.__dict__.update(
        {each.__name__: each for each in CLASSES}, ONNX_WEIGHTS_NAME="model.onnx"
    )
    package = importlib.import_module(PACKAGE) if has_package else StandIn(PACKAGE)
    package.onnxruntime = module  # type: ignore[attr-defined]
    sys.modules |= {PACKAGE: package, MODULE: module}


class StandIn(ModuleType):
    """A module without a file."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []
