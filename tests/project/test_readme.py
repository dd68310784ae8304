"""Tests of README.md: its length, sections, links and figures. test_docs.py runs its code."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_readme_is_short_and_sections_are_in_order():
    assert len(README.splitlines()) <= 140
    sections = ["Try it", "Install", "Your own checkpoint", "Train", "Results", "Limits"]
    assert re.findall(r"^## (.+)$", README, re.MULTILINE) == [*sections, "Documentation"]


def test_first_screen_has_both_commands_and_readers_checkpoint_is_first():
    assert {"make demo", "make test"} <= {
        *re.findall(r"^(make \w+) ", "\n".join(README.splitlines()[:35]), re.MULTILINE)
    }
    verbs = re.findall(r"^vanilla-transformer (\w+) (\S+)", README, re.MULTILINE)
    assert verbs[:2] == [
        ("export", "sentence-transformers/all-MiniLM-L6-v2"),
        ("predict", "minilm"),
    ]


def test_links_are_relative():
    """They open in a clone, in a fork and offline. test_docs.py checks the files."""
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 20 and [link for link in links if "://" in link] == []


def test_gpu_is_mentioned_as_untried_once():
    assert len(re.findall(r"(?i)run on a GPU", README)) == 1


def rows_of_figures(text):
    """Return the numbers in each row of the tables in `text`, without those of the first column."""
    rows = re.findall(r"^\|[^|]+\|(.+)$", text, re.MULTILINE)
    return [set(re.findall(r"\b\d+(?:\.\d+)?\b", row)) for row in rows]


def test_figures_of_each_result_are_in_one_row_of_results_page():
    figures = rows_of_figures(README.split("## Results")[1].split("## Limits")[0])
    pages = [(ROOT / "docs" / name).read_text() for name in ("results.md", "speed.md")]
    results = rows_of_figures("\n".join(pages))
    # the engines of embeddings are rows there, and columns of README.md
    embeddings = pages[1].split("## Speed of embeddings")[1].split("\n## ")[0]
    results.append(set().union(*rows_of_figures(embeddings)))
    assert sum(map(len, figures)) > 15
    assert [row for row in figures if not any(row <= result for result in results)] == []
