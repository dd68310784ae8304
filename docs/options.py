"""A generator of tables and docstrings for options and settings: `.venv/bin/python
docs/options.py`.

It writes the tables in docs/settings.md, and the lines of options in the docstrings of
`Runtime.generate` and `export`.
"""

from collections.abc import Callable
from pathlib import Path

from vanilla_transformer_export.exporting import options as export_options
from vanilla_transformer_export.inference import options as generation_options
from vanilla_transformer_export.serving.settings import settings_table

TABLES = {
    "generation options": generation_options.options_table,
    "export options": export_options.options_table,
    "server settings": settings_table,
}
# Module -> the lines of its docstring, and the indentation of `Raises` after them.
DOCSTRINGS: dict[str, tuple[Callable[[str], str], str]] = {
    "runtime.py": (generation_options.options_text, "        "),
    "exporting/export.py": (export_options.options_text, "    "),
}
PAGE = Path(__file__).parent / "settings.md"
CODE = PAGE.parents[1] / "export"
END = "<!-- end -->"


def with_table(text: str, name: str, table: str) -> str:
    """Return the text of the page with the current table between its marks."""
    begin = f"<!-- {name} table -->\n"
    before, rest = text.split(begin)
    _, after = rest.split(END, 1)
    return f"{before}{begin}{table}\n{END}{after}"


def with_docstring(code: str, lines: Callable[[str], str], indent: str) -> str:
    """Return the module with the current lines of options in the docstring.

    They begin with the first option and end before `Raises`, which has the indent `indent`.
    """
    text = lines(f"{indent}    ")
    start = code.index(f"\n{text.partition(':')[0]}:") + 1
    end = code.index(f"\n\n{indent}Raises", start)
    return code[:start] + text + code[end:]


if __name__ == "__main__":
    for module, (lines, indent) in DOCSTRINGS.items():
        path = CODE / module
        code = with_docstring(path.read_text(encoding="utf-8"), lines, indent)
        path.write_text(code, encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        text = with_table(text, name, table())
    PAGE.write_text(text, encoding="utf-8")
