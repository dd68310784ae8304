"""The Transformer of "Attention Is All You Need" as Hugging Face models.

Importing the package registers its models with the Auto classes and its pipelines with
`transformers.pipeline`. Where torch or transformers is not installed, only the modules that need
neither can be imported, such as `checkpoint_files`.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

try:
    __version__ = version("vanilla-transformer")  # the version in pyproject.toml
except PackageNotFoundError:  # a clone that is importable but not installed
    __version__ = "0+unknown"

HAS_TORCH = find_spec("torch") is not None and find_spec("transformers") is not None
__all__: list[str] = []

if HAS_TORCH:
    from . import registration
    from .registration import *

    __all__ += registration.__all__
else:
    from .errors import torch_missing

    def __getattr__(name: str) -> object:
        if name.startswith("Vanilla"):
            raise torch_missing(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
