"""Exports, run with onnxruntime and numpy; nothing here imports torch."""

from ..deprecated import moved

__getattr__ = moved("vanilla_transformer_export", "runtime", {"Runtime": "runtime.runtime"})
