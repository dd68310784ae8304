"""Tests of README.md: its length, sections, links and figures. test_docs.py runs its code."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_readme_is_short_and_sections_are_in_order():
    assert len(README.splitlines()) < 150
    sections = ["Install", "Use it from Python", "Train", "Results", "Limits", "Documentation"]
    assert re.findall(r"^## (.+)$", README, re.MULTILINE) == sections


def test_readme_begins_with_commands_and_their_output():
    start = "\n".join(README.splitlines()[:25])
    verbs = re.findall(r"^vanilla-transformer (\w+)", start, re.MULTILINE)
    assert verbs == ["convert", "convert", "export", "predict"]
    assert "It prints:" in start and start.count("```") == 4


def test_links_are_absolute():
    """Relative links do not work on the page of the package index. test_docs.py checks the
    files."""
    home = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    links = re.findall(r"^\[[^\]]+\]: (\S+)$", README, re.MULTILINE)
    assert len(links) > 5 and all(
        re.fullmatch(rf"{home}/(?:blob|raw|tree)/main/.+", link) for link in links
    )
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", README) == []


def rows_of_figures(text):
    """Return the numbers in each row of the tables in `text`, without those of the first column."""
    rows = re.findall(r"^\|[^|]+\|(.+)$", text, re.MULTILINE)
    return [set(re.findall(r"\b\d+(?:\.\d+)?\b", row)) for row in rows]


def test_figures_of_each_result_are_in_one_row_of_results_page():
    figures = rows_of_figures(README.split("## Results")[1].split("## Limits")[0])
    results = rows_of_figures((ROOT / "docs" / "results.md").read_text())
    assert sum(map(len, figures)) > 15
    assert [row for row in figures if not any(row <= result for result in results)] == []
