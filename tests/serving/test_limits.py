"""Tests of limits of a running server: sizes, and slow, disconnected and too many clients."""

import json
import socket
import time

import httpx
import pytest
from messages import check_message
from raw_connections import is_closed, read_answer
from served import SEEN, request, served, wait_for

from vanilla_transformer_export.serving.limits import Connections, available_connections


@pytest.fixture(autouse=True)
def clear_seen():
    SEEN.clear()


# ----------------------------------------------------------------------------------- time and sizes


@pytest.mark.parametrize(
    "beginning", [b"", b"POST /stub HTTP/1.1\r\nHost: x\r\nConte"], ids=["nothing", "half a header"]
)
def test_incomplete_header_closes_connection_after_timeout(beginning):
    with served(header_timeout=0.2) as server:
        connection = server.send(beginning)
        started = time.monotonic()
        assert is_closed(connection)
        assert 0.2 <= time.monotonic() - started < 5


def test_header_sent_byte_by_byte_closes_connection():
    with served(header_timeout=0.3) as server:
        connection = server.send(b"")
        with pytest.raises(OSError):
            for byte in request("/stub", {"q": "a" * 1000}):
                connection.sendall(bytes([byte]))
                time.sleep(0.02)


def test_incomplete_second_header_closes_connection():
    with served(header_timeout=0.3) as server:
        connection = server.send(request("/stub", {"q": "a"}))
        assert read_answer(connection)[0] == 200
        connection.sendall(b"POST /stub HTTP/1.1\r\n")
        assert is_closed(connection)


def test_connection_with_repeated_requests_stays_open():
    with served(header_timeout=0.3) as server:
        connection = server.send(b"")
        for _ in range(12):
            connection.sendall(request("/stub", {"q": "a"}))
            assert read_answer(connection)[0] == 200
            time.sleep(0.1)


@pytest.mark.parametrize(
    "piece", [b"a" * 10_000, b"X: 1234\r\n" * 1111 + b"X"], ids=["one", "many"]
)
def test_endless_header_returns_431(piece):
    with served() as server:
        connection = server.send(request("/stub", {"q": "a"}))
        assert read_answer(connection)[0] == 200
        connection.sendall(b"GET /health HTTP/1.1\r\nX-B: ")
        for _ in range(7):
            connection.sendall(piece)
            time.sleep(0.01)
        assert connection.recv(1000).startswith(b"HTTP/1.1 431 ") and is_closed(connection)


@pytest.mark.parametrize(
    "beginning, piece",
    [(b"0\r\nX: ", b"a" * 66_000), (b"0\r\nX: ", b"123\r\nX: " * 8250), (b"1;", b"a" * 66_000)],
    ids=["one trailer", "many trailers", "an extension of a chunk"],
)
def test_endless_trailers_or_chunk_extension_return_431(beginning, piece):
    with served() as server:
        connection = server.send(
            b"POST /stub HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
            + beginning
        )
        wait_for(lambda: server.server.service.frame.running)
        connection.sendall(piece)
        assert connection.recv(1000).startswith(b"HTTP/1.1 431 ") and is_closed(connection)


def test_body_in_small_chunks_is_accepted_and_trailers_are_ignored():
    content = json.dumps({"q": "a" * 70_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    head = (
        b"POST /stub HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: "
        b"chunked\r\n\r\n"
    )
    with served() as server:
        connection = server.send(head + chunks + b"0\r\nX-Request-ID: trailer\r\n\r\n")
        status, answer = read_answer(connection)
        assert (status, len(answer["q"])) == (200, 70_000)


UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: "
    b"AAMAAABkAAQBAAAAAAIAAAAA\r\n"
)


@pytest.mark.parametrize("is_at_once", [True, False])
def test_request_with_http2_upgrade_is_answered_over_http1(is_at_once):
    """Java's HTTP client and `curl --http2` ask for this upgrade at first."""
    first, second = (
        request("/stub", {"q": text}).replace(b"\r\n", b"\r\n" + UPGRADE, 1) for text in "ab"
    )
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n"
    with served() as server:
        content = first + health + second
        pieces = (
            [content]
            if is_at_once
            else [content[place : place + 50] for place in range(0, len(content), 50)]
        )
        connection = server.send(b"")
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.002)
        file = connection.makefile("rb")
        result = []
        for _ in range(3):
            assert file.readline() == b"HTTP/1.1 200 OK\r\n"
            headers = dict(
                line.strip().lower().split(b": ", 1) for line in iter(file.readline, b"\r\n")
            )
            result.append(json.loads(file.read(int(headers[b"content-length"]))))
        assert [result[0]["q"], result[1], result[2]["q"]] == [
            "a",
            {"status": "ok", "models": {}},
            "b",
        ]


def test_too_many_pipelined_http2_upgrades_close_connection():
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n"
    with served() as server:
        connection = server.send(request("/slow", {"q": "a", "x": 1.5}) + health * 2000)
        assert is_closed(connection)


def test_incomplete_body_returns_408():
    with served(body_timeout=0.1) as server:
        connection = server.send(request("/stub", {"q": "a"})[:-3])
        status, body = read_answer(connection)
        assert status == 408
        check_message(body["stub"]["message"], seen=0.1)
        assert is_closed(connection)


@pytest.mark.parametrize("is_announced", [True, False])
def test_too_large_body_returns_413_before_it_is_complete(is_announced):
    with served(max_body=1000) as server:
        body = b'{"q": "' + b"a" * 2000 + b'"}'
        if is_announced:
            content = request("/stub", body)[:-1500]
        else:
            chunk = b"%x\r\n%s\r\n" % (len(body), body)
            content = (
                b"POST /stub HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk
            )
        status, error = read_answer(server.send(content))
        assert status == 413
        check_message(error["stub"]["message"], seen=2009, expected=1000)


def test_connection_continues_after_413_and_accepts_body_of_max_size():
    with served(max_body=1000) as server:
        connection = server.send(request("/stub", {"q": "a" * 5000}))
        assert read_answer(connection)[0] == 413
        connection.sendall(request("/stub", b'{"q": "' + b"a" * 991 + b'"}'))
        assert read_answer(connection)[0] == 200


def test_request_timeout_returns_503_and_cancels_work():
    with served(timeout=0.1) as server:
        answer = httpx.post(f"{server.url}/slow", json={"q": "a", "x": 60})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        check_message(answer.json()["stub"]["message"], seen=0.1)
        assert SEEN == ["begun", "cancelled"]


def test_stream_timeout_ends_without_final_chunk():
    """Clients report the missing end as an error."""
    with (
        served(timeout=0.2) as server,
        pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"),
    ):
        httpx.post(f"{server.url}/stream", json={"q": "a", "x": 0.01})
    assert SEEN[-1] == "closed" and SEEN.count("event") > 2


# ----------------------------------------------------------------------------- disconnected clients


@pytest.mark.parametrize("path, seen", [("/slow", "cancelled"), ("/stream", "closed")])
def test_work_for_disconnected_client_is_cancelled(path, seen):
    with served() as server:
        connection = server.send(request(path, {"q": "a", "x": 60 if path == "/slow" else 0.01}))
        wait_for(lambda: len(SEEN) > 0)
        connection.close()
        wait_for(lambda: SEEN[-1] == seen)
        assert not server.server.service.frame.running
        metrics = httpx.get(f"{server.url}/metrics").text
        status = 499 if path == "/slow" else 200
        assert (
            f'vanilla_transformer_requests_total{{route="{path}",status="{status}"}} 1.0' in metrics
        )


def test_disconnect_while_sending_leaves_no_request():
    with served() as server:
        connection = server.send(request("/slow", {"q": "a"})[:-3])
        wait_for(lambda: server.server.service.frame.running)
        connection.close()
        wait_for(lambda: not server.server.service.frame.running)
        assert SEEN == []


def test_unread_stream_is_paused_and_closed_after_timeout():
    with served(timeout=1.5) as server:
        connection = server.send(request("/stream", {"q": "a"}))
        wait_for(lambda: len(SEEN) > 10)
        before = None
        while before != len(SEEN):  # until the buffers of the system are full
            before = len(SEEN)
            time.sleep(0.3)
        assert SEEN.count("event") < 2000
        wait_for(lambda: SEEN[-1] == "closed")
        wait_for(lambda: not server.server.uvicorn.server_state.connections)
        connection.close()


def test_too_many_pipelined_requests_close_connection():
    with served() as server:
        connection = server.send(
            request("/slow", {"q": "a", "x": 1.5}) + request("/stub", {"q": "a"}) * 200
        )
        assert is_closed(connection)


# ------------------------------------------------------------------------------------- many clients


def test_requests_beyond_limit_return_429_except_health_and_metrics():
    with served(requests=2) as server, httpx.Client(base_url=server.url) as client:
        busy = [server.send(request("/slow", {"q": "a", "x": 60})) for _ in range(2)]
        wait_for(lambda: len(SEEN) == 2)
        answer = client.post("/stub", json={"q": "a"})
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        check_message(answer.json()["stub"]["message"], seen=2)
        assert [
            client.get(path).status_code for path in ("/health", "/health/live", "/health/ready")
        ] == [200] * 3
        assert "vanilla_transformer_requests_in_flight 2.0" in client.get("/metrics").text
        for connection in busy:
            connection.close()
        wait_for(lambda: client.post("/stub", json={"q": "a"}).status_code == 200)


def test_connections_beyond_limit_are_closed():
    with served(connections=40, header_timeout=2) as server:
        working = server.send(request("/slow", {"q": "a", "x": 1.5}))
        wait_for(lambda: SEEN)
        crowd = [server.send(b"GET /he") for _ in range(39)]
        wait_for(lambda: len(server.server.uvicorn.server_state.connections) == 40)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            assert is_closed(connection)
        assert len(server.server.uvicorn.server_state.connections) == 40
        assert read_answer(working)[0] == 200
        # idle connections are closed after the timeout
        wait_for(lambda: len(server.server.uvicorn.server_state.connections) < 40)
        assert httpx.get(f"{server.url}/health").status_code == 200
        for connection in crowd:
            connection.close()


def test_health_and_metrics_answer_with_two_thousand_open_connections():
    available_connections(4500)  # this process has both ends of each connection
    with served() as server:
        crowd = [server.send(b"POST /stub HTTP/1.1\r\n") for _ in range(2000)]
        started = time.monotonic()
        for path in ("/health/live", "/metrics"):
            assert httpx.get(f"{server.url}{path}").status_code == 200
        assert time.monotonic() - started < 2
        for connection in crowd:
            connection.close()


def test_open_file_limit_is_raised_for_connections(monkeypatch):
    import resource

    limits = [100, 1000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    assert (available_connections(500), limits) == (500, [628, 1000])
    assert (available_connections(5000), limits) == (872, [1000, 1000])


def test_idle_and_unread_connections_are_aborted():
    """The clock is the test's own."""

    class Transport:
        unread = 0
        is_aborted = False

        def is_closing(self):
            return False

        def get_write_buffer_size(self):
            return self.unread

        def abort(self):
            self.is_aborted = True

    class Connection:
        def __init__(self):
            self.transport, self.cycle, self.pipeline = Transport(), None, []

    class Cycle:
        response_complete = True

    now = [0.0]
    connections = Connections(max_connections=9, idle=10, unread=30, clock=lambda: now[0])
    silent, asking, unread = Connection(), Connection(), Connection()
    unread.transport.unread = 5
    for second in range(0, 32, 4):
        now[0] = second
        asking.cycle = Cycle()  # another request each time
        connections.sweep({silent, asking, unread})
        assert silent.transport.is_aborted == (second > 10)
    assert (asking.transport.is_aborted, unread.transport.is_aborted) == (False, False)
    now[0] = 33
    connections.sweep({asking, unread})
    assert unread.transport.is_aborted
