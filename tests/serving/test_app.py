"""Tests of the application without a model: errors have the format of each protocol."""

import asyncio
import functools
import json
import re

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import check_message
from served import MODEL, served

from vanilla_transformer_export.errors import RequestError
from vanilla_transformer_export.serving import health
from vanilla_transformer_export.serving.app import create_app
from vanilla_transformer_export.serving.models import ServedModels
from vanilla_transformer_export.serving.service import PROTOCOLS

JSON = {"Content-Type": "application/json"}
# Invalid JSON bodies, and the values that the error must contain.
BAD_BODIES = {
    "nothing": (b"", dict(expected="JSON")),
    "half": (b'{"q": "a"', dict(seen=("JSON", 9))),
    "brace": (b"{", dict(seen=("JSON", 1))),
    "zeros": (b"\x00\x01\x02", dict(seen=("JSON", 0))),
    "two": (b'{"q": "a"}{"q": "b"}', dict(seen=("JSON", 10))),
    "comma": (b'{"q": "a",}', dict(seen="JSON")),
    "quotes": (b"{'q': 'a'}", dict(seen=("JSON", 1))),
    "comment": (b'{"q": "a" /* b */}', dict(seen=("JSON", 10))),
    "newline": (b'{"q": "a\nb"}', dict(seen=("JSON", 8))),
    "escape": (b'{"q": "\\x"}', dict(seen=("JSON", 7))),
    "utf-8": (b'{"q": "\xff"}', dict(seen=("utf-8", "0xff"))),
    "latin-1": ('{"q": "für"}'.encode("latin-1"), dict(seen="0xfc")),
    "half a character": (b'{"q": "\\ud83d"}', dict(seen="\\ud83d")),
    "half in bytes": (b'{"q": "\xed\xa0\xbd"}', dict(seen="\\ud83d")),
    "deep list": (b"[" * 5_000, dict()),
    "deep object": (b'{"q":' * 5_000, dict()),
    "digits": (b'{"q": ' + b"9" * 5000 + b"}", dict(seen=5000)),
    "list": (b"[]", dict(seen="[]", expected="JSON")),
    "number": (b"5", dict(seen=5, expected="JSON")),
    "text": (b'"q"', dict(seen="q", expected="JSON")),
    "null": (b"null", dict(expected="JSON")),
    "NaN": (b'{"q": "a", "x": NaN}', dict(seen="NaN", expected="JSON")),
    "Infinity": (b'{"q": "a", "x": [-Infinity]}', dict(seen="-Infinity")),
}


@pytest.fixture(scope="module")
def client():
    with served() as server, httpx.Client(base_url=server.url) as client:
        server.server.service.models.models.update({"a-name": MODEL, "a": MODEL})
        yield client


def read_error_message(answer):
    """Return the message of an error response in the format of the stub."""
    assert answer.headers["content-type"] == "application/json"
    [name, error] = answer.json().popitem()
    assert (name, error["status"], "\n" in error["message"]) == ("stub", answer.status_code, False)
    return error["message"]


@pytest.mark.parametrize("path", ["/stub", "/models/a-name/stub"])
@pytest.mark.parametrize("name", BAD_BODIES)
def test_invalid_json_body_returns_422_in_protocol_format(client, name, path):
    content, values = BAD_BODIES[name]
    answer = client.post(path, content=content, headers=JSON)
    assert answer.status_code == 422
    check_message(read_error_message(answer), **values)


@pytest.mark.parametrize(
    "body, message",
    [
        ({}, "q is missing, expected it in the body"),
        ({"q": 5}, "q is 5, expected a valid string or a valid list"),
        ({"q": None}, "q is None, expected a valid string or a valid list"),
        ({"q": ["a", 5]}, "q is ['a', 5], expected a valid string"),
        ({"q": {"a": "b" * 500}}, "q is {'a': 'bbb"),
        ({"q": "a", "n": 0}, "n is 0, expected a number greater than or equal to 1"),
        (
            {"q": "a", "n": "x"},
            "n is 'x', expected a valid integer, unable to parse string as an integer",
        ),
        ({"q": "a", "n": 10**400}, "n is 1000"),
        ({"q": "a", "x": 10**400}, "x is 1000"),
        (
            {"q": "a", "x": [], "n": 11},
            "n is 11, expected a number less than or equal to 10 (1 more",
        ),
    ],
    ids=lambda value: json.dumps(value)[:30] if isinstance(value, dict) else "",
)
def test_validation_error_names_seen_and_expected_value(client, body, message):
    answer = client.post("/stub", json=body)
    assert answer.status_code == 422 and len(read_error_message(answer)) < 300
    assert read_error_message(answer).startswith(message)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ";;"]
)
def test_wrong_content_type_error_names_expected_type(client, content_type):
    answer = client.post("/stub", content=b'{"q": "a"}', headers={"Content-Type": content_type})
    assert answer.status_code == 422
    check_message(read_error_message(answer), seen="Content-Type", expected="application/json")


def test_strings_that_look_like_invalid_json_are_accepted(client):
    for text in ("NaN, Infinity \\ud83d", "한국어", "\U0001f600"):
        for content in (json.dumps({"q": text}), json.dumps({"q": text}, ensure_ascii=False)):
            answer = client.post("/stub", content=content.encode(), headers=JSON)
            assert (answer.status_code, answer.json()) == (200, {"q": text, "n": 1})


@pytest.mark.parametrize(
    "name, status, message",
    [
        ("refusal", 429, "too many, expected fewer"),
        ("long", 413, "9 tokens, expected at most 8"),
        ("deep", 422, ""),
        ("value", 422, "a b is \\ud800, expected c"),
        *((name, 500, "") for name in ("mistake", "nan", "half")),
    ],
)
def test_handler_exceptions_become_errors_in_protocol_format(client, name, status, message):
    answer = client.get(f"/raise/{name}")
    error = read_error_message(answer)
    assert (answer.status_code, error.startswith(message), "secret" in error) == (
        status,
        True,
        False,
    )
    assert answer.headers.get("Retry-After") == ("3" if name == "refusal" else None)


@pytest.mark.parametrize(
    "method, path, status, expected",
    [
        *(("GET", path, 404, "/openapi.json") for path in ("/nowhere", "/", "//", "/docs")),
        ("POST", "/health", 405, ("GET", "HEAD")),
    ],
)
def test_path_outside_protocols_returns_plain_error(client, method, path, status, expected):
    answer = client.request(method, path)
    assert (answer.status_code, [*answer.json()]) == (status, ["error"])
    check_message(answer.json()["error"], expected=expected)


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/stub", 405),
        ("PUT", "/models/a/stub", 405),
        ("GET", "/raise/a/b", 404),
        ("GET", "/models/a/raise/a/b", 404),
    ],
)
def test_wrong_method_or_subpath_error_has_protocol_format(client, method, path, status):
    answer = client.request(method, path)
    assert (answer.status_code, read_error_message(answer) != "") == (status, True)
    assert answer.headers.get("Allow") == ("POST" if status == 405 else None)


def test_openapi_document_has_routes_bodies_and_error_examples(client):
    document = client.get("/openapi.json").json()
    assert "HTTPValidationError" not in str(document)  # FastAPI's format of errors, never sent
    paths = document["paths"]
    assert {"/stub", "/models/{model}/stub", "/health/ready", "/metrics"} <= paths.keys()
    assert "requestBody" in paths["/stub"]["post"]
    for path in ("/stub", "/models/{model}/stub"):
        example = paths[path]["post"]["responses"]["4XX"]["content"]["application/json"]["example"]
        assert example["stub"].keys() == {"status", "message"}


# ------------------------------------------------------------------------------------ all protocols


def test_openapi_document_has_every_route_and_every_body():
    def methods(router, prefix=""):
        routes = [route for route in router.routes if route.include_in_schema]
        return {(prefix + route.path, name.lower()) for route in routes for name in route.methods}

    paths = create_app(ServedModels({}), PROTOCOLS).openapi()["paths"]
    actual = {(path, name) for path in paths for name in paths[path] if name != "parameters"}
    expected = methods(health.router)
    for protocol in PROTOCOLS:
        expected |= methods(protocol.router) | methods(protocol.router, "/models/{model}")
    assert actual == expected
    posts = {path for path, name in actual if name == "post" and "{model}" not in path}
    unsupported = {"/detect", "/suggest", "/translate_file"}  # 403 whatever the body
    assert {path for path in posts if "requestBody" not in paths[path]["post"]} == unsupported


def post_routes():
    """Return the protocol and the path of each POST route."""
    result = [
        (protocol, route.path)
        for protocol in PROTOCOLS
        for route in protocol.router.routes
        if "POST" in route.methods
    ]
    return [
        pytest.param(protocol, re.sub(r"{\w+}", "x", path), id=path) for protocol, path in result
    ]


@pytest.mark.parametrize("protocol, path", post_routes())
def test_every_protocol_rejects_invalid_json_in_its_format(protocol, path):
    app = create_protocol_app(protocol.router.tags[0])
    expected = protocol.error_body(RequestError(400, ""))

    async def check():
        async with open_client(app) as client:
            for name, (content, _) in BAD_BODIES.items():
                answer = await client.post(path, content=content, headers=JSON)
                assert 400 <= answer.status_code < 500, (name, answer.text)
                assert answer.json().keys() == expected.keys(), (name, answer.text)

    asyncio.run(check())


ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-32")


@pytest.mark.parametrize("protocol, path", post_routes())
def test_json_of_any_encoding_is_read_like_utf8(protocol, path):
    """PowerShell and .NET send a byte order mark. `json.loads` reads all these encodings."""
    body = json.dumps(dict.fromkeys(FIELDS, "x"))

    async def answer(content):
        async with open_client(create_protocol_app(protocol.router.tags[0])) as client:
            actual = await client.post(path, content=content, headers=JSON)
            return actual.status_code, actual.text

    expected = asyncio.run(answer(body.encode()))
    assert "JSON" not in expected[1]
    assert [asyncio.run(answer(body.encode(encoding))) for encoding in ENCODINGS] == [
        expected
    ] * len(ENCODINGS)


@functools.cache
def create_protocol_app(name):
    return create_app(
        ServedModels({}),
        tuple(protocol for protocol in PROTOCOLS if protocol.router.tags[0] == name),
    )


def open_client(app):
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://x"
    )


FIELDS = (
    "q",
    "source",
    "target",
    "format",
    "model",
    "prompt",
    "max_tokens",
    "n",
    "stream",
    "input",
    "inputs",
    "query",
    "texts",
    "text",
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("protocol, path", post_routes())
@settings(max_examples=settings.default.max_examples // 3)
@given(body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5) | VALUES)
def test_random_json_never_causes_server_error(protocol, path, body):
    app = create_protocol_app(protocol.router.tags[0])

    async def check():
        async with open_client(app) as client:
            return await client.post(path, content=json.dumps(body), headers=JSON)

    assert asyncio.run(check()).status_code < 500
