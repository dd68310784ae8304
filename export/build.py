"""The address of `export` and `load_checkpoint` one release ago: they are in the package itself."""

from .deprecated import moved

__getattr__ = moved("vanilla_transformer_export", "build", dict.fromkeys(("export", "load_checkpoint"), "exporting"))
