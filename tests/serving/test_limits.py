"""Limits of a running server: clients that are slow, vanish, send too much or come in crowds,
tokens, and how it ends."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from served import SEEN, request, served, wait_for

from vanilla_transformer_export.serving import health
from vanilla_transformer_export.serving.connections import Connections, available_connections
from vanilla_transformer_export.serving.logs import Log
from vanilla_transformer_export.serving.service import PROTOCOLS

TOKEN = b"not-a-secret"
DATE = re.compile(rb"date: [^\r]+\r\n")


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


def answer_of(connection):
    """Status and JSON of the next answer on a connection."""
    file = connection.makefile("rb")
    status = int(file.readline().split()[1])
    headers = dict(line.strip().lower().split(b": ", 1) for line in iter(file.readline, b"\r\n"))
    return status, json.loads(file.read(int(headers[b"content-length"])))


def is_closed(connection):
    """Whether the server closes it within the time that the connection waits."""
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


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
        assert answer_of(connection)[0] == 200
        connection.sendall(b"POST /stub HTTP/1.1\r\n")
        assert is_closed(connection)


def test_a_connection_that_asks_again_and_again_stays_open():
    with served(header_timeout=0.3) as server:
        connection = server.send(b"")
        for _ in range(12):
            connection.sendall(request("/stub", {"q": "a"}))
            assert answer_of(connection)[0] == 200
            time.sleep(0.1)


@pytest.mark.parametrize(
    "piece", [b"a" * 10_000, b"X: 1234\r\n" * 1111 + b"X"], ids=["one", "many"]
)
def test_a_header_without_end_is_431(piece):
    with served() as server:
        connection = server.send(request("/stub", {"q": "a"}))
        assert answer_of(connection)[0] == 200
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
        status, answer = answer_of(connection)
        assert (status, len(answer["q"])) == (200, 70_000)


UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: "
    b"AAMAAABkAAQBAAAAAAIAAAAA\r\n"
)


@pytest.mark.parametrize("is_at_once", [True, False])
def test_a_request_that_asks_for_http_2_is_answered_with_its_body(is_at_once):
    """As Java's client asks at first, and curl with --http2."""
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
        found = []
        for _ in range(3):
            assert file.readline() == b"HTTP/1.1 200 OK\r\n"
            headers = dict(
                line.strip().lower().split(b": ", 1) for line in iter(file.readline, b"\r\n")
            )
            found.append(json.loads(file.read(int(headers[b"content-length"]))))
        assert [found[0]["q"], found[1], found[2]["q"]] == ["a", {"status": "ok"}, "b"]


def test_many_requests_at_once_that_ask_for_http_2_are_bounded():
    health = b"GET /health HTTP/1.1\r\n" + UPGRADE + b"\r\n"
    with served() as server:
        connection = server.send(request("/slow", {"q": "a", "x": 1.5}) + health * 2000)
        assert is_closed(connection)


def test_a_body_that_does_not_come_is_408():
    with served(body_timeout=0.1) as server:
        connection = server.send(request("/stub", {"q": "a"})[:-3])
        status, body = answer_of(connection)
        assert (status, body["stub"]["message"]) == (
            408,
            "the body was not complete after 0.1 seconds, the limit of this server",
        )
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
        status, said = answer_of(server.send(content))
        assert (status, said["stub"]["message"]) == (
            413,
            "the body has at least 2009 bytes, expected at most 1000",
        )


def test_a_body_of_the_largest_size_is_taken_and_the_connection_goes_on_after_one_that_is_larger():
    with served(max_body=1000) as server:
        connection = server.send(request("/stub", {"q": "a" * 5000}))
        assert answer_of(connection)[0] == 413
        connection.sendall(request("/stub", b'{"q": "' + b"a" * 991 + b'"}'))
        assert answer_of(connection)[0] == 200


def test_an_answer_that_takes_too_long_is_503_and_nothing_goes_on():
    with served(timeout=0.1) as server:
        answer = httpx.post(f"{server.url}/slow", json={"q": "a", "x": 60})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert (
            answer.json()["stub"]["message"]
            == "the request took longer than 0.1 seconds, the limit of this server"
        )
        assert SEEN == ["begun", "cancelled"]


def test_a_stream_that_takes_too_long_has_no_end():
    """Which clients take for an error."""
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
        assert (
            answer.json()["stub"]["message"]
            == "2 requests are running, which is the limit of this server: try again later"
        )
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
        assert answer_of(working)[0] == 200
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
    """By a clock of the test."""

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


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    "headers, body, status",
    [
        ({}, {"q": "a"}, 401),
        ({"Authorization": "Bearer not-a-secret"}, {"q": "a"}, 200),
        ({"authorization": "bearer not-a-secret"}, {"q": "a"}, 200),
        ({"Authorization": "Bearer wrong"}, {"q": "a"}, 401),
        ({"Authorization": "Bearer wrong"}, {"q": "a", "api_key": "not-a-secret"}, 401),
        ({"Authorization": "Bearer"}, {"q": "a"}, 401),
        ({"Authorization": "Basic not-a-secret"}, {"q": "a"}, 401),
        ({}, {"q": "a", "api_key": "not-a-secret"}, 200),
        ({}, {"q": "a", "api_key": "wrong"}, 401),
        ({}, {"q": "a", "api_key": "é\ud800"}, 401),
        ({}, {"q": "a", "api_key": ["not-a-secret"]}, 401),
        ({}, {"q": "a", "api_key": None}, 401),
    ],
    ids=str,
)
def test_a_token_is_asked_for(token_server, headers, body, status):
    answer = token_server.post(
        "/stub", content=json.dumps(body), headers={"Content-Type": "application/json", **headers}
    )
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert "not-a-secret" not in answer.text and "expected" in answer.json()["stub"]["message"]


@pytest.fixture(scope="module")
def token_server():
    with served(TOKEN) as server, httpx.Client(base_url=server.url) as client:
        yield client


@pytest.mark.parametrize("kind", ["data", "files"])
def test_the_token_may_be_in_a_form(token_server, kind):
    """As LibreTranslate's clients send it. The stub takes no forms: what matters is that the token
    is looked at first."""
    found = {}
    for key in ("not-a-secret", "wrong"):
        form = {"q": "a", "api_key": key}
        sent = (
            {"data": form}
            if kind == "data"
            else {"files": {name: (None, value) for name, value in form.items()}}
        )
        found[key] = token_server.post("/stub", **sent).status_code
    assert found == {"not-a-secret": 422, "wrong": 401}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_token_may_be_in_json_of_any_encoding(token_server, encoding):
    body = json.dumps({"q": "a", "api_key": "not-a-secret"}).encode(encoding)
    assert (
        token_server.post(
            "/stub", content=body, headers={"Content-Type": "application/json"}
        ).status_code
        == 200
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"a":' * 100_000, b"\xff", b"--x\r\n", b"[1]", b'{"api_key": NaN}'],
    ids=str,
)
@pytest.mark.parametrize(
    "content_type",
    ["application/json", "multipart/form-data; boundary=x", "multipart/form-data", ";"],
)
def test_a_body_that_cannot_be_read_has_no_token(token_server, content, content_type):
    answer = token_server.post("/stub", content=content, headers={"Content-Type": content_type})
    assert answer.status_code == 401
    assert answer.json()["stub"]["message"].startswith("the request has no token")


def test_health_and_metrics_need_no_token(token_server):
    paths = ("/health", "/health/live", "/health/ready", "/metrics")
    assert [token_server.get(path).status_code for path in paths] == [200] * 4
    assert token_server.get("/openapi.json").status_code == 401


def bytes_of_answer(server, method, path):
    """Return what the server sends on a connection that it then closes."""
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nX-Request-ID: x\r\nConnection: close"
    with server.send(f"{request}\r\n\r\n".encode()) as connection:
        return connection.makefile("rb").read()


def test_head_is_answered_as_get_without_the_body():
    """Monitors and `wget --spider` send it. RFC 9110 wants it wherever GET is, with the headers of
    GET."""
    routes = [
        route
        for router in (health.router, *(each.router for each in PROTOCOLS))
        for route in router.routes
    ]
    paths = [
        "/openapi.json",
        *(
            route.path.format(name="x", id="x", version="1")
            for route in routes
            if "GET" in route.methods
        ),
    ]
    assert {"/", "/health", "/v1/models", "/v2/models/x", "/metrics", "/info"} <= set(paths)
    with served(None, PROTOCOLS) as server:
        for path in [*paths, "/models/x/v1/models", "/nowhere", "/translate"]:
            head, body = bytes_of_answer(server, "GET", path).split(b"\r\n\r\n", 1)
            if path == "/metrics":  # its length changes from answer to answer
                head = re.sub(rb"content-length: \d+", b"", head)
            found = bytes_of_answer(server, "HEAD", path)
            found = re.sub(rb"content-length: \d+", b"", found) if path == "/metrics" else found
            assert (body != b"", DATE.sub(b"", found)) == (
                True,
                DATE.sub(b"", head + b"\r\n\r\n"),
            ), path


def test_the_page_and_the_embeddings_share_the_root():
    with served(TOKEN, PROTOCOLS) as server:
        # the page needs no token
        assert httpx.get(server.url).headers["content-type"].startswith("text/html")
        assert [
            httpx.post(server.url, json={}).status_code,
            httpx.delete(server.url).status_code,
        ] == [401, 401]
        found = httpx.delete(server.url, headers={"Authorization": "Bearer not-a-secret"})
        assert (found.status_code, found.headers["allow"]) == (405, "GET, HEAD, POST")


def test_head_needs_the_token_where_get_does(token_server):
    assert [token_server.head(path).status_code for path in ("/health", "/openapi.json")] == [
        200,
        401,
    ]


def test_pages_of_the_allowed_origin_may_ask_and_read_errors():
    with (
        served(TOKEN, cors_origin=("https://example.org",)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        for origin, allowed in (("https://example.org", True), ("https://example.com", False)):
            preflight = client.options("/stub", headers={"Origin": origin, **asked})
            answer = client.post("/stub", json={"q": "a"}, headers={"Origin": origin})
            assert (preflight.status_code == 200, answer.status_code) == (allowed, 401)
            found = [
                each.headers.get("Access-Control-Allow-Origin") for each in (preflight, answer)
            ]
            assert found == ([origin] * 2 if allowed else [None] * 2)


# ----------------------------------------------------------------------------- ids, log and metrics


@contextlib.contextmanager
def logged(monkeypatch):
    """A list that the lines of the log are in, when the block has ended."""
    reader, writer = os.pipe()
    monkeypatch.setattr(Log.__init__, "__defaults__", ("info", writer))
    lines = []
    yield lines
    os.close(writer)
    with os.fdopen(reader) as file:
        lines += map(json.loads, file)


def test_each_request_is_a_line_of_json_with_its_id(monkeypatch):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with (
        logged(monkeypatch) as lines,
        served(log_level="info") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        given = client.post(
            "/stub",
            json={"q": "a"},
            headers={"X-Request-ID": "of-the-client", "traceparent": trace},
        )
        made = client.get("/nowhere?key=secret")
        bad = client.get("/nowhere", headers={"X-Request-ID": "two words"})
        assert client.get("/health").status_code == 200
        failed = client.get("/raise/mistake")
    assert given.headers["X-Request-ID"] == "of-the-client" != made.headers["X-Request-ID"]
    assert (
        len(
            {
                made.headers["X-Request-ID"],
                bad.headers["X-Request-ID"],
                failed.headers["X-Request-ID"],
                "two words",
            }
        )
        == 4
    )
    found = [
        (line["method"], line["path"], line["status"], line["id"])
        for line in lines
        if line["message"] == "request"
    ]
    assert found == [
        ("POST", "/stub", 200, "of-the-client"),
        ("GET", "/nowhere", 404, made.headers["X-Request-ID"]),
        ("GET", "/nowhere", 404, bad.headers["X-Request-ID"]),
        ("GET", "/raise/mistake", 500, failed.headers["X-Request-ID"]),
    ]
    assert [line["traceparent"] for line in lines if "traceparent" in line] == [trace]
    [mistake] = [line for line in lines if "error" in line]
    assert (
        mistake["id"] == failed.headers["X-Request-ID"] and "KeyError: 'secret'" in mistake["error"]
    )
    assert all(line["time"].endswith("Z") and line["level"] in ("info", "error") for line in lines)


def test_the_level_of_the_log_says_what_is_in_it(monkeypatch):
    with logged(monkeypatch) as lines, served(log_level="debug") as server:
        httpx.get(f"{server.url}/health")
    assert "/health" in [line.get("path") for line in lines]
    with logged(monkeypatch) as lines, served(log_level="warning") as server:
        httpx.get(f"{server.url}/nowhere")
        httpx.get(f"{server.url}/raise/nan")
    assert [line["level"] for line in lines] == ["error", "error"]


@pytest.mark.parametrize("kind", ["full", "closed", "unread"])
def test_a_log_that_cannot_be_written_stops_nothing(kind, monkeypatch):
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


def test_what_is_counted(monkeypatch):
    with served() as server, httpx.Client(base_url=server.url) as client:
        for path in ("/stub", "/models/a/stub", "/nowhere", "/models/a/nowhere/x"):
            client.post(path, json={"q": "a"})
        client.get("/raise/mistake")
        engine = server.server.service.metrics.of_engine("a-model")
        engine.joined(0.25)
        engine.first_token(0.5)
        engine.stepped(3, 2)
        engine.stepped(1, 1)
        server.server.service.metrics.watch_rows("a-model", lambda: 7, lambda: 5)
        server.server.service.metrics.watch_slots("a-model", 8, lambda: 5)
        answer = client.get("/metrics")
    found = dict(
        line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")
    )
    assert answer.headers["content-type"].startswith("text/plain; version=")
    prefix, model = "vanilla_transformer_", '{model="a-model"}'
    expected = {
        'requests_total{route="/stub",status="200"}': 2,
        'requests_total{route="none",status="404"}': 2,
        'requests_total{route="/raise/{name}",status="500"}': 1,
        'request_seconds_count{route="/stub"}': 2,
        "errors_total": 1,
        f"queue_seconds_sum{model}": 0.25,
        f"first_token_seconds_sum{model}": 0.5,
        f"batch_rows_count{model}": 2,
        f"batch_rows_sum{model}": 4,
        f"tokens_total{model}": 3,
        f"rows_waiting{model}": 7,
        f"rows_running{model}": 5,
        f"slots_used_ratio{model}": 0.625,
    }
    assert {name: float(found[prefix + name]) for name in expected} == expected
    assert (
        float(found["process_resident_memory_bytes"]) > 1e6
        and float(found["process_cpu_seconds_total"]) > 0
    )


# ------------------------------------------------------------------------------------------ the end


def test_a_server_that_is_told_to_stop_answers_what_it_accepted_and_refuses_what_comes_then():
    with served(grace=0.4) as server, httpx.Client(base_url=server.url) as client:
        accepted = server.send(request("/slow", {"q": "a", "x": 1.2}))
        wait_for(lambda: SEEN)
        server.stop()
        wait_for(lambda: client.get("/health/ready").status_code == 503)
        # it is alive, and takes requests until the balancers know
        assert client.get("/health/live").status_code == 200
        assert client.post("/stub", json={"q": "a"}).status_code == 200
        wait_for(lambda: client.post("/stub", json={"q": "a"}).status_code == 503)
        refused = client.post("/stub", json={"q": "a"})
        assert (refused.headers["Retry-After"], "shutting down" in refused.text) == ("5", True)
        assert refused.headers["Connection"] == "close"
        assert client.get("/health").json() == {"status": "shutting down"}
        assert answer_of(accepted)[0] == 200
        server.thread.join(5)
        assert not server.thread.is_alive()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", server.port), timeout=1)


def test_what_is_not_done_within_the_limit_is_refused_in_the_end():
    with served(drain=0.2) as server:
        waiting = server.send(request("/slow", {"q": "a", "x": 60}))
        wait_for(lambda: SEEN)
        server.stop()
        status, body = answer_of(waiting)
        assert (status, body["stub"]["message"]) == (
            503,
            "the server is shutting down: ask another one",
        )
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


def test_a_thread_that_does_not_end_does_not_keep_the_process():
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
            check_that_it_ends(process)
        finally:
            process.kill()


def check_that_it_ends(process):
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
        assert answer_of(connection)[0] == 503
        assert process.wait(5) == 0


def test_everything_but_health_is_refused_while_the_models_are_loaded():
    with served() as server, httpx.Client(base_url=server.url) as client:
        server.server.service.lifecycle.loading = True
        answer = client.post("/stub", json={"q": "a"})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
        assert (
            answer.json()["stub"]["message"] == "the server is loading its models: try again later"
        )
        assert [client.get(f"/health{path}").status_code for path in ("", "/ready", "/live")] == [
            503,
            503,
            200,
        ]
        server.server.service.lifecycle.loading = False
        assert client.get("/health/ready").status_code == 200
