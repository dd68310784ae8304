"""Tests of request ids, logs and metrics of a running server."""

import contextlib
import json
import logging
import os
import time
from types import SimpleNamespace

import httpx
import pytest
from served import MODEL, served

from vanilla_transformer_export.engine.inputs import Activity
from vanilla_transformer_export.serving.models import READY
from vanilla_transformer_export.serving.observability import Log, capture_library_logs


@contextlib.contextmanager
def capture_log(monkeypatch):
    """Yield a list that is filled with the lines of the log when the block ends."""
    reader, writer = os.pipe()
    monkeypatch.setattr(Log.__init__, "__defaults__", ("info", writer))
    lines = []
    yield lines
    os.close(writer)
    with os.fdopen(reader) as file:
        lines += map(json.loads, file)


def test_each_request_is_logged_as_json_with_its_id(monkeypatch):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with (
        capture_log(monkeypatch) as lines,
        served(log_level="info") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        with_client_id = client.post(
            "/stub",
            json={"q": "a"},
            headers={"X-Request-ID": "of-the-client", "traceparent": trace},
        )
        with_new_id = client.get("/nowhere?key=secret")
        with_bad_id = client.get("/nowhere", headers={"X-Request-ID": "two words"})
        assert client.get("/health").status_code == 200
        failed = client.get("/raise/mistake")
    assert (
        with_client_id.headers["X-Request-ID"]
        == "of-the-client"
        != with_new_id.headers["X-Request-ID"]
    )
    assert (
        len(
            {
                with_new_id.headers["X-Request-ID"],
                with_bad_id.headers["X-Request-ID"],
                failed.headers["X-Request-ID"],
                "two words",
            }
        )
        == 4
    )
    result = [
        (line["method"], line["path"], line["status"], line["id"])
        for line in lines
        if line["message"] == "request"
    ]
    assert result == [
        ("POST", "/stub", 200, "of-the-client"),
        ("GET", "/nowhere", 404, with_new_id.headers["X-Request-ID"]),
        ("GET", "/nowhere", 404, with_bad_id.headers["X-Request-ID"]),
        ("GET", "/raise/mistake", 500, failed.headers["X-Request-ID"]),
    ]
    assert [line["traceparent"] for line in lines if "traceparent" in line] == [trace]
    [mistake] = [line for line in lines if "error" in line]
    assert (
        mistake["id"] == failed.headers["X-Request-ID"] and "KeyError: 'secret'" in mistake["error"]
    )
    assert all(line["time"].endswith("Z") and line["level"] in ("info", "error") for line in lines)


def test_log_level_selects_logged_lines(monkeypatch):
    with capture_log(monkeypatch) as lines, served(log_level="debug") as server:
        httpx.get(f"{server.url}/health")
    assert "/health" in [line.get("path") for line in lines]
    with capture_log(monkeypatch) as lines, served(log_level="warning") as server:
        httpx.get(f"{server.url}/nowhere")
        httpx.get(f"{server.url}/raise/nan")
    assert [line["level"] for line in lines] == ["error", "error"]


@pytest.mark.parametrize("kind", ["full", "closed", "unread"])
def test_unwritable_log_does_not_stop_server(kind, monkeypatch):
    reader, writer = os.pipe()
    if kind == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), writer)
    elif kind == "closed":
        os.close(reader)
    monkeypatch.setattr(Log.__init__, "__defaults__", ("info", writer))
    with served(log_level="info") as server, httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            for _ in range(200):
                assert client.get("/nowhere/" + "x" * 190).status_code == 404
            time.sleep(0.06)


def test_metrics_of_requests_and_engine(monkeypatch):
    with served() as server, httpx.Client(base_url=server.url) as client:
        server.server.service.models.models["a"] = MODEL
        for path in ("/stub", "/models/a/stub", "/nowhere", "/models/a/nowhere/x"):
            client.post(path, json={"q": "a"})
        client.get("/raise/mistake")
        observe = server.server.service.metrics.of_engine("a-model")
        observe(Activity(waits=[0.25], first_tokens=[0.5], rows=3, tokens=2))
        observe(Activity(waits=[], first_tokens=[], rows=1, tokens=1))
        plan = SimpleNamespace(admission=SimpleNamespace(slots=8))
        model = SimpleNamespace(name="a-model", state=READY, waiting=7, running=5, plan=plan)
        server.server.service.metrics.watch(model)
        answer = client.get("/metrics")
    actual = dict(
        line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")
    )
    assert answer.headers["content-type"].startswith("text/plain; version=")
    prefix, label = "vanilla_transformer_", '{model="a-model"}'
    expected = {
        'requests_total{route="/stub",status="200"}': 2,
        'requests_total{route="none",status="404"}': 2,
        'requests_total{route="/raise/{name}",status="500"}': 1,
        'request_seconds_count{route="/stub"}': 2,
        "errors_total": 1,
        f"queue_seconds_sum{label}": 0.25,
        f"first_token_seconds_sum{label}": 0.5,
        f"batch_rows_count{label}": 2,
        f"batch_rows_sum{label}": 4,
        f"tokens_total{label}": 3,
        f"rows_waiting{label}": 7,
        f"rows_running{label}": 5,
        f"slots_used_ratio{label}": 0.625,
        f"model_loaded{label}": 1,
    }
    assert {name: float(actual[prefix + name]) for name in expected} == expected
    assert (
        float(actual["process_resident_memory_bytes"]) > 1e6
        and float(actual["process_cpu_seconds_total"]) > 0
    )


def test_share_of_slots_is_at_most_1_with_spare_rows():
    """A batch of 8 slots has 2 spare ones."""
    plan = SimpleNamespace(admission=SimpleNamespace(slots=8))
    with served() as server:
        model = SimpleNamespace(name="a-model", state=READY, waiting=0, running=10, plan=plan)
        server.server.service.metrics.watch(model)
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    assert 'vanilla_transformer_slots_used_ratio{model="a-model"} 1.0' in lines


def test_logging_of_the_process_is_as_before_after_the_server():
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    for level, captured in (("debug", logging.DEBUG), ("info", logging.WARNING)):
        with capture_library_logs(Log(level, os.open(os.devnull, os.O_WRONLY))):
            assert root.level == captured and root.handlers != before[1]
        assert (root.level, root.handlers) == before
