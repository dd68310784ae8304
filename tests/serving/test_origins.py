"""Tests of header fields: Host, Content-Encoding, and Origin of web pages, of which those of other
hosts are rejected unless they are allowed."""

import gzip

import httpx
import pytest
from messages import check_message
from raw_connections import is_closed
from served import served

BODY = b'{"q": "a"}'


@pytest.fixture(scope="module")
def server():
    with served(cors_origin=("https://allowed.example",)) as server:
        yield server


def post(server, **headers):
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    names = {"Content-Type": "application/json", **names}
    return httpx.post(f"{server.url}/stub", content=BODY, headers=names)


@pytest.mark.parametrize(
    "headers",
    [
        {},  # a program, such as curl
        {"Origin": "http://127.0.0.1"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Origin": "moz-extension://4c2f0a2e-5d3b-4c7a-9f57-2d7b1c1f3a10"},
        {"Origin": "chrome-extension://abcdefghijklmnop", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "https://allowed.example", "Sec-Fetch-Site": "cross-site"},
        # proxies: Host is passed on, is in X-Forwarded-Host, or is lost
        {"Origin": "https://mt.example", "Host": "mt.example"},
        {"Origin": "https://MT.example:8443", "Host": "mt.example"},
        {"Origin": "https://mt.example", "X-Forwarded-Host": "mt.example:443, inner"},
        {"Origin": "https://mt.example", "Host": "backend:8000", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "https://[2001:db8::1]", "Host": "[2001:db8::1]:8000"},
    ],
)
def test_programs_extensions_proxies_and_allowed_pages_are_answered(server, headers):
    assert post(server, **headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://127.0.0.1.evil.example"},
        {"Origin": "https://other.example", "Sec-Fetch-Site": "same-site"},
        {"Origin": "null"},  # a page chooses it with a sandbox
        {"Origin": "http://"},
        {"Origin": "http://["},
    ],
)
@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
def test_pages_of_other_hosts_are_rejected_with_403(server, headers, kind):
    answer = post(server, **headers, Content_Type=kind)
    assert answer.status_code == 403
    check_message(answer.json()["stub"]["message"], seen=headers["Origin"], expected="cors-origin")


def test_pages_may_read_and_any_origin_can_be_allowed(server):
    headers = {"Origin": "https://evil.example"}
    assert httpx.get(f"{server.url}/health", headers=headers).status_code == 200
    assert httpx.get(f"{server.url}/raise/long", headers=headers).status_code == 413
    with served(cors_origin=("*",)) as other:
        assert post(other, Origin="null").status_code == 200


# ------------------------------------------------------------------------------------------ headers


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1\r\n",
        b"HTTP/1.1\r\nHost: a\r\nHost: a\r\n",
        b"HTTP/1.1\r\nhost: a\r\nHOST: b\r\n",
        b"HTTP/1.0\r\nHost: a\r\nHost: b\r\n",
        b"HTTP/1.1\r\nHost: a b\r\n",
        b"HTTP/1.1\r\nHost: a/b\r\n",
        b"HTTP/1.1\r\nHost: user@a\r\n",
    ],
)
@pytest.mark.parametrize("begin", [b"GET /health/live ", b"POST /stub "])
def test_missing_second_or_invalid_host_returns_400_and_closes(server, begin, head):
    connection = server.send(begin + head + b"Content-Length: 10\r\n\r\n" + BODY)
    answer = connection.recv(1000)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"Host" in answer
    assert is_closed(connection)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.0\r\n",
        b"HTTP/1.1\r\nHost:\r\n",
        b"HTTP/1.1\r\nHost: [::1]:80\r\n",
        b"HTTP/1.1\r\nHost: a_b-c.example:8000\r\n",
    ],
)
def test_valid_hosts_are_answered(server, head):
    connection = server.send(b"GET /health/live " + head + b"\r\n")
    assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("encoding", ["gzip", "br", "gzip, identity", "x"])
def test_compressed_bodies_return_415(server, encoding):
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/stub", content=gzip.compress(BODY), headers=headers)
    assert answer.status_code == 415
    check_message(answer.json()["stub"]["message"], seen=("Content-Encoding", encoding))
    assert post(server, Content_Encoding="identity").status_code == 200
