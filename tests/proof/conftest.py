"""Fixtures: the speed of an export is measured once."""

import pytest

from vanilla_transformer_export.proof import checks


@pytest.fixture(autouse=True)
def measured_once(monkeypatch):
    monkeypatch.setattr(checks, "REPEATS", 1)
