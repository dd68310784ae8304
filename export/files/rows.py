"""The rows of a file: a row is the example that a task reads from a line, or the reason why it
cannot."""

import json
import math
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ..errors import UsageError
from .text_lines import decode_line


class Row(NamedTuple):
    """A line of an input. `record` is the JSON object or the row of a table, `None` for a line of
    text. `example` is what the task reads, by field, `None` for a blank text that the task does not
    take and for a bad line. `fault` says what is wrong with a bad line; for other lines it is
    `None`."""

    record: Mapping[str, Any] | None = None
    example: dict[str, Any] | None = None
    fault: str | None = None


MISSING = object()


@dataclass(frozen=True)
class RecordFields:
    """The fields that a task reads from a record. Each of `forms` is a set of fields that the task
    accepts; the longest of those that a record has in full is read. `field` is the field to read
    in place of the only one of the first form; other forms then do not count. Dots in `field` lead
    into nested records, unless a field has that exact name. With `takes_blank` a blank text is an
    example too.

    Raises:
        UsageError: for a `field` where the task reads several.
    """

    forms: tuple[tuple[str, ...], ...]
    field: str | None = None
    takes_blank: bool = False

    def __post_init__(self) -> None:
        if self.field is not None and len(self.forms[0]) > 1:
            raise UsageError(
                f"field is {self.field!r}, expected None: the task reads "
                f"{' and '.join(self.forms[0])}"
            )

    def parse_text(self, line: bytes) -> Row:
        """Return the row of a line of text, for a task that reads one text.

        A line that cannot be read is a row with a `fault`; nothing is raised.
        """
        try:
            return self.row(None, {self.forms[0][0]: decode_line(line, "it")})
        except ValueError as error:
            return Row(fault=str(error))

    def parse_line(self, line: bytes) -> Row:
        """Return the row of an argument or a line of standard input: a JSON object if it begins
        with {, else a text.

        A line that cannot be read, and a text where the task reads several, is a row with a
        `fault`.
        """
        if line.lstrip().startswith(b"{"):
            return self.parse_json(line)
        keys = self.forms[0]
        if line.strip() and len(keys) > 1:
            seen = reprlib.repr(line.decode(errors="replace"))
            return Row(fault=f"it is {seen}, expected a JSON object with {' and '.join(keys)}")
        return self.parse_text(line)

    def parse_json(self, line: bytes) -> Row:
        """Return the row of a line that is a JSON object.

        A blank line is a row without a record and an example. A line that cannot be read, is other
        JSON, or lacks the fields of the task is a row with a `fault`; nothing is raised.
        """
        try:
            text = decode_line(line, "it")
        except ValueError as error:
            return Row(fault=str(error))
        if not text.strip():
            return Row()
        try:
            record = json.loads(
                text,
                parse_float=finite_number,
                parse_constant=reject_constant,
                object_pairs_hook=unique_fields,
            )
        except (ValueError, RecursionError) as error:
            return Row(fault=f"it is not valid JSON: {error}")
        if not isinstance(record, dict):
            return Row(fault=f"it is {reprlib.repr(record)}, expected a JSON object")
        return self.parse_record(record)

    def parse_record(self, record: Mapping[str, Any]) -> Row:
        """Return the row of `record`, a JSON object or a row of a table.

        The row has a `fault`, text that says what is wrong, if the fields of the task are missing
        or are not strings. It has no example if the only field is blank, unless the
        task takes that.
        """
        forms = [(self.field,)] if self.field is not None else self.forms
        present = (
            form for form in forms if all(find_value(record, name) is not MISSING for name in form)
        )
        fields = max(present, key=len, default=None)
        if fields is None:
            expected = ", or ".join(" and ".join(form) for form in forms)
            return Row(
                record, fault=f"it has the fields {reprlib.repr(list(record))}, expected {expected}"
            )
        keys = fields if self.field is None else self.forms[0]
        return self.row(record, {key: find_value(record, name) for key, name in zip(keys, fields)})

    def row(self, record: Mapping[str, Any] | None, example: dict[str, Any]) -> Row:
        try:
            example = {key: decoded(value, f"its {key}") for key, value in example.items()}
        except ValueError as error:
            return Row(record, fault=str(error))
        for key, value in example.items():
            if key not in ("choices", "texts") and not isinstance(value, str):
                return Row(record, fault=f"its {key} is {reprlib.repr(value)}, expected a string")
        if self.takes_blank or len(example) > 1 or str(*example.values()).strip():
            return Row(record, example)
        return Row(record)


def decoded(value: Any, name: str) -> Any:
    """Return `value` with text in place of bytes, which old writers of Parquet have for texts.

    Raises ValueError for bytes that are not UTF-8, or too long. `name` is the value in the message.
    """
    if isinstance(value, list):
        return [decoded(item, name) for item in value]
    return decode_line(value, name) if isinstance(value, bytes) else value


def find_value(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of the field `name` of `record`, or of the nested field that its dots lead
    to. Without this field return `MISSING`, because a value may be None."""
    if name in record:
        return record[name]
    outer, dot, inner = name.partition(".")
    nested = record.get(outer)
    return find_value(nested, inner) if dot and isinstance(nested, Mapping) else MISSING


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of the (name, value) `pairs` of a JSON object.

    Raises ValueError if a name occurs twice, because one of its values would be lost.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the field {reprlib.repr(name)} occurs twice, expected once")
    return fields


def finite_number(text: str) -> float:
    """Return the JSON number `text` as a float. Raises ValueError if it overflows: Python would
    read infinity."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(
            f"the number {text:.40} is too large for float64, expected at most 1.8e308"
        )
    return number


def reject_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and Infinity, which Python reads but JSON does not have."""
    raise ValueError(f"{name} is not valid JSON, expected a number or null")
