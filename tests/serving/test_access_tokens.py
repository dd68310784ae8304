"""Tests of access tokens, HEAD requests and allowed origins."""

import json
import re

import httpx
import pytest
from served import served

from vanilla_transformer_export.serving import health
from vanilla_transformer_export.serving.service import PROTOCOLS

TOKEN = b"not-a-secret"
DATE = re.compile(rb"date: [^\r]+\r\n")


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
    """LibreTranslate's clients send it so.

    The stub takes no forms; the test shows that the token is checked first.
    """
    result = {}
    for key in ("not-a-secret", "wrong"):
        form = {"q": "a", "api_key": key}
        sent = (
            {"data": form}
            if kind == "data"
            else {"files": {name: (None, value) for name, value in form.items()}}
        )
        result[key] = token_server.post("/stub", **sent).status_code
    assert result == {"not-a-secret": 422, "wrong": 401}


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
            result = bytes_of_answer(server, "HEAD", path)
            result = re.sub(rb"content-length: \d+", b"", result) if path == "/metrics" else result
            assert (body != b"", DATE.sub(b"", result)) == (
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
        result = httpx.delete(server.url, headers={"Authorization": "Bearer not-a-secret"})
        assert (result.status_code, result.headers["allow"]) == (405, "GET, HEAD, POST")


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
            result = [
                each.headers.get("Access-Control-Allow-Origin") for each in (preflight, answer)
            ]
            assert result == ([origin] * 2 if allowed else [None] * 2)
