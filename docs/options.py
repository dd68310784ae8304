"""Writes the table of generation options into docs/runtime.md: `.venv/bin/python docs/options.py`."""

from pathlib import Path

from vanilla_transformer_export.runtime.options import options_table

PAGE = Path(__file__).with_name("runtime.md")
BEGIN, END = "<!-- options table -->\n", "<!-- end -->"


def with_table(text: str) -> str:
    """The text of the page, with the table of today between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{options_table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
