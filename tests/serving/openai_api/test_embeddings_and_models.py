"""Tests of OpenAI's endpoints for embeddings and models."""

import base64
import time

import numpy as np
import openai
import pytest
from messages import check_message, raises
from openai_server import post

# --------------------------------------------------------------------------------------- embeddings


def test_embeddings_match_runtime(client, encoder):
    texts = ["ab cd", "é日 ab.", "g"]
    expected = encoder.embed(texts)
    ids = [encoding.ids for encoding in encoder.encode(texts, special_tokens=True)]
    for model_input, count in ((texts[0], 1), (texts, 3), (ids[0], 1), (ids, 3)):
        for more in (dict(), dict(encoding_format="float"), dict(encoding_format="base64")):
            actual = client.embeddings.create(model="encoder", input=model_input, **more)
            vectors = [item.embedding for item in actual.data]
            if more.get("encoding_format") == "base64":
                vectors = [
                    np.frombuffer(base64.b64decode(vector), "<f4").tolist() for vector in vectors
                ]
            assert np.array(vectors, np.float32).tolist() == expected[:count].tolist()
            assert [item.index for item in actual.data] == list(
                range(count)
            ) and actual.object == "list"
            assert (
                actual.usage.prompt_tokens
                == actual.usage.total_tokens
                == sum(map(len, ids[:count]))
            )


@pytest.mark.parametrize(
    "body, seen, expected",
    [
        (dict(), (), ()),
        (dict(input=None), None, ()),
        (dict(input=""), (0, 1, "''"), ()),
        (dict(input=["a", ""]), (1, 2, "''"), ()),
        (dict(input=[48]), 48, ()),
        (dict(input=["a"] * 7), 7, 6),
        (dict(input="a", dimensions=0), ("dimensions", 0), 1),
        (dict(input="a", dimensions=1000), ("dimensions", 1000), ()),
        (dict(input="a", encoding_format="int8"), ("encoding_format", "int8"), ("float", "base64")),
        (dict(input="a", model="decoder"), ("decoder", "VanillaDecoderForCausalLM"), ()),
        (dict(input="a", truncate=True), ("truncate", True), ()),
    ],
    ids=str,
)
def test_invalid_embedding_request_returns_400(url, body, seen, expected):
    actual = post(url, "/v1/embeddings", **body)
    assert actual.status_code == 400
    check_message(actual.json()["error"]["message"], seen=seen, expected=expected)


# ------------------------------------------------------------------------------------------- models


def test_models_are_listed_and_retrieved(client, url, decoder):
    assert [model.id for model in client.models.list()] == ["decoder", "encoder"]
    result = client.models.retrieve("decoder")
    assert (result.id, result.object, result.owned_by) == (
        "decoder",
        "model",
        "vanilla-transformer",
    )
    assert abs(result.created - time.time()) < 86400
    with raises(openai.NotFoundError, seen="x"):
        client.models.retrieve("x")


def test_model_in_path_takes_precedence_over_body(url, decoder):
    with openai.OpenAI(
        base_url=f"{url}/models/decoder/v1", api_key="none", max_retries=0
    ) as client:
        assert [model.id for model in client.models.list()] == ["decoder"]
        result = client.completions.create(
            model="encoder", prompt="ab", temperature=0, max_tokens=4
        )
        assert (result.model, result.choices[0].text) == (
            "decoder",
            decoder.generate(["ab"], max_new_tokens=4)[0],
        )
    assert post(url, "/models/encoder/v1/completions", prompt="ab").status_code == 400
    assert post(url, "/models/x/v1/completions", prompt="ab").status_code == 404
