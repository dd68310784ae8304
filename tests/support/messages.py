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

    Each is a value or name, or a tuple of them. The words "expected" and "got" tell the roles:
    "size 5, expected 3", "expected 3, got size 5", "size must be 3, got 5". Without these words
    both kinds may stand anywhere.
    """
    first, *rest = re.split(r"\b(expected|got)\b", message, flags=re.IGNORECASE)
    parts = {"expected": "", "got": ""}
    for word, part in zip(rest[::2], rest[1::2], strict=True):
        parts[word.lower()] += part
    check_values(seen, first + parts["got"], message, "seen")
    check_values(expected, parts["expected"] or first, message, "expected")


def check_values(values, part, message, role):
    """Check that each of `values` stands in `part` of `message`, not within a longer word."""
    for value in values if isinstance(values, tuple) else (values,):
        pattern = rf"(?<!\w){re.escape(str(value))}(?!\w)"
        assert re.search(pattern, part), f"no {role} {value!r} in: {message}"
