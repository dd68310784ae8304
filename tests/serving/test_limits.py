"""Tests of limits of a running server: slow, vanished and too many clients, and sizes."""

import json
import socket
import time

import httpx
import pytest
from messages import check_message
from raw_connections import is_closed, read_answer
from served import SEEN, request, served, wait_for

from vanilla_transformer_export.serving.connections import Connections, available_connections


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


# ----------------------------------------------------------------------------------- time and sizes


@pytest.mark.parametrize(
    "beginning", [b"", b"POST /stub HTTP/1.1\r\nHost: x\r\nConte"], ids=["nothing", "half a header"]
)
def test_a_connection_without_a_whole_header_is_closed(beginning):
    with served(header_timeout=0.2) as server:
        connection = server.send(beginning)
        started = time.monotonic()
        assert is_closed(connection)
        assert 0.2 <= time.monotonic() - started < 5


def test_a_header_that_comes_a_byte_at_a_time_is_closed_too():
    with served(header_timeout=0.3) as server:
        connection = server.send(b"")
        with pytest.raises(OSError):
            for byte in request("/stub", {"q": "a" * 1000}):
                connection.sendall(bytes([byte]))
                time.sleep(0.02)


def test_a_connection_that_asked_before_is_closed_when_the_next_header_is_not_whole():
    with served(header_timeout=0.3) as server:
        connection = server.send(request("/stub", {"q": "a"}))
        assert read_answer(connection)[0] == 200
        connection.sendall(b"POST /stub HTTP/1.1\r\n")
        assert is_closed(connection)


def test_a_connection_that_asks_again_and_again_stays_open():
    with served(header_timeout=0.3) as server:
        connection = server.send(b"")
        for _ in range(12):
            connection.sendall(request("/stub", {"q": "a"}))
            assert read_answer(connection)[0] == 200
            time.sleep(0.1)


@pytest.mark.parametrize(
    "piece", [b"a" * 10_000, b"X: 1234\r\n" * 1111 + b"X"], ids=["one", "many"]
)
def test_a_header_without_end_is_431(piece):
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
def test_what_is_around_a_body_has_an_end_too(beginning, piece):
    with served() as server:
        connection = server.send(
            b"POST /stub HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n" + beginning
        )
        wait_for(lambda: server.server.service.frame.running)
        connection.sendall(piece)
        assert connection.recv(1000).startswith(b"HTTP/1.1 431 ") and is_closed(connection)


def test_a_body_in_many_small_chunks_is_taken_and_its_trailers_are_passed_over():
    content = json.dumps({"q": "a" * 70_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    head = (
        b"POST /stub HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: "
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
def test_a_request_that_asks_for_http_2_is_answered_with_its_body(is_at_once):
    """Java's client asks so at first, and curl with --http2."""
    first, second = (
        request("/stub", {"q": text}).replace(b"\r\n", b"\r\n" + UPGRADE, 1) for text in "ab"
    )
    health = b"GET /health HTTP/1.1\r\n" + UPGRADE + b"\r\n"
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
        assert [result[0]["q"], result[1], result[2]["q"]] == ["a", {"status": "ok"}, "b"]


def test_many_requests_at_once_that_ask_for_http_2_are_bounded():
    health = b"GET /health HTTP/1.1\r\n" + UPGRADE + b"\r\n"
    with served() as server:
        connection = server.send(request("/slow", {"q": "a", "x": 1.5}) + health * 2000)
        assert is_closed(connection)


def test_a_body_that_does_not_come_is_408():
    with served(body_timeout=0.1) as server:
        connection = server.send(request("/stub", {"q": "a"})[:-3])
        status, body = read_answer(connection)
        assert status == 408
        check_message(body["stub"]["message"], seen=0.1)
        assert is_closed(connection)


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_that_is_too_large_is_413_before_it_is_there(is_announced):
    with served(max_body=1000) as server:
        body = b'{"q": "' + b"a" * 2000 + b'"}'
        if is_announced:
            content = request("/stub", body)[:-1500]
        else:
            chunk = b"%x\r\n%s\r\n" % (len(body), body)
            content = (
                b"POST /stub HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk
            )
        status, said = read_answer(server.send(content))
        assert status == 413
        check_message(said["stub"]["message"], seen=2009, expected=1000)


def test_a_body_of_the_largest_size_is_taken_and_the_connection_goes_on_after_one_that_is_larger():
    with served(max_body=1000) as server:
        connection = server.send(request("/stub", {"q": "a" * 5000}))
        assert read_answer(connection)[0] == 413
        connection.sendall(request("/stub", b'{"q": "' + b"a" * 991 + b'"}'))
        assert read_answer(connection)[0] == 200


def test_an_answer_that_takes_too_long_is_503_and_nothing_goes_on():
    with served(timeout=0.1) as server:
        answer = httpx.post(f"{server.url}/slow", json={"q": "a", "x": 60})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        check_message(answer.json()["stub"]["message"], seen=0.1)
        assert SEEN == ["begun", "cancelled"]


def test_a_stream_that_takes_too_long_has_no_end():
    """Clients report the missing end as an error."""
    with (
        served(timeout=0.2) as server,
        pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"),
    ):
        httpx.post(f"{server.url}/stream", json={"q": "a", "x": 0.01})
    assert SEEN[-1] == "closed" and SEEN.count("event") > 2


# ----------------------------------------------------------------------------- clients that go away


@pytest.mark.parametrize("path, seen", [("/slow", "cancelled"), ("/stream", "closed")])
def test_the_work_for_a_client_that_vanished_ends(path, seen):
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


def test_a_client_that_vanishes_while_it_sends_leaves_nothing():
    with served() as server:
        connection = server.send(request("/slow", {"q": "a"})[:-3])
        wait_for(lambda: server.server.service.frame.running)
        connection.close()
        wait_for(lambda: not server.server.service.frame.running)
        assert SEEN == []


def test_a_client_that_does_not_read_its_stream_stops_it_and_is_closed_in_the_end():
    with served(timeout=1.5) as server:
        connection = server.send(request("/stream", {"q": "a"}))
        wait_for(lambda: len(SEEN) > 10)
        before = None
        while before != len(SEEN):  # the buffers of the system are full
            before = len(SEEN)
            time.sleep(0.3)
        assert SEEN.count("event") < 2000
        wait_for(lambda: SEEN[-1] == "closed")
        wait_for(lambda: not server.server.uvicorn.server_state.connections)
        connection.close()


def test_requests_of_one_connection_that_wait_for_each_other_are_bounded():
    with served() as server:
        connection = server.send(
            request("/slow", {"q": "a", "x": 1.5}) + request("/stub", {"q": "a"}) * 200
        )
        assert is_closed(connection)


# ------------------------------------------------------------------------------------------- crowds


def test_requests_beyond_the_limit_are_refused_and_health_and_metrics_are_not():
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


def test_where_too_many_connections_are_open_new_ones_are_closed():
    with served(connections=40, header_timeout=2) as server:
        working = server.send(request("/slow", {"q": "a", "x": 1.5}))
        wait_for(lambda: SEEN)
        crowd = [server.send(b"GET /he") for _ in range(39)]
        wait_for(lambda: len(server.server.uvicorn.server_state.connections) == 40)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            assert is_closed(connection)
        assert len(server.server.uvicorn.server_state.connections) == 40
        assert read_answer(working)[0] == 200
        # the idle ones are closed in time
        wait_for(lambda: len(server.server.uvicorn.server_state.connections) < 40)
        assert httpx.get(f"{server.url}/health").status_code == 200
        for connection in crowd:
            connection.close()


def test_two_thousand_open_connections_leave_health_and_metrics_answering():
    available_connections(4500)  # of this process, which has both ends
    with served() as server:
        crowd = [server.send(b"POST /stub HTTP/1.1\r\n") for _ in range(2000)]
        started = time.monotonic()
        for path in ("/health/live", "/metrics"):
            assert httpx.get(f"{server.url}{path}").status_code == 200
        assert time.monotonic() - started < 2
        for connection in crowd:
            connection.close()


def test_the_limit_of_open_files_is_raised_for_the_connections(monkeypatch):
    import resource

    limits = [100, 1000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    assert (available_connections(500), limits) == (500, [628, 1000])
    assert (available_connections(5000), limits) == (872, [1000, 1000])


def test_the_connections_that_were_idle_for_longest_are_known():
    """The test has a clock of its own."""

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
    all_of = Connections(max_connections=9, idle=10, unread=30, clock=lambda: now[0])
    silent, asking, unread = Connection(), Connection(), Connection()
    unread.transport.unread = 5
    for second in range(0, 32, 4):
        now[0] = second
        asking.cycle = Cycle()  # another request each time
        all_of.sweep({silent, asking, unread})
        assert silent.transport.is_aborted == (second > 10)
    assert (asking.transport.is_aborted, unread.transport.is_aborted) == (False, False)
    now[0] = 33
    all_of.sweep({asking, unread})
    assert unread.transport.is_aborted
