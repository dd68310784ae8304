"""The registry of targets."""

from ..errors import did_you_mean
from .cpu import CPU
from .cuda import CUDA
from .portable import PORTABLE
from .target import Target

_TARGETS: dict[str, Target] = {}


def register(target: Target) -> None:
    """Add `target` to the registry, so that `export` and `Runtime` know its name.

    Raises:
        ValueError: if a target of that name is already registered.
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
    """Return all registered targets in order of registration; the first is the default."""
    return tuple(_TARGETS.values())


def get_target(name: str) -> Target:
    """Return the target of this `name`.

    Raises:
        ValueError: if it is not registered, with the known names.
    """
    if name in _TARGETS:
        return _TARGETS[name]
    raise ValueError(
        f"unknown target {name!r}, expected one of: {known_targets()}"
        f"{did_you_mean(str(name), _TARGETS)}"
    )


def default_target() -> str:
    return targets()[0].name


def known_targets() -> str:
    """Return all targets with their dtypes as one text, for messages and help."""
    return "; ".join(f"{target.name} with {', '.join(target.dtypes)}" for target in targets())


register(PORTABLE)
register(CPU)
register(CUDA)
