"""README.md is short, and its links lead somewhere from the package's page too. test_docs.py runs
what it shows."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_it_is_short_and_in_the_order_that_a_user_needs():
    assert len(README.splitlines()) < 150
    sections = ["Install", "Use it from Python", "Train", "Results", "Limits", "Documentation"]
    assert re.findall(r"^## (.+)$", README, re.MULTILINE) == sections


def test_it_begins_with_the_commands_from_a_checkpoint_to_a_result_and_what_they_print():
    start = "\n".join(README.splitlines()[:25])
    verbs = re.findall(r"^vanilla-transformer (\w+)", start, re.MULTILINE)
    assert verbs == ["convert", "convert", "export", "predict"]
    assert "It prints:" in start and start.count("```") == 4


def test_links_lead_from_the_package_s_page_to_files_that_there_are():
    """There, a link that is relative to the repository leads nowhere; test_docs.py looks for the
    files."""
    home = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    links = re.findall(r"^\[[^\]]+\]: (\S+)$", README, re.MULTILINE)
    assert len(links) > 5 and all(
        re.fullmatch(rf"{home}/(?:blob|raw|tree)/main/.+", link) for link in links
    )
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", README) == []


def test_each_figure_of_the_results_is_told_with_its_conditions_in_the_documentation():
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
