"""Checks of error messages by the values and names in them, whatever the words around these."""

import re
from contextlib import contextmanager

import pytest


@contextmanager
def raises(error, *, seen=(), expected=()):
    """Check that the block raises `error`, with a message for which `check_message` passes.

    Yield pytest's ExceptionInfo.
    """
    with pytest.raises(error) as raised:
        yield raised
    check_message(str(raised.value), seen=seen, expected=expected)


def check_message(message, *, seen=(), expected=()):
    """Check that `message` states the values `seen` and the values `expected`.

    Each is a value or name, or a tuple of them. Values that are expected stand after the word
    "expected", up to "got", or before "got": "size 5, expected 3", "size must be 3, got 5". Names
    that were seen may stand anywhere, and so may all values without these words.
    """
    first, *rest = re.split(r"\b(expected|got)\b", message, flags=re.IGNORECASE)
    parts = {"expected": "", "got": ""}
    for word, part in zip(rest[::2], rest[1::2], strict=True):
        parts[word.lower()] += part
    for value in as_tuple(seen):
        part = message if isinstance(value, str) else first + parts["got"]
        check_values(value, part, message, "seen")
    check_values(expected, parts["expected"] or first, message, "expected")


def check_values(values, part, message, role):
    """Check that each of `values` stands in `part` of `message`, not within a longer word."""
    for value in as_tuple(values):
        pattern = rf"(?<!\w){re.escape(str(value))}(?!\w)"
        assert re.search(pattern, part), f"no {role} {value!r} in: {message}"


def as_tuple(values):
    return values if isinstance(values, tuple) else (values,)
