"""Tests of what is checked before a JSON body is parsed: its number of values, and its characters.
One body must not stop the server for other requests."""

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import check_message
from pydantic import ValidationError
from served import PROTOCOL, served

from vanilla_transformer_export.errors import RequestError
from vanilla_transformer_export.serving import limits
from vanilla_transformer_export.serving.protocols.libretranslate import Translation
from vanilla_transformer_export.serving.protocols.tensors import InferRequest, InputTensor
from vanilla_transformer_export.serving.protocols.text_embeddings_requests import (
    RerankRequest,
    Sentences,
)

MAX_BODY = 16384  # 1024 values, and 64 arrays, objects and fields


def size(value):
    """Return the number of (values after a comma, arrays, objects and fields) in `value`."""
    if not isinstance(value, list | dict):
        return 0, 0
    counts = [size(part) for part in (value.values() if isinstance(value, dict) else value)]
    own = max(0, len(value) - 1), 1 + len(value) * isinstance(value, dict)
    return tuple(map(sum, zip(own, *counts)))


TEXTS = st.text(st.sampled_from('a,[]{}:"\\\n €\U0001f600'))
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


@given(VALUES, st.booleans(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-be"]))
def test_counts_outside_of_strings_match_parsed_values(value, is_ascii, encoding):
    body = json.dumps([value], ensure_ascii=is_ascii).encode(encoding)
    outside = limits.outside_strings(limits.json_text(body))
    commas, containers = size([value])
    assert limits.count(outside, (b",",)) == commas
    assert limits.count(outside, limits.STRUCTURE) == containers


@given(st.lists(st.sampled_from(["\\ud83d", "\\ude00", "\\\\", "\\n", "a", "é"])))
def test_lone_surrogates_are_those_that_python_cannot_encode(parts):
    text = '"' + "".join(parts) + '"'
    try:
        json.loads(text).encode()
        expected = None
    except UnicodeEncodeError as error:
        expected = error.object[error.start]
    assert limits.lone_surrogate(text.encode()) == expected


@pytest.fixture(scope="module")
def client():
    with served(max_body=MAX_BODY) as server, httpx.Client(base_url=server.url) as client:
        yield client


def post(client, content):
    return client.post("/stub", content=content, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(
    "item, number, limit",
    [("1", 1030, 1024), ('""', 1030, 1024), ("[]", 70, 64), ("{}", 70, 64), ('{"a":1}', 40, 64)],
)
def test_too_many_values_return_413_with_number_and_limit(client, item, number, limit):
    answer = post(client, '{"q": [' + ",".join([item] * number) + "]}")
    assert answer.status_code == 413
    check_message(answer.json()["stub"]["message"], expected=limit)


def test_texts_with_commas_and_brackets_are_no_values(client):
    text = '[1, {"a": NaN}]\\' * 500
    answer = post(client, json.dumps({"q": text}))
    assert (answer.status_code, answer.json()["q"]) == (200, text)


@pytest.mark.parametrize(
    "model, fields, name",
    [
        (Translation, {"source": "en", "target": "de"}, "q"),
        (RerankRequest, {"query": "a"}, "texts"),
        (Sentences, {"source_sentence": "a"}, "sentences"),
        (InputTensor, {"name": "a", "datatype": "BYTES"}, "shape"),
        (InferRequest, {}, "inputs"),
        (InferRequest, {"inputs": [{"name": "a", "datatype": "b", "shape": [1]}]}, "outputs"),
    ],
)
def test_first_wrong_item_of_a_list_is_its_only_error(model, fields, name):
    """An error of each item would take seconds, in which no other request runs."""
    with pytest.raises(ValidationError) as failed:
        model.model_validate({**fields, name: [None] * 100})
    errors = [error["loc"] for error in failed.value.errors() if 0 in error["loc"]]
    assert len(errors) == 1 and failed.value.error_count() <= 2  # of each type of a union


def test_checks_of_long_bodies_raise_in_a_thread_as_well(client, monkeypatch):
    monkeypatch.setattr("vanilla_transformer_export.serving.generation.MAX_INLINE_CHARACTERS", -1)
    assert post(client, '{"q": [' + "1," * 1030 + "1]}").status_code == 413
    assert post(client, '{"q": "a", "x": NaN}').status_code == PROTOCOL.validation
    assert post(client, '{"q": "a long text"}').status_code == 200


def test_size_of_a_body_in_binary_is_not_checked():
    assert limits.json_text(b"\x89PNG" + b"[" * 1000) == b""
    with pytest.raises(RequestError):
        limits.check_size(limits.json_text(b" \n" + b"[" * 1000), MAX_BODY)
