"""Writes what follows from the generation options: `.venv/bin/python docs/options.py`. The table in docs/runtime.md, and the
lines in the docstring of `Runtime.generate`."""

from pathlib import Path

from vanilla_transformer_export.runtime.options import options_table, options_text

PAGE = Path(__file__).with_name("runtime.md")
CODE = PAGE.parents[1] / "export" / "runtime" / "runtime.py"
INDENT = " " * 12  # of the lines in the docstring
BEGIN, END = "<!-- options table -->\n", "<!-- end -->"


def with_table(text: str) -> str:
    """The text of the page, with the table of today between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{options_table()}\n{END}{after}"


def with_docstring(code: str) -> str:
    """The module with the lines of today in the docstring: they begin with the first option and end before `Raises`."""
    first, *_ = options_text(INDENT).splitlines()
    start = code.index(f"\n{first.partition(':')[0]}:") + 1
    end = code.index("\n\n        Raises", start)
    return code[:start] + options_text(INDENT) + code[end:]


if __name__ == "__main__":
    CODE.write_text(with_docstring(CODE.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
