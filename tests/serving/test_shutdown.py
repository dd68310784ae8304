"""Tests of startup and shutdown of a server."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from raw_connections import read_answer
from served import SEEN, request, served, wait_for


@pytest.fixture(autouse=True)
def clear_seen():
    SEEN.clear()


def test_shutdown_answers_accepted_requests_and_rejects_new_ones():
    with served(grace=0.4) as server, httpx.Client(base_url=server.url) as client:
        accepted = server.send(request("/slow", {"q": "a", "x": 1.2}))
        wait_for(lambda: SEEN)
        server.stop()
        wait_for(lambda: client.get("/health/ready").status_code == 503)
        # the server is live and accepts requests until load balancers notice
        assert client.get("/health/live").status_code == 200
        assert client.post("/stub", json={"q": "a"}).status_code == 200
        wait_for(lambda: client.post("/stub", json={"q": "a"}).status_code == 503)
        rejected = client.post("/stub", json={"q": "a"})
        assert rejected.headers["Retry-After"] == "5"
        assert rejected.headers["Connection"] == "close"
        assert client.get("/health").json() == {"status": "shutting down", "models": {}}
        assert read_answer(accepted)[0] == 200
        server.thread.join(5)
        assert not server.thread.is_alive()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", server.port), timeout=1)


def test_requests_unfinished_after_drain_time_return_503():
    with served(drain=0.2) as server:
        waiting = server.send(request("/slow", {"q": "a", "x": 60}))
        wait_for(lambda: SEEN)
        server.stop()
        status, body = read_answer(waiting)
        assert status == 503 and body["stub"]["message"]
        server.thread.join(5)
        assert not server.thread.is_alive() and SEEN == ["begun", "cancelled"]


STUCK = """
import asyncio, time
from served import PROTOCOL, router
from vanilla_transformer_export.serving import server
from vanilla_transformer_export.serving.settings import Settings

@router.get("/stuck")
async def stuck():
    await asyncio.to_thread(time.sleep, 60)

server.PROTOCOLS = (PROTOCOL,)
settings = Settings(port=0, grace=0.01, drain=0.1)
server.serve([], settings, None, lambda line: print(line, flush=True))
"""


def test_stuck_thread_does_not_keep_process_alive():
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]
        )
    }
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True, env=environment
    )
    with process:
        try:
            check_that_process_ends(process)
        finally:
            process.kill()


def check_that_process_ends(process):
    with socket.create_connection(
        ("127.0.0.1", int(process.stdout.readline().rpartition(":")[2]))
    ) as connection:
        assert process.stdout.readline() == "ready\n"
        connection.sendall(request("/stuck"))
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(20)
        process.terminate()
        assert read_answer(connection)[0] == 503
        assert process.wait(5) == 0


def test_loading_server_returns_503_except_for_liveness():
    with served() as server, httpx.Client(base_url=server.url) as client:
        server.server.service.lifecycle.loading = True
        answer = client.post("/stub", json={"q": "a"})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
        assert answer.json()["stub"]["message"]
        assert [client.get(f"/health{path}").status_code for path in ("", "/ready", "/live")] == [
            503,
            503,
            200,
        ]
        server.server.service.lifecycle.loading = False
        assert client.get("/health/ready").status_code == 200
