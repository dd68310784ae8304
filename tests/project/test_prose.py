"""Tests of the check of docstrings and names in `make lint`."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "prose.py"
LONG = " ".join(["word"] * 26)


def check(path):
    """Return the exit status of the check of `path`, and the lines that it prints."""
    done = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    "source, line, value",
    [
        ('"""What a module holds."""', 1, "What"),
        ('class Row:\n    """Of a table."""', 1, "Of"),
        ('def rows():\n    """By name."""', 1, "By"),
        (f'"""{LONG}."""', 1, "26"),
        ('def rows():\n    """ """', 1, "empty"),
        ("found = 1", 1, "found"),
        ("for each in ():\n    pass", 1, "each"),
        ("class Row:\n    def __init__(self):\n        self._given = 1", 3, "_given"),
        ("def rows(*, most):\n    pass", 1, "most"),
        ("def size_of():\n    pass", 1, "size_of"),
        ("import os as own", 1, "own"),
        ("try:\n    pass\nexcept OSError as said:\n    pass", 3, "said"),
    ],
)
def test_fault_is_reported_with_line_and_value(tmp_path, source, line, value):
    path = tmp_path / "module.py"
    path.write_text(source)
    status, [printed] = check(path)
    assert status == 1 and printed.startswith(f"{path}:{line}: ") and value in printed


def test_plain_sentences_and_names_pass(tmp_path):
    (tmp_path / "module.py").write_text(
        f'"""Rows of a table.\n\n{LONG}"""\n\n\ndef size(rows):\n    """Return their number."""\n'
    )
    assert check(tmp_path) == (0, [])


def test_names_in_tests_are_not_checked(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_rows.py").write_text('"""What a row is."""\nfound = 1\n')
    status, [printed] = check(tmp_path)
    assert status == 1 and "What" in printed
