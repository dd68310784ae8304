"""Tests of the Open Inference Protocol with Triton's client, against the checkpoints in torch."""

import itertools

import httpx
import numpy as np
import pytest
import torch
import tritonclient.http as triton
from checkpoints import VOCABULARY, WIDTH, perturbed
from heads import export_for_images
from messages import raises
from open_inference_client import GENERATORS, ROWS, batch, infer, post, tensor, texts, tokens
from served_models import serving
from serving_load import with_words
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

from vanilla_transformer_export import ImageRuntime, TextRuntime, export

BOTH_WAYS = list(itertools.product((True, False), repeat=2))
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 4, "no_repeat_ngram_size": 1, "num_beams": 1}


def run_torch(exported, name, **more):
    ids, mask = map(torch.from_numpy, batch())
    with torch.no_grad():
        return exported(name).model(input_ids=ids, attention_mask=mask, **more)


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
