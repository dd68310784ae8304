"""Tests of requests of the Open Inference Protocol that are rejected, and of random ones."""

import json
import struct

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from checkpoints import VOCABULARY
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st
from messages import check_message, raises
from open_inference_client import infer, post, texts, tokens
from served import wait_for
from tritonclient.utils import InferenceServerException

from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.serving.protocols.tensors import (
    TEXTS,
    parse_inputs,
    parse_outputs,
    read_request,
)
from vanilla_transformer_export.specs.graph_spec import TensorSpec

# --------------------------------------------------------------------------------- invalid requests


INPUT = {"name": "input_ids", "shape": [1, 2], "datatype": "INT64", "data": [5, 6]}
TEXT = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["w5"]}
EMPTY = [INPUT, {**INPUT, "name": "attention_mask", "data": [0, 0]}]


def token_request(**changes):
    return {"inputs": [{**INPUT, **changes}]}


WRONG = {
    "no inputs": ({}, 400, dict(seen="inputs")),
    "another model": (
        {"model_name": "causal", "inputs": [TEXT]},
        400,
        dict(seen=("model_name", "causal"), expected="encoder"),
    ),
    "empty": ({"inputs": []}, 400, dict(seen="[]")),
    "a name": (
        token_request(name="input_id"),
        400,
        dict(seen="input_id", expected=("input_ids", "attention_mask")),
    ),
    "twice": ({"inputs": [INPUT, INPUT]}, 400, dict(seen="input_ids")),
    "both": (
        {"inputs": [TEXT, INPUT]}, 400, dict(seen="input_ids")
    ),
    "datatype": (
        token_request(datatype="INT32"), 400, dict(seen=("input_ids", "INT32"), expected="INT64")
    ),
    "no data": (token_request(data=None), 400, dict(seen=("input_ids", None))),
    "a text": (token_request(data=[5, "6"]), 400, dict(seen=("input_ids", 6), expected="INT64")),
    "a fraction": (
        token_request(data=[5, 6.0]), 400, dict(seen=("input_ids", "6.0"), expected="INT64")
    ),
    "a flag": (
        token_request(data=[5, True]), 400, dict(seen=("input_ids", True), expected="INT64")
    ),
    "large": (token_request(data=[5, 2**64]), 400, dict(seen=("input_ids", "INT64"))),
    "few": (token_request(data=[5]), 400, dict(seen=("input_ids", 1), expected=(1, 2))),
    "ragged": (
        token_request(data=[[5], [6, 7]], shape=[2, 2]),
        400,
        dict(seen=("input_ids", "shape", 2), expected=(2, 4)),
    ),
    "turned": (
        token_request(data=[[5], [6]]), 400, dict(seen=("input_ids", 2, 1), expected=(1, 2))
    ),
    "zero": (
        token_request(data=[], shape=[0, 2]),
        400,
        dict(seen=("input_ids", "shape", 0, 2), expected=1),
    ),
    "axes": (
        token_request(shape=[2]),
        400,
        dict(seen=("input_ids", 2), expected=("batch_size", "source_length")),
    ),
    "vocabulary": (
        token_request(data=[5, VOCABULARY]),
        400,
        dict(seen=("input_ids", 5, VOCABULARY), expected=(0, VOCABULARY - 1)),
    ),
    "only a mask": (
        token_request(name="attention_mask", data=[1, 1]), 400, dict(seen="input_ids")
    ),
    "no tokens": ({"inputs": EMPTY}, 400, dict(seen=(0, "attention_mask"))),
    "rows": (
        token_request(data=[5] * 9, shape=[9, 1]), 413, dict(seen=("input_ids", 9), expected=8)
    ),
    "an output": (
        {**token_request(), "outputs": [{"name": "embeding"}]}, 400, dict(seen="embeding")
    ),
    "outputs": (
        {**token_request(), "outputs": [{"name": "embedding"}] * 2},
        400,
        dict(seen=("outputs", "embedding")),
    ),
    "a parameter": (
        {**token_request(), "parameters": {"truncat": True}},
        400,
        dict(seen=("parameters", "truncat")),
    ),
    "a cut": ({**token_request(), "parameters": {"truncate": True}}, 400, dict(seen="truncate")),
    "truncate": (
        {"inputs": [TEXT], "parameters": {"truncate": 1}},
        400,
        dict(seen=("truncate", 1)),
    ),
    "binary output": (
        {**token_request(), "parameters": {"binary_data_output": "no"}},
        400,
        dict(seen=("binary_data_output", "no")),
    ),
    "classification": (
        {
            **token_request(),
            "outputs": [{"name": "embedding", "parameters": {"classification": 3}}],
        },
        400,
        dict(seen=("classification", "embedding")),
    ),
    "memory": (
        token_request(data=None, parameters={"shared_memory_region": "x"}),
        400,
        dict(seen="input_ids"),
    ),
    "binary size": (
        token_request(data=None, parameters={"binary_data_size": 8}),
        400,
        dict(seen=("input_ids", 8), expected=0),
    ),
    "axes of text": (
        {"inputs": [{**TEXT, "shape": [1, 1]}]}, 400, dict(seen=("shape", 1))
    ),
    "a field": ({**token_request(), "input": 1}, 400, dict(seen=1)),
    "list": ([], 400, dict(seen="[]")),
    "nothing": (b"", 400, dict(seen="JSON")),
    "behind": (json.dumps(token_request()).encode() + b"....", 400, dict(seen="JSON")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_invalid_request_returns_error_that_names_value(server, name):
    body, status, values = WRONG[name]
    answer = post(server, "encoder", body)
    assert (answer.status_code, answer.json().keys()) == (status, {"error"}), answer.text
    check_message(answer.json()["error"], **values)


def test_invalid_binary_data_or_headers_return_error(server):
    def post_invalid(length, body, binary=b"", **headers):
        content = json.dumps(body).encode()
        length = len(content) if length is None else length
        headers = {"Inference-Header-Content-Length": str(length), **headers}
        answer = post(server, "encoder", content + binary, **headers)
        assert 400 <= answer.status_code < 500, answer.text
        return answer.json()["error"]

    text = {**TEXT, "data": None}
    for size, binary, seen, expected in (
        (6, struct.pack("<I", 2) + b"w5...", (9, "JSON"), 6),
        (6, struct.pack("<I", 3) + b"w5", (0, 7), 6),
        (3, b"\0\0\0", (0, 4), 3),
        (0, b"", 0, 1),
        (6, struct.pack("<I", 2) + b"w\xff", 0, ()),
        (True, b".", ("binary_data_size", True), 1),
    ):
        body = {"inputs": [{**text, "parameters": {"binary_data_size": size}}]}
        check_message(post_invalid(None, body, binary), seen=seen, expected=expected)
    both = {"inputs": [{**TEXT, "parameters": {"binary_data_size": 1}}]}
    check_message(post_invalid(None, both, b"."), seen=("data", "binary_data_size"))
    ids = {"inputs": [{**INPUT, "data": None, "parameters": {"binary_data_size": 8}}]}
    wrong = post_invalid(None, ids, b"\0" * 8)
    check_message(wrong, seen=("binary_data_size", "input_ids", 8), expected=(16, "INT64"))
    check_message(post_invalid(-1, token_request()), seen=-1)
    check_message(post_invalid(1000, token_request()), seen=1000)
    zipped = post_invalid(None, token_request(), **{"Content-Encoding": "gzip"})
    check_message(zipped, seen=("Content-Encoding", "gzip"))


@pytest.mark.parametrize(
    "inputs, options, seen, expected",
    [
        (texts, {"num_return_sequences": 2, "num_beams": 2}, ("num_return_sequences", 2), 1),
        (texts, {"max_new_tokn": 3}, "max_new_tokn", ()),
        (texts, {"src_lang": 5}, ("src_lang", 5), ()),
        (tokens, {"src_lang": "de"}, ("src_lang", "de"), ()),
        (
            lambda: tokens(attention_mask=np.array([[1, 0, 1, 0, 0]] * 3)),
            {},
            (0, "attention_mask"),
            (),
        ),
        (lambda: tokens(attention_mask=np.zeros((3, 5), np.int64)), {}, (0, "attention_mask"), ()),
    ],
)
def test_invalid_generation_request_raises_and_names_value(client, inputs, options, seen, expected):
    with raises(InferenceServerException, seen=seen, expected=expected):
        infer(client, "causal", inputs(), parameters=options or None)


def test_unknown_paths_have_protocol_errors_and_413_is_counted_for_route(server):
    for path, status in (
        ("/v2/models/another/infer", 404),
        ("/v2/models/encoder/infr", 404),
        ("/v2/repository", 404),
    ):
        answer = httpx.post(server.url + path, json=token_request())
        assert (answer.status_code, answer.json().keys()) == (status, {"error"})
    assert (
        httpx.post(f"{server.url}/v2/models/encoder/infer", content=b"x" * 5_000_000).status_code
        == 413
    )
    counted = 'route="/v2/models/{name}/infer",status="413"'
    wait_for(lambda: counted in httpx.get(f"{server.url}/metrics").text)


# ---------------------------------------------------------------------------------- random requests


KNOWN = [
    TensorSpec("t", TEXTS, ("n",)),
    TensorSpec("i", "int64", ("n", "s")),
    TensorSpec("f", "float32", ("n", 2)),
]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
VALUES = st.recursive(LEAVES, lambda own: st.lists(own, max_size=3), max_leaves=9)
NAMES = st.sampled_from(["binary_data_size", "binary_data", "binary_data_output", "x"])
PARAMETERS = st.dictionaries(NAMES, VALUES | st.integers(0, 16))
INPUTS = st.fixed_dictionaries(
    {
        "name": st.sampled_from("tif"),
        "shape": st.lists(st.integers(-1, 4) | st.integers(), max_size=3),
        "datatype": st.sampled_from(["BYTES", "INT64", "FP32"]),
    },
    optional={"data": VALUES, "parameters": PARAMETERS},
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(INPUTS, max_size=3)},
    optional={
        "outputs": st.lists(st.fixed_dictionaries({"name": st.sampled_from("tif")})),
        "parameters": PARAMETERS,
    },
)


@given(REQUESTS | VALUES, st.binary(max_size=16), st.none() | st.just(0) | st.integers(-3, 3))
def test_random_request_is_parsed_or_rejected(request, binary, shift):
    content = json.dumps(request).encode()
    try:
        body, rest = read_request(
            content + binary, None if shift is None else str(len(content) + shift)
        )
        result, outputs = parse_inputs(body.inputs, rest, KNOWN), parse_outputs(body, KNOWN)
    except (UsageError, RequestValidationError):
        return
    assert outputs and [list(values.shape) for values in result.values()] == [
        tensor.shape for tensor in body.inputs
    ]


@given(st.lists(st.text(max_size=9), min_size=1, max_size=4))
def test_texts_round_trip_in_binary_and_json(words):
    request = triton.InferInput("t", [len(words)], "BYTES")
    for in_binary in (True, False):
        request.set_data_from_numpy(np.array(words, object), binary_data=in_binary)
        described, binary = request._get_tensor(), request._get_binary_data() or b""
        header = json.dumps({"inputs": [described]}).encode()
        body, rest = read_request(header + binary, str(len(header)))
        assert parse_inputs(body.inputs, rest, KNOWN)["t"].tolist() == words
