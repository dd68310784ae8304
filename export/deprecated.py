"""Addresses of one release ago."""

import importlib
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any


def moved(package: str, old: str, homes: dict[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of the module `old` of `package`, whose names have their `homes` in other modules now: it gives them
    with a DeprecationWarning."""

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module '{package}.{old}' has no attribute {name!r}")
        is_public = name in sys.modules[package].__all__
        now = f"{package}.{name}" if is_public else f"{package}.{homes[name]}.{name}"
        warnings.warn(
            f"{package}.{old}.{name} is {now} now, and this address goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return get


def make_callable(module: str, home: str) -> None:
    """Makes the module `module` callable as the function of its name in the module `home`. An imported submodule takes the
    place of the function among the names of the package, so whoever has it must be able to call it."""
    package, _, name = module.rpartition(".")

    class CallableModule(ModuleType):
        def __call__(self, *args: Any, **options: Any) -> Any:
            return getattr(importlib.import_module(f"{package}.{home}"), name)(*args, **options)

    sys.modules[module].__class__ = CallableModule
