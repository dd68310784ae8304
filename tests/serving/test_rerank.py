"""Tests of /v1/rerank: the requests and responses of Cohere's and Jina's documentation, and the
scores of sentence-transformers."""

import contextlib
from pathlib import Path

import httpx
import numpy as np
import pytest
from heads import MANY, save_family, save_head, word_pieces
from messages import check_message
from sentence_transformers import CrossEncoder
from served import served_exports
from served_models import serving

from vanilla_transformer_export import TextRuntime, export

QUERY = "the old man"
FAMILIES = ("bert", "xlm-roberta", "modernbert")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """A function that returns the checkpoint of a family with one label, and its server's url."""
    with contextlib.ExitStack() as stack:
        saved = {}

        def make(family, **settings):
            if (family, *settings) not in saved:
                folder = tmp_path_factory.mktemp("reranker")
                labels = {"id2label": {0: "score"}, "label2id": {"score": 0}}
                save_family(family, "ForSequenceClassification", folder / "source", **labels)
                export(folder / "source", folder / "export", cases=1)
                runtimes = {"it": TextRuntime(folder / "export", threads=1)}
                server = stack.enter_context(serving(runtimes, **settings))
                saved[(family, *settings)] = str(folder / "source"), server.url
            return saved[(family, *settings)]

        yield make


def post(url, path="/v1/rerank", **body):
    return httpx.post(url + path, json=body, timeout=60)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_cross_encoder(reranker, family):
    checkpoint, url = reranker(family)
    documents = [MANY[0], {"text": MANY[1], "title": "dogs"}, *MANY[2:]]
    expected = CrossEncoder(checkpoint, device="cpu").rank(QUERY, MANY)
    answer = post(url, model="it", query=QUERY, documents=documents, return_documents=True).json()
    results = answer["results"]
    assert [result["index"] for result in results] == [rank["corpus_id"] for rank in expected]
    scores = [rank["score"] for rank in expected]
    assert max(scores) - min(scores) > 1e-3
    np.testing.assert_allclose(
        [result["relevance_score"] for result in results], scores, rtol=0, atol=1e-5
    )
    wrapped = [item if isinstance(item, dict) else {"text": item} for item in documents]
    assert [result["document"] for result in results] == [
        wrapped[result["index"]] for result in results
    ]
    best = post(url, "/models/it/v2/rerank", query=QUERY, documents=MANY, top_n=2).json()
    assert best["results"] == [
        {name: result[name] for name in ("index", "relevance_score")} for result in results[:2]
    ]
    assert (
        post(url, query=QUERY, documents=MANY, top_n=99).json()["results"][1:2]
        == (best["results"][1:])
    )


def test_model_that_is_not_loaded_is_loaded(reranker):
    checkpoint, url = reranker("bert")
    body = {"query": QUERY, "documents": MANY}
    export = f"it={Path(checkpoint).with_name('export')}"
    with served_exports(export, threads=1, lazy=True) as server:
        answer = post(server.url, **body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["results"] == post(url, **body).json()["results"]


def test_usage_has_the_tokens_that_the_model_reads(reranker):
    checkpoint, url = reranker("bert")
    tokenizer = CrossEncoder(checkpoint, device="cpu").tokenizer
    count = sum(map(len, tokenizer([QUERY] * len(MANY), MANY).input_ids))
    answer = post(url, query=QUERY, documents=MANY, top_n=1, return_documents=None).json()
    assert answer["model"] == "it" and len(answer["results"]) == 1
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert answer["meta"] == {"tokens": {"input_tokens": count}}


def test_documents_are_cut_after_max_tokens_per_doc(reranker):
    checkpoint, url = reranker("bert")
    document = "The old MAN, and a woman"
    answer = post(url, query=QUERY, documents=[document], max_tokens_per_doc=4).json()
    [expected] = CrossEncoder(checkpoint, device="cpu").predict([(QUERY, "The old MAN,")])
    assert abs(answer["results"][0]["relevance_score"] - expected) < 1e-5
    whole = post(url, query=QUERY, documents=[document], max_tokens_per_doc=99).json()
    assert whole["usage"]["total_tokens"] > answer["usage"]["total_tokens"]


def test_long_documents_are_cut_or_rejected(reranker):
    long = "the river " * 200
    checkpoint, url = reranker("bert")
    [expected] = CrossEncoder(checkpoint, device="cpu", max_length=200).predict([(QUERY, long)])
    [result] = post(url, query=QUERY, documents=[long]).json()["results"]
    assert abs(result["relevance_score"] - expected) < 1e-5
    answer = post(reranker("bert", auto_truncate=False)[1], query=QUERY, documents=[long])
    assert answer.status_code == 413
    check_message(answer.json()["message"], seen="tokens", expected=200)


@pytest.mark.parametrize(
    "body, status, seen, expected",
    [
        ({"query": QUERY, "documents": []}, 400, "documents", "at least one"),
        ({"query": QUERY, "documents": ["a", 3]}, 400, ("documents", 3), "text"),
        ({"query": QUERY, "documents": [{"title": "a"}]}, 400, "title", "text"),
        ({"query": QUERY, "documents": [{"text": None}]}, 400, "None", "text"),
        ({"query": QUERY, "documents": "a"}, 400, "documents", "list"),
        ({"query": QUERY, "documents": ["a"], "top_n": 0}, 400, ("top_n", 0), 1),
        ({"query": QUERY, "documents": ["a"], "max_tokens_per_doc": 0}, 400, 0, 1),
        ({"query": QUERY, "documents": ["a"], "rank_fields": ["x"]}, 400, "rank_fields", ()),
        ({"documents": ["a"]}, 400, "query", ()),
        ({"query": QUERY, "documents": ["a"], "model": "that"}, 404, "that", "it"),
    ],
)
def test_wrong_requests_are_rejected(reranker, body, status, seen, expected):
    answer = post(reranker("bert")[1], **body)
    assert answer.status_code == status, answer.text
    assert answer.json()["detail"] == answer.json()["message"]
    check_message(answer.json()["message"], seen=seen, expected=expected)


def test_models_with_several_labels_do_not_rank(tmp_path):
    save_head("VanillaEncoderForSequenceClassification", word_pieces(), tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "export", cases=1)
    with serving({"it": TextRuntime(tmp_path / "export", threads=1)}) as server:
        answer = post(server.url, query="a", documents=["b"])
    assert answer.status_code == 400
    check_message(answer.json()["message"], seen="it", expected="one label")
