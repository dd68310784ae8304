"""Checkpoints to ONNX: `export`, `verify` and `evaluate`, with torch. ONNX to tokens: `Runtime` and
`TextRuntime`, without."""

import importlib

TYPE_CHECKING = False  # as in typing, whose import takes as long as all else here
if TYPE_CHECKING:
    from .exporting.evaluation import evaluate
    from .exporting.export import export
    from .exporting.loading import load_checkpoint
    from .image_runtime import ImageRuntime
    from .inference.options import Options
    from .proof.verify import verify
    from .runtime import Runtime
    from .text_runtime import TextRuntime

    __version__: str

# Each public name -> its module, and the extra that brings what this needs.
_HOMES = {
    "export": ("exporting.export", "export,cpu"),
    "load_checkpoint": ("exporting.loading", "torch,cpu"),
    "verify": ("proof.verify", "torch,cpu"),
    "evaluate": ("exporting.evaluation", "train,cpu"),
    "Runtime": ("runtime", "cpu"),
    "TextRuntime": ("text_runtime", "cpu"),
    "ImageRuntime": ("image_runtime", "cpu,images"),
    "Options": ("inference.options", "cpu"),
}
UNINSTALLED = "0+unknown"  # the version where the package is on the path and not installed
__all__ = [
    "ImageRuntime",
    "Options",
    "Runtime",
    "TextRuntime",
    "__version__",
    "evaluate",
    "export",
    "load_checkpoint",
    "verify",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("vanilla-transformer")
        except PackageNotFoundError:
            return UNINSTALLED
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}, expected one of {', '.join(__all__)}"
        )
    module, extra = _HOMES[name]
    try:
        return getattr(importlib.import_module(f".{module}", __name__), name)
    except ImportError as error:
        # which says what to do itself, or is no missing package
        if error.name is None or error.name.startswith(__name__):
            raise
        remedy = f"pip install 'vanilla-transformer[{extra}]'"
        raise ImportError(
            f"{name} needs {error.name}, which is not installed: {remedy}", name=error.name
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
