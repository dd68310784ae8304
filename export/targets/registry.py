"""The registry of targets."""

from ..errors import did_you_mean
from .cpu import Cpu
from .cuda import Cuda
from .portable import Portable
from .target import Target

_TARGETS: dict[str, Target] = {}


def register(target: Target) -> None:
    """Register `target` by its name for `export` and `Runtime`.

    Raises:
        ValueError: if the name is already registered.
    """
    if target.name in _TARGETS:
        raise ValueError(
            f"a target {target.name!r} is registered already, expected another name than "
            f"{list(_TARGETS)}"
        )
    _TARGETS[target.name] = target


def unregister(name: str) -> None:
    del _TARGETS[name]


def targets() -> tuple[Target, ...]:
    """Return all targets by name; the first is the default."""
    return tuple(_TARGETS.values())


def get_target(name: str) -> Target:
    """Return the target `name`. Raise ValueError if it is not registered."""
    if name in _TARGETS:
        return _TARGETS[name]
    raise ValueError(
        f"unknown target {name!r}, expected one of: {known_targets()}{did_you_mean(name, _TARGETS)}"
    )


def default_target() -> str:
    return targets()[0].name


def known_targets() -> str:
    """Return the names of all targets as text, for messages and help."""
    return "; ".join(f"{target.name} with {', '.join(target.dtypes)}" for target in targets())


register(Portable())
register(Cpu())
register(Cuda())
