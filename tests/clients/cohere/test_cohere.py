"""Tests of reranking with Cohere's client, versions 1 and 2 of its API, against
sentence-transformers."""

import json
import os
import subprocess
from pathlib import Path

import cohere
import pytest

HERE = Path(__file__).parent
PYTHON = os.environ["VANILLA_TRANSFORMER_PYTHON"]
SERVE = [PYTHON, "-m", "vanilla_transformer_export", "serve", "--port", "0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Yield the address of a server, and the query, the texts and the scores of the client."""
    out = tmp_path_factory.mktemp("made")
    subprocess.run([PYTHON, HERE / "make.py", out], check=True)
    process = subprocess.Popen([*SERVE, out / "reranker"], stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[-1]
        assert "ready\n" in iter(process.stdout.readline, "")
        yield url, *json.loads((out / "expected.json").read_text())
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("client_class", [cohere.Client, cohere.ClientV2])
def test_scores_equal_sentence_transformers(made, client_class):
    url, query, texts, scores = made
    client = client_class("none", base_url=url)
    results = client.rerank(model="reranker", query=query, documents=texts).results
    best = sorted(range(len(texts)), key=lambda index: -scores[index])
    assert [result.index for result in results] == best
    assert [result.relevance_score for result in results] == pytest.approx(
        [scores[index] for index in best], abs=1e-5
    )
    [first] = client.rerank(model="reranker", query=query, documents=texts, top_n=1).results
    assert first.index == best[0]


def test_documents_are_returned(made):
    url, query, texts, _ = made
    client = cohere.Client("none", base_url=url)
    documents = [texts[0], {"text": texts[1], "title": "birds"}]
    answer = client.rerank(
        model="reranker", query=query, documents=documents, return_documents=True
    )
    texts_by_index = {result.index: result.document.text for result in answer.results}
    assert texts_by_index == dict(enumerate(texts[:2]))
    assert answer.meta.tokens.input_tokens > 0


def test_errors_name_value_and_expectation(made):
    client = cohere.Client("none", base_url=made[0])
    with pytest.raises(cohere.BadRequestError) as caught:
        client.rerank(model="reranker", query="a", documents=[])
    assert "at least one text" in caught.value.body["message"]
    with pytest.raises(cohere.NotFoundError):
        client.rerank(model="that", query="a", documents=["b"])
