"""Tests of the files beside the code: the version, the citation, and the checks of commits
and pushes."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

import vanilla_transformer

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked_files(*patterns):
    names = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in names.splitlines()]


def test_version_is_defined_once():
    assert vanilla_transformer.__version__ == PROJECT["version"]
    files = tracked_files("*.py", "*.cff", "*.toml", "Makefile")
    assert len(files) > 100
    assignment = rf"version\w*\s*[=:]\s*[\"']?{re.escape(PROJECT['version'])}\b"
    assert [path.name for path in files if re.search(assignment, path.read_text())] == [
        "pyproject.toml"
    ]


def test_changelog_has_version():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" and PROJECT["version"] in headings[1]


def test_citation_has_required_fields():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == PROJECT["name"] and citation["message"]
    assert citation["authors"] == [{"name": "The vanilla-transformer authors"}]
    assert (
        citation["license"] == PROJECT["license"]
        and citation["repository-code"] == PROJECT["urls"]["Source"]
    )
    [paper] = citation["references"]
    assert paper["title"] == "Attention Is All You Need" and len(paper["authors"]) == 8


def test_pre_commit_runs_only_ruff_of_environment():
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"  # constraints.txt has the only version
    assert all(hook["entry"].startswith(".venv/bin/ruff ") for hook in repository["hooks"])
    assert re.search(r"^ruff==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_push_runs_checks_of_merge():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    [job] = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run", "make docs"]


def test_documentation_packages_are_pinned():
    pins = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    names = {re.match(r"[\w-]+", line)[0] for line in PROJECT["optional-dependencies"]["docs"]}
    assert names - {PROJECT["name"]} <= pins
