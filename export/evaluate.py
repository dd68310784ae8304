"""The address of `evaluate` one release ago: it is in the package itself."""

from .deprecated import make_callable, moved

__getattr__ = moved("vanilla_transformer_export", "evaluate", dict.fromkeys(("evaluate", "compare"), "evaluation"))
make_callable(__name__, "evaluation")
