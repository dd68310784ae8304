"""The address of `verify` one release ago: it is in the package itself."""

from .deprecated import make_callable, moved

__getattr__ = moved("vanilla_transformer_export", "verify", dict.fromkeys(("verify", "Report"), "parity"))
make_callable(__name__, "parity")
