"""Tests of requests to LibreTranslate's protocol that are rejected."""

import pytest
from messages import check_message
from translation_server import ENGLISH, SLOTS, answer, error_message

pytestmark = pytest.mark.filterwarnings("ignore:.*was cut after")


@pytest.mark.parametrize(
    "changes, seen, expected",
    [
        ({"q": None}, None, ()),
        ({"q": 5}, 5, ()),
        ({"q": ["w5", None]}, ("w5", None), ()),
        ({"q": {"w5": 1}}, ("w5", 1), ()),
        ({"q": ""}, "''", ()),
        ({"q": []}, "[]", ()),
        ({"q": ["w5"] * 5}, 5, 4),
        ({"source": "fr"}, ("fr", "de"), ()),
        ({"target": "d" * 99}, ("en", "d" * 49), ()),
        ({"target": "en"}, "en", ()),
        ({"target": ""}, ("en", "''"), ()),
        ({"target": ["de"]}, "de", ()),
        ({"target": "auto"}, ("en", "auto"), ()),
        ({"format": "pdf"}, ("format", "pdf"), ("text", "html")),
        ({"format": ["html"]}, ("format", "html"), ("text", "html")),
        ({"alternatives": "two"}, ("alternatives", "two"), ()),
        ({"alternatives": 1.5}, ("alternatives", 1.5), ()),
        ({"alternatives": -1}, ("alternatives", -1), 0),
        ({"alternatives": SLOTS}, ("alternatives", SLOTS), SLOTS - 1),
        ({"alternatives": 10**30}, (), SLOTS - 1),
        ({"model": 5}, 5, ()),
        ({"api_key": 5}, ("api_key", 5), ()),
    ],
    ids=ascii,
)
def test_invalid_value_error_names_value(client, changes, seen, expected):
    check_message(
        error_message(client.post("/translate", json={"q": "w5", **ENGLISH, **changes})),
        seen=seen,
        expected=expected,
    )


@pytest.mark.parametrize("field", ["q", "source", "target"])
def test_missing_field_error_names_field(client, field):
    body = {name: value for name, value in {"q": "w5", **ENGLISH}.items() if name != field}
    expected = f"{field} is missing, expected it in the body"
    assert expected in error_message(client.post("/translate", json=body))
    assert expected in error_message(client.post("/translate", data=body))


@pytest.mark.parametrize(
    "kind, content, seen",
    [
        ("application/json", b"", ("JSON", "char 0")),
        ("application/json", b'{"q": "w5",', ("JSON", "char 11")),
        ("application/json", b'{"q": "\xff"}', "JSON"),
        ("application/json", b'{"q": "\\ud83d", "source": "en", "target": "de"}', ()),
        ("application/json", b"[" * 10_000, "JSON"),
        ("application/json", b"[1]", 1),
        ("text/plain", b"w5", "JSON"),
        ("application/x-www-form-urlencoded", b"q=%ff&source=en&target=de", ()),
        ("application/x-www-form-urlencoded", b"q=\xff&source=en&target=de", ()),
        ("application/x-www-form-urlencoded", b"", "q is missing"),
        ("multipart/form-data", b"w5", "boundary"),
        ("multipart/form-data; boundary=x", b"w5", ()),
    ],
    ids=ascii,
)
def test_invalid_body_returns_400(client, kind, content, seen):
    check_message(
        error_message(client.post("/translate", content=content, headers={"Content-Type": kind})),
        seen=seen,
    )


def test_file_in_form_returns_400(client):
    files = {"q": ("a.txt", b"w5"), "source": (None, "en"), "target": (None, "de")}
    assert "Too many files" in error_message(client.post("/translate", files=files))


def test_too_many_sentences_return_413(client):
    for body, seen, expected in (
        ({"q": "w5\n" * 4097}, 4097, 4096),
        ({"q": "w5<p>" * 4097, "format": "html"}, 4097, 4096),
        ({"q": "w5 " * 4097}, 12290, 640),
    ):
        answer = client.post("/translate", json={**ENGLISH, **body})
        check_message(error_message(answer, 413), seen=seen, expected=expected)


def test_sentence_longer_than_slot_returns_413(client):
    long = "w5 " * 41
    for body in ({"q": long}, {"q": f"<p>{long}</p>", "format": "html"}, {"q": f"w5. W{long}"}):
        result = client.post("/translate", json={**ENGLISH, **body})
        check_message(error_message(result, 413), seen=41, expected=40)


@pytest.mark.parametrize(
    "fields, warning",
    [
        ({"fromat": "html"}, "299 - \"'fromat' is ignored, expected 'format'\""),
        (
            {"zzz": 1, "alternative": 2},
            "299 - \"'alternative' is ignored, expected 'alternatives'\"",
        ),
        ({"zzz": 1}, None),
        ({}, None),
    ],
)
def test_unknown_field_that_resembles_a_field_is_named_in_warning_header(client, fields, warning):
    response = client.post("/translate", json={**ENGLISH, "q": "w5 w6", **fields})
    assert response.json() == answer(client, {"q": "w5 w6"})
    assert response.headers.get("Warning") == warning
