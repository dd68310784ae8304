"""Property tests of requests: any field values give an answer or an error message, never a 500."""

import asyncio
import json
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opened_engines import text_client
from served_models import loaded_model
from serving_load import with_words

from vanilla_transformer_export.serving.app import create_app
from vanilla_transformer_export.serving.models import ServedModels
from vanilla_transformer_export.serving.service import PROTOCOLS

pytestmark = pytest.mark.filterwarnings("ignore:.*was cut after")
SAMPLING = {
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "max_new_tokens": 3,
    "num_beams": 1,
    "seed": 1,
}
BODIES = {
    "/translate": {
        "q": "w5 w6",
        "source": "en",
        "target": "de",
        "format": "text",
        "alternatives": 1,
        "api_key": "a",
    },
    "/v1/completions": {
        **{
            "model": "poet",
            "prompt": "w5 w9",
            "max_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "n": 2,
            "stop": "w9",
        },
        **{
            "seed": 1,
            "echo": False,
            "logprobs": 2,
            "stream": False,
            "best_of": 1,
            "suffix": None,
            "logit_bias": None,
        },
    },
    "/v1/embeddings": {
        "model": "poet",
        "input": "w5",
        "encoding_format": "float",
        "dimensions": None,
    },
    "/page/stream": {
        "text": "w5",
        "model": "poet",
        "source": "en",
        "target": "de",
        "max_new_tokens": 3,
        "temperature": 0.5,
    },
    "/models/pair/page/stream": {"text": "w5. w6", "source": "en", "target": "de"},
    "/": {"inputs": "w5", "query": "w5", "texts": ["w6"], "model": "poet", "truncate": False},
    "/embed": {"inputs": "w5", "normalize": True, "truncate": False},
    "/predict": {"inputs": "w5", "truncate": False, "raw_scores": False},
    "/rerank": {
        "query": "w5",
        "texts": ["w6", "w7"],
        "truncate": False,
        "return_text": False,
        "raw_scores": False,
    },
    "/v1/rerank": {
        "query": "w5",
        "documents": ["w6", {"text": "w7"}],
        "top_n": 1,
        "return_documents": True,
        "max_tokens_per_doc": 1,
    },
    "/tokenize": {"inputs": "w5", "add_special_tokens": True},
    "/predict/translation": {
        "inputs": "w5",
        "parameters": {"max_new_tokens": 3, "num_beams": 2, "length_penalty": 1.0},
    },
    "/predict/text-generation": {"inputs": "w5", "parameters": SAMPLING, "stream": False},
    "/predict/token-classification": {
        "inputs": "w5 w6",
        "parameters": {"aggregation_strategy": "simple", "stride": 1},
    },
    "/predict/question-answering": {
        "inputs": {"question": "w5", "context": "w6 w7"},
        "parameters": {"top_k": 2},
    },
}
special = [0, -1, 2**31, 2**63, 10**40, 1e308]
numbers = (
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(special)
)
words = st.text(max_size=8) | st.sampled_from(
    ["", " ", "w5", "w5 " * 80, "\0", "\ud7ff", "poet", "auto", "<b>w5</b>"]
)
values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=2),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def app(exported_for, tmp_path_factory):
    result = {}
    for name, kind, languages in (("pair", "seq2seq", [("en", "de")]), ("poet", "causal", [])):
        export = with_words(exported_for(kind, "cpu")[1], tmp_path_factory.mktemp(name))
        result[name] = loaded_model(name, *text_client(export, slots=4), languages)
    yield create_app(ServedModels(result), PROTOCOLS)
    for model in result.values():
        model.client.close()


@st.composite
def requests(draw):
    """Draw a path and a valid body of it with some fields changed, also one level below."""
    path = draw(st.sampled_from(sorted(BODIES)))
    body = json.loads(json.dumps(BODIES[path]))
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=3, unique=True)):
        if isinstance(body[name], dict) and draw(st.booleans()):
            body[name][draw(st.sampled_from(sorted(body[name])))] = draw(values)
        elif draw(st.integers(0, 5)):
            body[name] = draw(values)
        else:
            del body[name]
    if not draw(st.integers(0, 5)):
        body[draw(words)] = draw(values)
    return path, body


@given(requests())
def test_random_fields_return_answer_or_error_message(app, path_and_body):
    path, body = path_and_body

    async def answer():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path, json=body)

    result = asyncio.run(answer())
    assert result.status_code < 500, result.text
    if result.status_code != 200:
        error = result.json().get("error", result.json())
        assert len(error["message"] if isinstance(error, dict) else error) > 10


@pytest.mark.parametrize("path", BODIES)
def test_paths_of_bodies_exist(app, path):
    async def answer():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://server"
        ) as client:
            return await client.post(path, json=BODIES[path])

    assert "this path does not exist" not in asyncio.run(answer()).text


def test_openapi_parameters_match_names_in_paths(app):
    for path, operations in app.openapi()["paths"].items():
        for method in operations.keys() & {"get", "post"}:
            given = [*operations.get("parameters", ()), *operations[method].get("parameters", ())]
            assert {each["name"] for each in given if each["in"] == "path"} == set(
                re.findall(r"{(\w+)}", path)
            ), path
