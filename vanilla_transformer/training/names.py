"""Names of a recipe's keys: those that there are, the nearest of them, and those that were renamed.

Recipes, `--set` and the records of runs are all read through one table of old names, `RENAMED`.
"""

import difflib
import reprlib
import warnings
from collections.abc import Iterable
from typing import Any

from ..errors import UsageError

RENAMED = {  # table -> old name -> name
    "tokenizer": {"dropout": "bpe_dropout"},
    "training": {"replaced": "word_replacement", "spans": "span_crop"},
}


def with_new_names(settings: dict[str, Any], warn: bool = True) -> dict[str, Any]:
    """`settings`, which are tables by their names, single keys as `table.key`, or both, with the names of today.

    Args:
        warn: whether to warn of an old name; not where a run has noted it, since nobody has to change that.

    Raises:
        UsageError: for a key under both its names.
    """
    given = flat(settings)
    for table, names in RENAMED.items():
        for old_name, new_name in names.items():
            old, new = f"{table}.{old_name}", f"{table}.{new_name}"
            if old in given and new in given:
                seen = f"{old} is {given[old]!r} and {new} is {given[new]!r}"
                raise UsageError(f"{seen}, expected {new} alone: {old} is its old name")
            if old in given and warn:
                warnings.warn(f"{old} is now {new}: its old name works for one release", FutureWarning, stacklevel=3)
    return {new_key(key): new_keys(key, value) for key, value in settings.items()}


def new_key(key: str) -> str:
    """Of a `table.key`."""
    table, dot, name = key.partition(".")
    return table + dot + RENAMED.get(table, {}).get(name, name)


def new_keys(table: str, values: Any) -> Any:
    """Of a whole table; any other value as it is."""
    names = RENAMED.get(table, {})
    return {names.get(name, name): value for name, value in values.items()} if names and isinstance(values, dict) else values


def flat(tables: dict[str, Any]) -> dict[str, Any]:
    """`table.key` -> value; what is no table keeps its key."""
    single = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    return single | {
        f"{table}.{key}": value for table, keys in tables.items() if isinstance(keys, dict) for key, value in keys.items()
    }


def check_name(what: str, name: Any, known: Iterable[str], elsewhere: Iterable[str] = ()) -> None:
    """Raises UsageError for a `name` that is none of those `known`, with the nearest of them; if none is near, with the same
    name `elsewhere`, or with all that are known."""
    if not isinstance(name, str) or name not in known:
        raise UsageError(f"no {what} {reprlib.repr(name)}{nearest(str(name), known, elsewhere)}")


def did_you_mean(name: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """As `nearest`; empty if there is none."""
    near = [*difflib.get_close_matches(name, known, n=1), *elsewhere]
    return f"; did you mean {near[0]!r}?" if near else ""


def nearest(name: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The end of such an error."""
    return did_you_mean(name, known, elsewhere) or f", expected one of {', '.join(sorted(known))}"
