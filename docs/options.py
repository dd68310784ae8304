"""A generator of tables and docstrings for options and settings: `.venv/bin/python
docs/options.py`.

It writes the tables in docs/settings.md, and the lines of options in the docstrings of
`Runtime.generate` and `export`.
"""

import textwrap
from collections.abc import Iterable
from dataclasses import Field
from pathlib import Path

from vanilla_transformer_export.arguments import default_text, flag, help_text
from vanilla_transformer_export.exporting.options import FIELDS as EXPORT_FIELDS
from vanilla_transformer_export.inference.options import NEUTRAL, SAMPLING_ONLY, WITHOUT_EFFECT
from vanilla_transformer_export.serving.settings import FIELDS as SERVER_FIELDS
from vanilla_transformer_export.shared.generation_options import FIELDS as GENERATION_FIELDS

# Module -> the options in its docstring, and the indentation of `Raises` after them.
DOCSTRINGS = {
    "runtime.py": (GENERATION_FIELDS, "        "),
    "exporting/export.py": (EXPORT_FIELDS, "    "),
}
PAGE = Path(__file__).parent / "settings.md"
CODE = PAGE.parents[1] / "export"
END = "<!-- end -->"


def options_text(fields: Iterable[Field], indent: str = "") -> str:
    """Return a line "name: help (default)" for each of `fields`, for a docstring, wrapped at 100
    columns. Lines begin with `indent`."""
    hanging = textwrap.TextWrapper(100, initial_indent=indent, subsequent_indent=f"{indent}    ")
    return "\n".join(
        hanging.fill(f"{field.name}: {help_text(field)} ({field.default!r})") for field in fields
    )


def options_table(fields: Iterable[Field]) -> str:
    """Return a table of `fields` in Markdown."""
    lines = ["| option | flag | default | expected | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(table_row, fields)])


def table_row(field: Field) -> str:
    kind = field.metadata["kind"]
    value = f"[{kind.metavar}]" if kind.alone is not None else kind.metavar
    words = f"`{flag(field)} {value}`" if value else f"`{flag(field)}`"
    default = f"`{default_text(field)}`" if default_text(field) else ""
    cells = [f"`{field.name}`", words if flag(field) else "", default, kind.expected]
    return f"| {' | '.join(cells)} | {help_text(field)} |"


def other_fields_table() -> str:
    """Return a table in Markdown of the fields of generation_config.json that exports accept
    without applying them."""
    lines = ["| field | may be | because it is |", "|---|---|---|"]
    lines += [
        f"| `{name}` | anything | of no effect on tokens |" for name in sorted(WITHOUT_EFFECT)
    ]
    lines += [
        f"| `{name}` | `null` or `{NEUTRAL[name]}` with do_sample | not applied |"
        for name in sorted(SAMPLING_ONLY)
    ]
    return "\n".join(lines)


TABLES = {
    "generation options": options_table(GENERATION_FIELDS.values()),
    "other generation fields": other_fields_table(),
    "export options": options_table(EXPORT_FIELDS.values()),
    "server settings": options_table(SERVER_FIELDS.values()),
}


def with_table(text: str, name: str, table: str) -> str:
    """Return the text of the page with the current table between its marks."""
    begin = f"<!-- {name} table -->\n"
    before, rest = text.split(begin)
    _, after = rest.split(END, 1)
    return f"{before}{begin}{table}\n{END}{after}"


def with_docstring(code: str, fields: Iterable[Field], indent: str) -> str:
    """Return the module with the current lines of the options `fields` in the docstring.

    They begin with the first option and end before `Raises`, which has the indent `indent`.
    """
    text = options_text(fields, f"{indent}    ")
    start = code.index(f"\n{text.partition(':')[0]}:") + 1
    end = code.index(f"\n\n{indent}Raises", start)
    return code[:start] + text + code[end:]


if __name__ == "__main__":
    for module, (fields, indent) in DOCSTRINGS.items():
        path = CODE / module
        code = with_docstring(path.read_text(encoding="utf-8"), fields.values(), indent)
        path.write_text(code, encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        text = with_table(text, name, table)
    PAGE.write_text(text, encoding="utf-8")
