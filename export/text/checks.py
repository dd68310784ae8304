"""Checks of texts, pairs of texts and options, and errors of tokenizers, which all tasks share."""

import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import TokenizerError, UsageError, did_you_mean
from ..shared.options import is_integer, is_list

Pair = tuple[str, str]


def check_list(values: object, expected: str, name: str = "texts") -> Sequence[Any]:
    """Return `values`. Raises ValueError unless it is a list or tuple that is not empty. In the
    message `name` is the argument, and `expected` names its items."""
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name} is {reprlib.repr(values)}, expected a list of {expected}")
    if not values:
        raise ValueError(f"{name} is empty, expected at least one text")
    return values


def check_text(text: object, name: str) -> str:
    """Return `text`. Raises ValueError unless it is a string that is not blank. `name` is what the
    message calls it."""
    checked = check_string(text, name)
    if not checked.strip():
        raise ValueError(f"{name} is {text!r:.40}, expected a text that is not blank")
    return checked


def check_string(text: object, name: str) -> str:
    """Return `text`. Raises ValueError unless it is a string of valid Unicode; it may be blank.
    `name` is what the message calls it."""
    if isinstance(text, dict) or (isinstance(text, list | tuple) and len(text) == 2):
        raise ValueError(
            f"{name} is the pair {reprlib.repr(text)}, expected one text: this head does not read "
            f"pairs"
        )
    if not isinstance(text, str):
        raise ValueError(f"{name} is {reprlib.repr(text)}, expected a string")
    check_unicode(text, name)
    return text


def check_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: {error}") from None


def is_strings(value: object) -> TypeGuard[Sequence[str]]:
    return is_list(value, lambda item: isinstance(item, str))


def check_texts(texts: object, name: str = "text") -> list[str]:
    """Return `texts` as a list. Raises ValueError unless they are a list of strings that are not
    blank, and for an empty list. In the message `name` is one of them."""
    items = with_names(check_list(texts, "strings", f"{name}s"), name)
    return [check_text(text, item) for text, item in items]


def check_strings(texts: object, name: str = "texts") -> list[str]:
    """Return `texts` as a list. Raises ValueError unless they are a list of strings, which may be
    blank, and for an empty list. `name` is the argument, for the message."""
    items = with_names(check_list(texts, "strings", name))
    return [check_string(text, item) for text, item in items]


def check_texts_or_pairs(texts: object) -> list[str | Pair]:
    """Return strings unchanged and pairs as tuples. Raises ValueError for other items, an empty
    list, or no list.

    A pair is two strings in a list, or a dict `{"text": ..., "text_pair": ...}`. Texts may be
    blank.
    """
    items = with_names(check_list(texts, "strings or pairs"))
    return [
        (parse_pair if isinstance(text, list | tuple | dict) else check_string)(text, name)
        for text, name in items
    ]


def has_letters(text: str) -> bool:
    """Return True if `text` has a letter of any script."""
    return any(map(str.isalpha, text))


def with_names(texts: Sequence[Any], name: str = "text") -> list[tuple[Any, str]]:
    """Return (text, name) for each text, with a name for errors such as "text 0 of 3"."""
    return [(text, f"{name} {index} of {len(texts)}") for index, text in enumerate(texts)]


def parse_pair(value: object, name: str) -> Pair:
    """Return a pair of strings as a tuple.

    `value` is a list of two strings, or a dict `{"text": ..., "text_pair": ...}` as in
    transformers' pipeline. Raises ValueError for another value. `name` is what the message calls
    it.
    """
    parts: Any = value
    if isinstance(value, dict):
        if value.keys() != {"text", "text_pair"}:
            raise ValueError(
                f"{name} has the keys {reprlib.repr(list(value))}, expected 'text' and 'text_pair'"
            )
        parts = value["text"], value["text_pair"]
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise ValueError(f"{name} is {reprlib.repr(value)}, expected two texts, (text, text_pair)")
    return check_string(parts[0], f"the first part of {name}"), check_string(
        parts[1], f"the second part of {name}"
    )


def check_choice(name: str, value: object, known: Iterable[object]) -> None:
    if value not in [*known]:
        seen = f"{name} is {value!r:.60}, expected one of {', '.join(map(repr, known))}"
        raise UsageError(f"{seen}{did_you_mean(str(value), map(str, known))}", name)


def check_count(name: str, value: Any, min_value: int = 1, max_value: int | None = None) -> None:
    if not is_integer(value) or value < min_value or (max_value is not None and value > max_value):
        upper = "" if max_value is None else f" and at most {max_value}"
        raise UsageError(
            f"{name} is {value!r:.60}, expected an integer of at least {min_value}{upper}", name
        )


def check_tokens(largest: int, vocab_size: int) -> None:
    """Raise ValueError if `largest`, the largest id that a tokenizer returned, is outside the
    vocabulary."""
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer returned token id {largest}, expected less than vocab_size={vocab_size}"
        )


def check_flags(**values: object) -> None:
    """Raise UsageError unless each of `values`, options by name, is True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name} is {value!r:.60}, expected True or False", name)


class TokenizerErrors:
    """A context that converts all errors of `tokenizers` in its block to TokenizerError. `path` is
    the tokenizer, for the message.

    A panic of its Rust code is not an `Exception`. It happens for regular expressions that never
    end. A block takes 0.5 µs; each generated token has two.
    """

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"the tokenizer of {self.path} failed: {error}") from None
