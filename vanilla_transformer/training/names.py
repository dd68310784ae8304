"""Names of a recipe's keys: checks, and the nearest known name for an unknown one."""

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

from ..errors import UsageError


def flat(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the values of all tables by `table.key`; values outside tables keep their key."""
    single = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    return single | {
        f"{table}.{key}": value
        for table, keys in tables.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    }


def check_name(what: str, name: Any, known: Iterable[str], elsewhere: Iterable[str] = ()) -> None:
    """Raise UsageError if `name` is not in `known`.

    `what` says what `name` is, such as "task". The message suggests the nearest known name. If none
    is near, it suggests the first of `elsewhere`, names such as "table.key", or lists all known
    names.
    """
    if not isinstance(name, str) or name not in known:
        raise UsageError(
            f"unknown {what} {reprlib.repr(name)}{nearest(str(name), known, elsewhere)}"
        )


def did_you_mean(name: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """Return a hint at the nearest name in `known`, or if none is near, at the first in
    `elsewhere`. Return an empty string without both."""
    near = [*difflib.get_close_matches(name, known, n=1), *elsewhere]
    return f"; did you mean {near[0]!r}?" if near else ""


def nearest(name: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """Return the end of an error about an unknown `name`.

    It suggests the nearest name in `known`, or if none is near, the first name in `elsewhere`.
    Without both, it lists all `known` names."""
    return did_you_mean(name, known, elsewhere) or f", expected one of {', '.join(sorted(known))}"
