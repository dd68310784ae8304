"""The address of `TextRuntime` one release ago: it is in the package itself."""

from .deprecated import moved

__getattr__ = moved("vanilla_transformer_export", "text", {"TextRuntime": "runtime.text"})
