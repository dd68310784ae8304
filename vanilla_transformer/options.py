"""Declarations of options: fields of a dataclass, each with a kind of values, a default and a help
text. Without torch.

The options of `generate`, of `export` and of `serve` are such dataclasses. Their checks, flags,
variables and documentation are made from the fields.
"""

import dataclasses
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeGuard

from .errors import UsageError

MAX_INT64 = 2**63 - 1
SMALLEST_FLOAT32 = 2.0**-126  # smallest normal number
LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127


def is_integer(value: object) -> TypeGuard[int]:
    # Test for int first, because isinstance with an abstract class is slow.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_int64(value: object) -> bool:
    return is_integer(value) and -MAX_INT64 - 1 <= value <= MAX_INT64


def is_float32(value: object) -> bool:
    if type(value) not in (int, float) and (isinstance(value, bool) or not isinstance(value, Real)):
        return False
    number: Any = value  # an int may be too large for a float
    return bool(-LARGEST_FLOAT32 <= number <= LARGEST_FLOAT32)


def is_list(value: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(holds, value))


class Kind(NamedTuple):
    """A kind of values.

    Attributes:
        expected: the values in words.
        holds: returns True for such a value.
        read: returns the value in a text of the command line, or raises ValueError or
            ArgumentTypeError; None for JSON, or for a text that is not JSON.
        metavar: the text in the help; None for a flag without a value, such as `--do-sample`.
        collect: makes one value of those of a flag that may be repeated; None for other flags.
        alone: the value of the flag without a value; None if it needs one.
    """

    expected: str
    holds: Callable[[Any], bool]
    read: Callable[[str], Any] | None = None
    metavar: str | None = "JSON"
    collect: Callable[[Iterable], Any] | None = None
    alone: Any = None


def integers(expected: str, minimum: int, maximum: float = MAX_INT64) -> Kind:
    return Kind(expected, lambda value: is_integer(value) and minimum <= value <= maximum, int, "N")


def numbers(expected: str, holds: Callable[[float], bool]) -> Kind:
    return Kind(expected, lambda value: is_float32(value) and holds(value), float, "X")


COUNT = integers("a whole number from 1 to 2**63 - 1", 1)
COUNT_OR_0 = integers("a whole number from 0 to 2**63 - 1", 0)
TOKEN = integers("a token id", -MAX_INT64 - 1)
SEED = integers("a whole number of at least 0", 0, math.inf)
NUMBER = numbers("a float32 number", lambda value: True)
POSITIVE = numbers("a float32 number above 0", lambda value: value >= SMALLEST_FLOAT32)
PROBABILITY = numbers("a number from 0 to 1", lambda value: 0 <= value <= 1)
FLAG = Kind("True or False", lambda value: isinstance(value, bool), metavar=None)
FLAG_OR_NEVER = Kind("True, False or 'never'", lambda value: FLAG.holds(value) or value == "never")
TOKENS = Kind("a list of token ids", lambda value: is_list(value, is_int64))
ONE_OR_MORE_TOKENS = Kind(
    "a token id or a list of them", lambda value: is_int64(value) or is_list(value, is_int64)
)
WORDS = Kind(
    "a list of lists of token ids, none empty",
    lambda value: (
        bool(value) and is_list(value, lambda word: bool(word) and is_list(word, is_int64))
    ),
)


def option(
    kind: Kind,
    default: Any,
    help: str | Callable[[], str],
    mode: str | None = None,
    **facts: Any,
) -> Any:
    """Return a field of a dataclass of options.

    Args:
        kind: its values.
        default: its default, which need not be of the kind.
        help: its help text, or a function that returns it.
        mode: the only mode in which it has an effect, which its help then begins with.
        facts: what else the dataclass needs to know; `flag` is the name of the flag, by default
            `--` and the name of the field, and None for an option without a flag.
    """
    help = f"{mode}: {help}" if mode else help
    metadata = {"kind": kind, "help": help, "mode": mode, **facts}
    return dataclasses.field(default=default, metadata=metadata)


def fields_by_name(options: type) -> dict[str, dataclasses.Field]:
    """Return {name: field} of the dataclass `options`."""
    return {field.name: field for field in dataclasses.fields(options)}


def check_option(name: str, value: Any, kind: Kind) -> None:
    """Raise UsageError if `value` is not of the `kind`. `name` is for the message."""
    if not kind.holds(value):
        raise UsageError(f"{name} must be {kind.expected}, got {reprlib.repr(value)}", name)


def as_list(value: Any) -> list | tuple:
    """Return a list: empty for None, with one element for a single value, lists and tuples
    unchanged."""
    if value is None:
        return []
    return value if isinstance(value, list | tuple) else [value]


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `values` that are not None, by name."""
    return {name: value for name, value in values.items() if value is not None}


def to_python(value: Any) -> Any:
    """Return numpy scalars and arrays as Python values, also in lists and tuples. Tuples become
    lists.

    Other values are returned unchanged, also dicts and their values.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    return [to_python(item) for item in value] if isinstance(value, list | tuple) else value
