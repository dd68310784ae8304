"""A directory for outputs."""

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty directory for outputs.

    The working directory and the home directory are two other directories.
    """
    for name in ("work", "home", "place"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "place"
