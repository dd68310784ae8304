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


def test_figures_of_results_are_in_documentation():
    table = README.split("## Results")[1].split("## Limits")[0]
    figures = re.findall(
        r"\b\d+\.\d+\b|\b\d{3}\b", "".join(re.findall(r"^\|[^|]+\|(.+)$", table, re.MULTILINE))
    )
    results = (ROOT / "docs" / "results.md").read_text()
    assert len(figures) > 15
    assert [
        figure
        for figure in figures
        if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", results)
    ] == []
