"""Tests of text-embeddings-inference's endpoints, against sentence-transformers and pipelines."""

import httpx
import huggingface_hub
import numpy as np
import openai
import pytest
from command_line import read_json
from embedding_client import LONG, check_rejected, post
from heads import TEXTS, save_head, word_pieces
from huggingface_hub import InferenceClient
from messages import check_message, raises
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from served_models import serving
from transformers import pipeline

from vanilla_transformer_export import TextRuntime, export

PROMPTS = {"query": "the book : "}


@pytest.fixture(autouse=True)
def allow_requests(monkeypatch):
    """The client sends no requests with HF_HUB_OFFLINE, not even to this machine."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The model of sentence-transformers, and its export."""
    root = tmp_path_factory.mktemp("embedder")
    plain = save_head("VanillaEncoderModel", word_pieces(), root / "plain", type_vocab_size=2)
    modules = [Transformer(plain, max_seq_length=40), Pooling(32, pooling_mode="mean"), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS)
    model.save(str(root / "model"))
    export(root / "model", root / "export", cases=1)
    return model, root / "export"


@pytest.fixture(scope="module")
def embedder(saved):
    """The model of sentence-transformers, and a server of its export."""
    model, directory = saved
    with serving({"it": TextRuntime(directory, threads=1)}) as server:
        yield model, server.url


@pytest.fixture(scope="module")
def rejecting(saved):
    """The url of a server with `--auto-truncate false`."""
    runtimes = {"it": TextRuntime(saved[1], threads=1)}
    with serving(runtimes, auto_truncate=False) as server:
        yield server.url


def test_embeddings_match_sentence_transformers(embedder):
    model, url = embedder
    expected = model.encode(TEXTS)
    np.testing.assert_allclose(post(url, "/embed", inputs=TEXTS).json(), expected, atol=1e-5)
    np.testing.assert_allclose(post(url, "/embed", inputs=TEXTS[0]).json(), expected[:1], atol=1e-5)
    raw = np.array(post(url, "/embed", inputs=TEXTS, normalize=False).json())
    np.testing.assert_allclose(
        raw / np.linalg.norm(raw, axis=1, keepdims=True), expected, atol=1e-5
    )
    assert abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.01
    queries = model.encode(TEXTS, prompt_name="query")
    np.testing.assert_allclose(
        post(url, "/embed", inputs=TEXTS, prompt_name="query").json(), queries, atol=1e-5
    )
    cut = raw[:, :5] / np.linalg.norm(raw[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(
        post(url, "/embed", inputs=TEXTS, dimensions=5).json(), cut, atol=1e-5
    )
    ids = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    np.testing.assert_allclose(post(url, "/embed", inputs=ids).json(), expected, atol=1e-5)
    np.testing.assert_allclose(post(url, "/embed", inputs=ids[0]).json(), expected[:1], atol=1e-5)
    np.testing.assert_allclose(
        post(url, "/embed", inputs=[TEXTS[0], ids[1]]).json(), expected[:2], atol=1e-5
    )
    client = InferenceClient(model=f"{url}/embed")
    np.testing.assert_allclose(
        client.feature_extraction(TEXTS, normalize=True), expected, atol=1e-5
    )


def test_token_ids_with_a_prompt_are_embedded_as_their_text(embedder):
    model, url = embedder
    ids = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    texts = model.tokenizer.batch_decode(ids, skip_special_tokens=True)
    expected = model.encode(texts, prompt_name="query")
    actual = post(url, "/embed", inputs=ids, prompt_name="query").json()
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert abs(expected - model.encode(texts)).max() > 1e-3


def test_blank_texts_are_embedded_by_every_route(embedder):
    """text-embeddings-inference rejects "" only, so a blank chunk of a document fails no batch."""
    model, url = embedder
    texts = [TEXTS[0], " ", "\n", TEXTS[1]]
    expected = model.encode(texts)
    for path in ("/embed", "/"):
        np.testing.assert_allclose(post(url, path, inputs=texts).json(), expected, atol=1e-5)
    for blank in (texts, " "):
        actual = post(url, "/v1/embeddings", input=blank).json()["data"]
        np.testing.assert_allclose(
            [each["embedding"] for each in actual], model.encode(np.atleast_1d(blank)), atol=1e-5
        )
    assert list(map(len, post(url, "/embed_all", inputs=texts).json())) == [
        len(row) for row in model.tokenizer(texts).input_ids
    ]
    inputs = {"source_sentence": " ", "sentences": texts}
    actual = post(url, "/similarity", inputs=inputs).json()
    np.testing.assert_allclose(actual, model.similarity(expected[1], expected)[0], atol=1e-4)
    tensor = {"name": "text", "shape": [4], "datatype": "BYTES", "data": texts}
    body = {"inputs": [tensor], "outputs": [{"name": "embedding"}]}
    actual = post(url, "/v2/models/it/infer", **body).json()["outputs"][0]["data"]
    np.testing.assert_allclose(np.reshape(actual, expected.shape), expected, atol=1e-5)
    assert [post(url, path, **body).status_code for path, body in EMPTY.items()] == [422, 422, 400]


EMPTY = {
    "/embed": {"inputs": ["a", ""]},
    "/embed_all": {"inputs": ""},
    "/v1/embeddings": {"input": ["a", ""]},
}


def test_openai_dimensions_match_sentence_transformers(embedder):
    """Embeddings are truncated and normalized, as for matryoshka models, up to the full width."""
    model, url = embedder
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for dimensions in (1, 5, 32):
        expected = model.encode(TEXTS, truncate_dim=dimensions, normalize_embeddings=True)
        for options in ({"encoding_format": "float"}, {}):  # the client decodes base64 by itself
            actual = client.embeddings.create(
                model="it", input=TEXTS, dimensions=dimensions, **options
            )
            np.testing.assert_allclose(
                [each.embedding for each in actual.data], expected, atol=1e-5
            )
    with raises(openai.BadRequestError, seen=("dimensions", 33), expected=32):
        client.embeddings.create(model="it", input=TEXTS, dimensions=33)


def test_root_embeds_for_huggingface_hub_client(embedder):
    """The client posts to the URL of the server or of one of its models."""
    model, url = embedder
    for root in (url, f"{url}/", f"{url}/models/it", f"{url}/models/it/"):
        np.testing.assert_allclose(
            InferenceClient(model=root).feature_extraction(TEXTS), model.encode(TEXTS), atol=1e-5
        )
    result = InferenceClient(model=url).feature_extraction(
        TEXTS[0], prompt_name="query", normalize=True, truncate=True
    )
    np.testing.assert_allclose(result, model.encode([TEXTS[0]], prompt_name="query"), atol=1e-5)
    check_rejected(
        post(url, "/", inputs=TEXTS, query="a"),
        422,
        "Validation",
        seen=("query", "a"),
    )
    check_rejected(post(url, "/", inputs=TEXTS, model="that"), 422, "Validation", seen="that")
    check_rejected(post(url, "/models/that", inputs=TEXTS), 404, "Validation", seen="that")


LONG_SENTENCES = {"source_sentence": LONG, "sentences": ["a"]}


def test_long_texts_are_truncated_by_default(embedder):
    model, url = embedder
    expected = model.encode([LONG])
    for truncate in ({}, {"truncate": None}, {"truncate": True}):
        actual = post(url, "/embed", inputs=LONG, **truncate).json()
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    actual = post(url, "/v1/embeddings", input=LONG).json()["data"][0]["embedding"]
    np.testing.assert_allclose([actual], expected, atol=1e-5)
    assert len(post(url, "/embed_all", inputs=LONG).json()[0]) == 40
    actual = post(url, "/similarity", inputs=LONG_SENTENCES).json()
    reference = model.similarity(expected, model.encode(["a"]))[0]
    np.testing.assert_allclose(actual, reference, atol=1e-4)
    model.tokenizer.truncation_side = "left"
    try:
        expected = model.encode([LONG])
    finally:
        model.tokenizer.truncation_side = "right"
    actual = post(url, "/embed", inputs=LONG, truncation_direction="left").json()
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert post(url, "/embed", inputs="a b" * 10_000).status_code == 200


def test_long_token_ids_are_truncated_by_default(embedder):
    url = embedder[1]
    ids = [5] * 39 + [6, 7] * 100
    expected = post(url, "/embed", inputs=ids[:40]).json()
    assert post(url, "/embed", inputs=ids).json() == expected
    actual = post(url, "/embed", inputs=ids, truncation_direction="left").json()
    assert actual == post(url, "/embed", inputs=ids[-40:]).json() != expected
    results = [post(url, "/v1/embeddings", input=row).json() for row in (ids, ids[:40])]
    assert results[0] == results[1] and results[0]["usage"]["prompt_tokens"] == 40


@pytest.mark.parametrize(
    "path, body",
    [
        ("/embed", {"inputs": ["a", LONG]}),
        ("/embed_all", {"inputs": LONG}),
        ("/similarity", {"inputs": LONG_SENTENCES}),
    ],
)
def test_long_texts_return_413_without_truncation(embedder, rejecting, path, body):
    for url, truncate in ((rejecting, {}), (rejecting, {"truncate": None}), (embedder[1], None)):
        options = {"truncate": False} if truncate is None else truncate
        arguments = {"parameters": options} if path == "/similarity" else options
        answer = post(url, path, **body, **arguments)
        check_rejected(answer, 413, "Validation", seen=92, expected=40)
    arguments = {"parameters": {"truncate": True}} if path == "/similarity" else {"truncate": True}
    assert post(rejecting, path, **body, **arguments).status_code == 200


def test_long_ids_and_openai_inputs_are_rejected_without_truncation(rejecting):
    check_rejected(
        post(rejecting, "/embed", inputs=[5] * 41), 413, "Validation", seen=41, expected=40
    )
    answer = post(rejecting, "/embed", inputs="a" * 10_001)
    check_rejected(answer, 413, "Validation", seen=10001, expected=10000)
    for value, size in (([5] * 41, 41), (LONG, 92), (["a", LONG], 92)):
        answer = post(rejecting, "/v1/embeddings", input=value)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        check_message(answer.json()["error"]["message"], seen=size, expected=40)


def test_token_embeddings_and_similarities_match_sentence_transformers(embedder):
    model, url = embedder
    states = post(url, "/embed_all", inputs=TEXTS[:2]).json()
    reference = model.encode(TEXTS[:2], output_value="token_embeddings")
    for own, expected in zip(states, reference, strict=True):
        np.testing.assert_allclose(own, expected.numpy(), rtol=1e-4, atol=1e-4)
    vectors = model.encode(TEXTS)
    reference = model.similarity(vectors[:1], vectors[1:])[0]
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    np.testing.assert_allclose(post(url, "/similarity", inputs=inputs).json(), reference, atol=1e-4)
    actual = InferenceClient(model=f"{url}/predict/sentence-similarity").sentence_similarity(
        TEXTS[0], TEXTS[1:]
    )
    np.testing.assert_allclose(actual, reference, atol=1e-4)
    np.testing.assert_allclose(
        InferenceClient(model=f"{url}/similarity").sentence_similarity(TEXTS[0], TEXTS[1:]),
        reference,
        atol=1e-4,
    )


def test_feature_extraction_matches_pipeline(embedder):
    model, url = embedder
    pipe = pipeline("feature-extraction", model=model[0].auto_model, tokenizer=model.tokenizer)
    client = InferenceClient(model=f"{url}/predict/feature-extraction")
    np.testing.assert_allclose(
        client.feature_extraction(TEXTS[0]), pipe(TEXTS[0]), rtol=1e-4, atol=1e-4
    )


def test_tokenize_and_decode_match_tokenizer(embedder):
    model, url = embedder
    text = "the old man é sees"
    encoding = model.tokenizer(text, return_offsets_mapping=True)
    result = post(url, "/tokenize", inputs=text).json()[0]
    assert [token["id"] for token in result] == encoding["input_ids"]
    assert [token["special"] for token in result] == [True, *[False] * (len(result) - 2), True]
    assert result[0]["start"] is None and result[0]["text"] == "[CLS]"
    content = text.encode()
    places = [
        (len(text[:start].encode()), len(text[:end].encode()))
        for start, end in encoding["offset_mapping"][1:-1]
    ]
    assert [(token["start"], token["stop"]) for token in result[1:-1]] == places
    assert [token["text"] for token in result[1:-1]] == [
        content[start:end].decode() for start, end in places
    ]
    bare = post(url, "/tokenize", inputs=[text, "a"], add_special_tokens=False).json()
    assert [[token["id"] for token in each] for each in bare] == model.tokenizer(
        [text, "a"], add_special_tokens=False
    )["input_ids"]
    ids = encoding["input_ids"]
    assert post(url, "/decode", ids=ids).json() == [
        model.tokenizer.decode(ids, skip_special_tokens=True)
    ]
    result = post(url, "/decode", ids=[ids, ids[:3]], skip_special_tokens=False).json()
    assert result == [model.tokenizer.decode(ids), model.tokenizer.decode(ids[:3])]


def test_info_reports_model_and_limits(embedder, rejecting):
    _, url = embedder
    result = httpx.get(f"{url}/info").json()
    assert (
        result["model_id"] == "it"
        and result["max_input_length"] == 40
        and result["max_client_batch_size"] == 128
        and result["auto_truncate"] is True
    )
    assert (
        result["cpu_quota"] == read_json("doctor", "--json")["cpu_quota"] and result["threads"] >= 1
    )
    assert httpx.get(f"{rejecting}/info").json()["auto_truncate"] is False
    assert (
        result["model_type"] == {"embedding": {"pooling": "mean"}}
        and result["model_dtype"] == "float32"
    )


WRONG = [
    ("/embed", {}, 422, "Validation", dict(seen="inputs")),
    ("/embed", {"inputs": []}, 400, "Empty", dict(seen="inputs")),
    ("/embed", {"inputs": ""}, 422, "Validation", dict(seen=(0, 1, "''"))),
    ("/embed", {"inputs": 5}, 422, "Validation", dict(seen=5)),
    ("/embed", {"inputs": [["a"]]}, 422, "Validation", dict()),
    ("/embed", {"inputs": [10**9]}, 422, "Validation", dict(seen=1000000000)),
    (
        "/embed",
        {"inputs": "a", "normalize": "yes"},
        422,
        "Validation",
        dict(seen=("normalize", "yes")),
    ),
    ("/embed", {"inputs": "a", "normalise": True}, 422, "Validation", dict(seen="normalise")),
    ("/embed", {"inputs": "a", "prompt_name": "qery"}, 422, "Validation", dict(expected="query")),
    (
        "/embed",
        {"inputs": "a", "dimensions": 33},
        422,
        "Validation",
        dict(seen=("dimensions", 33), expected=32),
    ),
    (
        "/embed",
        {"inputs": "a", "truncation_direction": "up"},
        422,
        "Validation",
        dict(seen=("truncation_direction", "up")),
    ),
    ("/embed", {"inputs": ["a"] * 129}, 413, "Validation", dict(seen=129, expected=128)),
    ("/embed", {"inputs": "a", "model": "other"}, 422, "Validation", dict(seen="other")),
    ("/predict", {"inputs": "a"}, 424, "Backend", dict()),
    ("/rerank", {"query": "a", "texts": ["b"]}, 424, "Backend", dict()),
    (
        "/similarity",
        {"inputs": {"source_sentence": "a", "sentences": []}},
        400,
        "Empty",
        dict(seen="sentences"),
    ),
    ("/tokenize", {"inputs": [5]}, 422, "Validation", dict()),
    (
        "/tokenize",
        {"inputs": ["a" * 125_000, "b" * 125_001]},
        413,
        "Validation",
        dict(seen=250001, expected=250000),
    ),
    ("/decode", {"ids": ["a"]}, 422, "Validation", dict(expected="ids")),
    ("/decode", {"ids": [-1]}, 422, "Validation", dict(seen=-1)),
]


@pytest.mark.parametrize(
    "path, body, status, kind, values", WRONG, ids=lambda value: str(value)[:40]
)
def test_invalid_request_returns_error_type_and_names_value(
    embedder, path, body, status, kind, values
):
    check_rejected(post(embedder[1], path, **body), status, kind, **values)


def test_end_of_a_text_of_many_characters_is_embedded_if_its_beginning_is_cut(embedder):
    """Texts of more characters than their tokens can have are cut before they are tokenized."""
    url = embedder[1]
    end = post(url, "/embed", inputs=LONG, truncation_direction="left").json()
    text = "c " * 50_000 + LONG
    actual = post(url, "/embed", inputs=text, truncation_direction="left").json()
    np.testing.assert_allclose(actual, end, atol=1e-5)
