"""Tests of access tokens, HEAD requests and allowed origins."""

import json
import re

import httpx
import pytest
from served import served, served_exports

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
def test_token_in_header_or_body_is_required(token_server, headers, body, status):
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
def test_token_in_form_is_accepted(token_server, kind):
    """LibreTranslate's clients send the token in a form.

    The stub rejects forms with 422, after the token was checked.
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
def test_token_in_json_of_any_encoding_is_accepted(token_server, encoding):
    body = json.dumps({"q": "a", "api_key": "not-a-secret"}).encode(encoding)
    assert (
        token_server.post(
            "/stub", content=body, headers={"Content-Type": "application/json"}
        ).status_code
        == 200
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"a":' * 5_000, b"\xff", b"--x\r\n", b"[1]", b'{"api_key": NaN}'],
    ids=str,
)
@pytest.mark.parametrize(
    "content_type",
    ["application/json", "multipart/form-data; boundary=x", "multipart/form-data", ";"],
)
def test_unreadable_body_without_token_header_returns_401(token_server, content, content_type):
    answer = token_server.post("/stub", content=content, headers={"Content-Type": content_type})
    assert answer.status_code == 401
    assert answer.json()["stub"]["message"].startswith("the request has no token")


def test_health_and_metrics_need_no_token(token_server):
    paths = ("/health", "/health/live", "/health/ready", "/metrics")
    assert [token_server.get(path).status_code for path in paths] == [200] * 4
    assert token_server.get("/openapi.json").status_code == 401


def read_raw_response(server, method, path):
    """Return what the server sends on a connection that it then closes."""
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nX-Request-ID: x\r\nConnection: close"
    with server.send(f"{request}\r\n\r\n".encode()) as connection:
        return connection.makefile("rb").read()


def test_head_returns_headers_of_get_without_body():
    """Monitors and `wget --spider` send HEAD. RFC 9110 requires it wherever GET is supported."""
    with served_exports() as server:
        described = httpx.get(f"{server.url}/openapi.json").json()["paths"].items()
        paths = ["/", "/openapi.json", "/page/models"]
        paths += [
            path.format(name="x", id="x", version="1", model="x")
            for path, methods in described
            if "get" in methods
        ]
        assert {"/health", "/v1/models", "/v2/models/x", "/metrics", "/info"} <= set(paths)
        for path in [*paths, "/models/x/v1/models", "/nowhere", "/translate"]:
            head, body = read_raw_response(server, "GET", path).split(b"\r\n\r\n", 1)
            if path == "/metrics":  # its length changes from answer to answer
                head = re.sub(rb"content-length: \d+", b"", head)
            result = read_raw_response(server, "HEAD", path)
            result = re.sub(rb"content-length: \d+", b"", result) if path == "/metrics" else result
            assert (body != b"", DATE.sub(b"", result)) == (
                True,
                DATE.sub(b"", head + b"\r\n\r\n"),
            ), path


def test_root_page_needs_no_token_but_embeddings_and_other_methods_do():
    with served_exports(token=TOKEN) as server:
        # the page needs no token
        assert httpx.get(server.url).headers["content-type"].startswith("text/html")
        assert [
            httpx.post(server.url, json={}).status_code,
            httpx.delete(server.url).status_code,
        ] == [401, 401]
        authorized = {"Authorization": "Bearer not-a-secret"}
        result = httpx.post(server.url, json={"inputs": "a"}, headers=authorized)
        # text-embeddings-inference's error, because this server has no model
        assert (result.status_code, result.json()["error_type"]) == (424, "Backend")
        result = httpx.delete(server.url, headers=authorized)
        assert (result.status_code, result.headers["allow"]) == (405, "GET, HEAD, POST")


def test_head_needs_token_where_get_does(token_server):
    assert [token_server.head(path).status_code for path in ("/health", "/openapi.json")] == [
        200,
        401,
    ]


def test_cors_headers_are_sent_to_allowed_origin_only():
    with (
        served(TOKEN, cors_origin=("https://example.org",)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        preflight_headers = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        for origin, allowed in (("https://example.org", True), ("https://example.com", False)):
            preflight = client.options("/stub", headers={"Origin": origin, **preflight_headers})
            answer = client.post("/stub", json={"q": "a"}, headers={"Origin": origin})
            assert preflight.status_code == 200 or not allowed
            assert answer.status_code == (401 if allowed else 403)
            result = [
                each.headers.get("Access-Control-Allow-Origin") for each in (preflight, answer)
            ]
            assert result == ([origin] * 2 if allowed else [None] * 2)
