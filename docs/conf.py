"""The configuration of Sphinx: `make docs` writes build/docs and fetches nothing."""

from importlib.metadata import version as version_of

project = "vanilla-transformer"
author = "The vanilla-transformer authors"
copyright = f"2026, {author}"
release = version = version_of(project)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"{project} {release}"
myst_heading_anchors = 3

default_role = "code"  # `name` in a docstring is code, as in Markdown
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_custom_sections = [("Args beside the common ones", "params_style")]
