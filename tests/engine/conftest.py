"""Engines that are closed after the test."""

import pytest
from opened_engines import open_client


@pytest.fixture
def start_engine():
    """Return a function that starts an client, which is closed after the test."""
    started_engines = []

    def start(*args, **settings):
        started_engines.append(open_client(*args, slots=8, **settings).start())
        return started_engines[-1]

    yield start
    for client in started_engines:
        client.close()
