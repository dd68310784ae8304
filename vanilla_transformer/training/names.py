"""Names of a recipe's keys: checks, and the nearest known name for an unknown one."""

import reprlib
from collections.abc import Iterable
from typing import Any

from ..errors import UsageError, did_you_mean


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
        expected = f", expected one of {', '.join(sorted(known))}"
        hint = did_you_mean(str(name), known, elsewhere) or expected
        raise UsageError(f"unknown {what} {reprlib.repr(name)}{hint}")
