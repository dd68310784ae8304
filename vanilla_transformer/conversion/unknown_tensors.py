"""Tensors of a source that no class of its family has: further heads, or parts that differ."""

import os
from collections.abc import Collection

from .tensors import TensorFiles

HEADS = "cls"  # the module that holds all heads of BERT


def check_foreign_prefix(files: TensorFiles, known: Collection[str]) -> None:
    """Raise ValueError if all tensors in `files` have a prefix that the family does not use.

    Wrappers for training add such a prefix, for example "module.". `known` are the family's names.
    """
    prefix = os.path.commonprefix(list(files.shapes))
    prefix = prefix[: prefix.rfind(".") + 1]
    if prefix and is_foreign(prefix, set(files.shapes), set(known)):
        expected = f"expected names such as {min(known)}"
        raise ValueError(
            f"{files.path}: all names of tensors begin with {prefix!r}, {expected}: save them "
            f"without it"
        )


def is_foreign(prefix: str, names: set[str], known: set[str]) -> bool:
    """Return True if `prefix`, with which all `names` begin, is not part of the `known` names.

    That is so if no known name begins with it, or if `names` are known only without it.
    """
    if not any(name.startswith(prefix) for name in known):
        return True
    return not names & known and bool({name.removeprefix(prefix) for name in names} & known)


def further_heads(
    names: Collection[str], known: Collection[str], files: TensorFiles, fault: str
) -> list[str]:
    """Return the sorted `names` that are not `known`: tensors of heads that the family does not
    have.

    `files` are the tensors of the source.

    Raises:
        ValueError: for unknown names inside a module that is converted. The message begins with
            `fault`.
    """
    modules = {outermost_module(name) for name in known}
    unknown = sorted(set(names).difference(known))
    inside = [
        name for name in unknown if name in files.prefixed or outermost_module(name) in modules
    ]
    if inside:
        raise ValueError(f"{fault}: {', '.join(inside)}; --leave-out PATTERN converts without them")
    return unknown


def outermost_module(name: str) -> str:
    """Return the first part of a tensor's name, such as "encoder". BERT's heads are inside of one
    module, so it returns two parts for them, such as "cls.predictions"."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == HEADS else first
