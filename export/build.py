"""The address of `export` and `load_checkpoint` one release ago: they are in the package itself."""

from .deprecated import moved

__getattr__ = moved("vanilla_transformer_export", "build", {"export": "exporting", "load_checkpoint": "loading"})
