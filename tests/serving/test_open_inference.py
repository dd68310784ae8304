"""Tests of the Open Inference Protocol with Triton's client, against the checkpoints in torch."""

import itertools
import json
import struct

import httpx
import numpy as np
import pytest
import torch
import tritonclient.http as triton
from checkpoints import VOCABULARY, WIDTH, perturbed
from fastapi.exceptions import RequestValidationError
from heads import export_for_images
from hypothesis import given
from hypothesis import strategies as st
from messages import check_message, raises
from opened_engines import text_client
from served import wait_for
from served_models import loaded_model, serving
from serving_load import with_words
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

from vanilla_transformer_export import ImageRuntime, TextRuntime, export
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.serving.protocols.tensors import (
    TEXTS,
    parse_inputs,
    parse_outputs,
    read_request,
)
from vanilla_transformer_export.specs.graph_spec import TensorSpec

READERS, GENERATORS = ("encoder", "classification", "pretraining"), ("seq2seq", "causal")
# no word begins with w1 or w2, which are special tokens also inside of words
ROWS = [[5, 9, 30, 7, 41], [8, 33], [6, 44, 7]]
WORDS = [" ".join(f"w{token}" for token in row) for row in ROWS]
BOTH_WAYS = list(itertools.product((True, False), repeat=2))
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 4, "no_repeat_ngram_size": 1, "num_beams": 1}


@pytest.fixture(scope="module")
def server(exported, tmp_path_factory):
    """A server of all models."""
    exports = {
        name: with_words(exported(name).directory, tmp_path_factory.mktemp(name))
        for name in READERS + GENERATORS
    }
    generators = {}
    for name in GENERATORS:
        generators[name] = loaded_model(name, *text_client(exports[name]))
    with serving(
        {name: TextRuntime(exports[name], threads=1) for name in READERS}, max_batch=8
    ) as result:
        result.server.service.models.models.update(generators)
        result.exports = exports
        yield result
    for model in generators.values():
        model.client.close()


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as result:
        yield result


def batch():
    """Return the ids and the mask of `ROWS`."""
    longest = max(map(len, ROWS))
    ids = np.array([row + [0] * (longest - len(row)) for row in ROWS])
    return ids, np.array([[1] * len(row) + [0] * (longest - len(row)) for row in ROWS])


def tensor(name, values, in_binary=True):
    datatype = {"i": "INT64", "f": "FP32", "O": "BYTES"}[values.dtype.kind]
    result = triton.InferInput(name, list(values.shape), datatype)
    result.set_data_from_numpy(values, binary_data=in_binary)
    return result


def texts(values=WORDS, in_binary=True):
    return [tensor("text", np.array(values, object), in_binary)]


def tokens(in_binary=True, **more):
    ids, mask = batch()
    return [
        tensor(name, own, in_binary)
        for name, own in {"input_ids": ids, "attention_mask": mask, **more}.items()
    ]


def infer(client, model, inputs, *names, in_binary=True, **options):
    """Return the outputs `names`, by default all, as arrays."""
    expected = [triton.InferRequestedOutput(name, binary_data=in_binary) for name in names]
    actual = client.infer(model, inputs, outputs=expected or None, **options)
    return {
        each["name"]: actual.as_numpy(each["name"]) for each in actual.get_response()["outputs"]
    }


def run_torch(exported, name, **more):
    ids, mask = map(torch.from_numpy, batch())
    with torch.no_grad():
        return exported(name).model(input_ids=ids, attention_mask=mask, **more)


def post(server, model, body, **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        f"{server.url}/v2/models/{model}/infer", content=content, headers=headers, timeout=60
    )


# -------------------------------------------------------------------------------- server and models


def test_server_and_model_metadata(server, client):
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("encoder")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    assert not client.is_model_ready("another")
    assert client.is_model_ready("encoder", "1") and not client.is_model_ready("encoder", "2")
    text = {"name": "text", "datatype": "BYTES", "shape": [-1]}
    ids, mask = (
        {"name": name, "datatype": "INT64", "shape": [-1, -1]}
        for name in ("input_ids", "attention_mask")
    )
    result = client.get_model_metadata("encoder")
    assert result["name"] == "encoder" and result["inputs"] == [text, ids, mask]
    assert result["outputs"] == [
        {"name": "last_hidden_state", "datatype": "FP32", "shape": [-1, -1, WIDTH]},
        {"name": "embedding", "datatype": "FP32", "shape": [-1, -1]},
    ]
    assert result["versions"] == ["1"] and client.get_model_metadata("encoder", "1") == result
    assert client.get_model_metadata("pretraining")["inputs"] == [
        text,
        ids,
        mask,
        {**ids, "name": "token_type_ids"},
    ]
    logits = {"name": "logits", "datatype": "FP32", "shape": [-1, 3]}
    assert client.get_model_metadata("classification")["outputs"] == [logits]
    result = client.get_model_metadata("causal")
    assert (result["inputs"], result["outputs"]) == (
        [text, ids, mask],
        [{**text, "name": "generated_text"}],
    )


def test_loading_server_is_live_but_not_ready(server, client):
    server.server.service.lifecycle.loading = True
    try:
        assert (
            client.is_server_live()
            and not client.is_server_ready()
            and not client.is_model_ready("encoder")
        )
    finally:
        server.server.service.lifecycle.loading = False


def test_token_header_is_required_except_for_health(server, client):
    server.server.service.frame.token = b"secret"
    try:
        with raises(InferenceServerException, expected="Authorization"):
            infer(client, "encoder", tokens())
        assert infer(client, "encoder", tokens(), headers={"Authorization": "Bearer secret"})
        assert client.is_server_live() and client.is_server_ready()
    finally:
        server.server.service.frame.token = None


# ----------------------------------------------------------------------------------------- encoders


@pytest.mark.parametrize("sends, receives", BOTH_WAYS)
def test_token_inputs_match_torch_in_binary_and_json(server, client, exported, sends, receives):
    mask = batch()[1] == 1
    expected = run_torch(exported, "encoder").last_hidden_state.numpy()
    actual = infer(
        client, "encoder", tokens(sends), "last_hidden_state", "embedding", in_binary=receives
    )
    np.testing.assert_allclose(actual["last_hidden_state"][mask], expected[mask], atol=1e-5)
    means = [own[ones].mean(axis=0) for own, ones in zip(expected, mask)]
    np.testing.assert_allclose(actual["embedding"], means, atol=1e-5)
    actual = infer(client, "classification", tokens(sends), "logits", in_binary=receives)
    np.testing.assert_allclose(
        actual["logits"], run_torch(exported, "classification").logits, atol=1e-5
    )
    types = np.array([[0, 0, 1, 1, 1], [0, 1, 0, 0, 0], [1, 1, 0, 0, 0]])
    actual = infer(
        client,
        "pretraining",
        tokens(sends, token_type_ids=types),
        "seq_relationship_logits",
        in_binary=receives,
    )
    expected = run_torch(
        exported, "pretraining", token_type_ids=torch.from_numpy(types)
    ).seq_relationship_logits
    np.testing.assert_allclose(actual["seq_relationship_logits"], expected, atol=1e-5)


@pytest.mark.parametrize("sends, receives", BOTH_WAYS)
def test_text_inputs_match_torch_in_binary_and_json(server, client, exported, sends, receives):
    ones = batch()[1] == 1
    expected = run_torch(exported, "encoder").last_hidden_state.numpy()
    actual = infer(
        client,
        "encoder",
        texts(in_binary=sends),
        "last_hidden_state",
        "embedding",
        in_binary=receives,
    )
    assert actual["last_hidden_state"].shape == expected.shape
    np.testing.assert_allclose(
        actual["last_hidden_state"], np.where(ones[..., None], expected, 0), atol=1e-5
    )
    np.testing.assert_allclose(
        actual["embedding"], [own[row].mean(axis=0) for own, row in zip(expected, ones)], atol=1e-5
    )
    actual = infer(client, "classification", texts(in_binary=sends), in_binary=receives)
    np.testing.assert_allclose(
        actual["logits"], run_torch(exported, "classification").logits, atol=1e-5
    )


def test_models_have_only_version_1(server, client):
    expected = infer(client, "classification", texts())["logits"]
    np.testing.assert_array_equal(
        infer(client, "classification", texts(), model_version="1")["logits"], expected
    )
    assert (
        client.infer("classification", texts(), model_version="1").get_response()["model_version"]
        == "1"
    )
    with raises(InferenceServerException, seen=2, expected=1) as refused:
        infer(client, "classification", texts(), model_version="2")
    assert refused.value.status() == "404"
    with raises(InferenceServerException, seen="another"):
        client.get_model_metadata("another", "1")
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    [name, version] = paths["/v2/models/{name}/versions/{version}/infer"]["post"]["parameters"]
    assert (name["name"], version["name"]) == ("name", "version")


def test_data_may_be_nested_and_default_outputs_are_all(server, exported):
    ids, mask = (values.tolist() for values in batch())
    inputs = [
        {"name": name, "shape": [3, 5], "datatype": "INT64", "data": own}
        for name, own in (("input_ids", ids), ("attention_mask", mask))
    ]
    answer = post(server, "encoder", {"id": "42", "model_name": "encoder", "inputs": inputs}).json()
    assert (answer["id"], answer["model_name"]) == ("42", "encoder")
    states, embedding = answer["outputs"]
    expected = run_torch(exported, "encoder").last_hidden_state.numpy()
    assert (states["name"], states["shape"]) == ("last_hidden_state", [3, 5, WIDTH]) and len(
        states["data"]
    ) == expected.size
    actual = np.reshape(states["data"], expected.shape)
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-5)
    assert (embedding["name"], embedding["shape"]) == ("embedding", [3, WIDTH])
    [only] = post(server, "encoder", {"inputs": inputs, "outputs": [{"name": "embedding"}]}).json()[
        "outputs"
    ]
    assert only == embedding
    whole = [{**inputs[0], "data": ids[:1], "shape": [1, 5]}]  # the mask has a default
    [only] = post(server, "encoder", {"inputs": whole, "outputs": [{"name": "embedding"}]}).json()[
        "outputs"
    ]
    np.testing.assert_allclose(only["data"], embedding["data"][:WIDTH], atol=1e-5)


def test_long_text_returns_413_unless_truncated(server, client):
    longest = server.server.service.models.models["encoder"].encoder.max_length
    long = " ".join(f"w{30 + number % 15}" for number in range(longest + 1))
    with raises(InferenceServerException, seen=longest + 1, expected=longest) as refused:
        infer(client, "encoder", texts([long]))
    assert refused.value.status() == "413"
    cut = infer(client, "encoder", texts([long]), "embedding", parameters={"truncate": True})
    whole = infer(client, "encoder", texts([long.rpartition(" ")[0]]), "embedding")
    np.testing.assert_allclose(cut["embedding"], whole["embedding"], atol=1e-6)
    with raises(InferenceServerException, seen=longest + 1, expected=longest):
        infer(client, "encoder", [tensor("input_ids", np.ones((1, longest + 1), np.int64))])


@pytest.mark.slow
def test_image_and_multiple_choice_models_match_torch(tmp_path):
    vision = export_for_images(tmp_path / "vision", num_labels=3)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
    }
    choices = perturbed("VanillaEncoderForMultipleChoice", {**sizes, "vocab_size": VOCABULARY})
    choices.save_pretrained(tmp_path / "choices")
    export(tmp_path / "choices", tmp_path / "choices-export", cases=1)
    (tmp_path / "words").mkdir()
    reader = TextRuntime(with_words(tmp_path / "choices-export", tmp_path / "words"), threads=1)
    runtimes = {"vision": ImageRuntime(tmp_path / "vision/export", threads=1), "choices": reader}
    rng = np.random.default_rng(0)
    inputs = {
        "vision": {"pixel_values": rng.standard_normal((3, 3, 16, 16)).astype(np.float32)},
        "choices": {"input_ids": rng.integers(3, VOCABULARY, (2, 4, 5))},
    }
    with (
        serving(runtimes, max_batch=8) as server,
        triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client,
    ):
        for name, model in (("vision", vision), ("choices", choices)):
            with torch.no_grad():
                expected = model(
                    **{key: torch.from_numpy(values) for key, values in inputs[name].items()}
                ).logits
            assert "text" not in {
                each["name"] for each in client.get_model_metadata(name)["inputs"]
            }
            for in_binary in (True, False):
                given = [tensor(*each, in_binary) for each in inputs[name].items()]
                np.testing.assert_allclose(
                    infer(client, name, given)["logits"], expected, atol=1e-5
                )
        with raises(InferenceServerException, seen=("input_ids", 9), expected=8):
            infer(client, "choices", [tensor("input_ids", np.full((1, 9, 2), 5))])
        pixels = {
            "name": "pixel_values",
            "shape": [1, 3, 16, 16],
            "datatype": "FP32",
            "data": [1e39] * 768,
        }
        assert (
            "pixel_values must be finite numbers, got inf"
            in post(server, "vision", {"inputs": [pixels]}).json()["error"]
        )


# --------------------------------------------------------------------------------------- generation


def generate_with_transformers(server, exported, name, **options):
    """Return the texts that transformers generates, row by row."""
    tokenizer = Tokenizer.from_file(str(server.exports[name] / "tokenizer.json"))
    result = []
    for row in ROWS:
        ids = exported(name).model.generate(torch.tensor([row]), **options)[0].tolist()
        result.append(tokenizer.decode(ids[len(row) :] if name == "causal" else ids))
    return result


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_text_matches_transformers(server, client, exported, name):
    for options in (GREEDY, {**GREEDY, "max_new_tokens": 9, "num_beams": 3, "length_penalty": 0.5}):
        expected = generate_with_transformers(server, exported, name, **options)
        assert len(set(expected)) == len(expected)
        for inputs in (texts(), texts(in_binary=False), tokens(), tokens(in_binary=False)):
            for in_binary in (True, False):
                actual = infer(
                    client, name, inputs, "generated_text", in_binary=in_binary, parameters=options
                )
                actual = actual["generated_text"].tolist()
                assert [each.decode() if in_binary else each for each in actual] == expected


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
