"""The configuration of Sphinx: `make docs` writes build/docs and fetches nothing."""

import re
from importlib.metadata import version as version_of

project = "vanilla-transformer"
author = "The vanilla-transformer authors"
copyright = f"2026, {author}"
release = version = version_of(project)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"{project} {release}"
myst_heading_anchors = 3
# links to files outside of docs/, which tests/project/test_docs.py checks
suppress_warnings = ["myst.xref_missing"]

default_role = "code"  # `name` in a docstring is code, as in Markdown
autodoc_member_order = "bysource"
autodoc_typehints = "signature"


def split_headings(app, what, name, obj, options, lines):
    """Put "Args:" on a line of its own below a heading such as "Args beside those of `X`:", because
    napoleon knows only the short form."""
    text = re.sub(r"^(Args .+:)$", r"\1\n\nArgs:", "\n".join(lines), flags=re.MULTILINE)
    lines[:] = text.split("\n")


def setup(app):
    app.connect("autodoc-process-docstring", split_headings, priority=400)  # napoleon has 500
