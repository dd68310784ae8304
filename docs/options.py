"""Writes what follows from the generation options, and from the settings of a server:
`.venv/bin/python docs/options.py`. The tables in docs/runtime.md and docs/serving.md, and the lines
in the docstring of `Runtime.generate`."""

from pathlib import Path

from vanilla_transformer_export.inference.options import options_table, options_text
from vanilla_transformer_export.serving.settings import settings_table

TABLES = {"runtime.md": ("options", options_table), "serving.md": ("settings", settings_table)}
FOLDER = Path(__file__).parent
CODE = FOLDER.parent / "export" / "runtime.py"
INDENT = " " * 12  # of the lines in the docstring
END = "<!-- end -->"


def with_table(text: str, name: str, table: str) -> str:
    """The text of the page, with the table of today between its marks."""
    begin = f"<!-- {name} table -->\n"
    before, rest = text.split(begin)
    _, after = rest.split(END)
    return f"{before}{begin}{table}\n{END}{after}"


def with_docstring(code: str) -> str:
    """The module with the lines of today in the docstring: they begin with the first option and end
    before `Raises`."""
    first, *_ = options_text(INDENT).splitlines()
    start = code.index(f"\n{first.partition(':')[0]}:") + 1
    end = code.index("\n\n        Raises", start)
    return code[:start] + options_text(INDENT) + code[end:]


if __name__ == "__main__":
    CODE.write_text(with_docstring(CODE.read_text(encoding="utf-8")), encoding="utf-8")
    for page, (name, table) in TABLES.items():
        path = FOLDER / page
        path.write_text(
            with_table(path.read_text(encoding="utf-8"), name, table()), encoding="utf-8"
        )
