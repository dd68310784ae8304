"""Tests of classifiers and rerankers behind the protocol of text-embeddings-inference."""

import contextlib
import functools

import httpx
import numpy as np
import pytest
from embedding_client import LONG, check_rejected, post
from heads import MANY, PAIRS, TEXTS, close, head_exports
from served_models import serving
from transformers import AutoTokenizer, pipeline

from vanilla_transformer_export import TextRuntime


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A function that returns the checkpoint of a head of `HEADS`, and the url of its server."""
    made = head_exports(tmp_path_factory.mktemp)
    with contextlib.ExitStack() as stack:

        @functools.cache
        def serve(name):
            checkpoint, directory = made(name)
            runtime = TextRuntime(directory, threads=1)
            return checkpoint, stack.enter_context(serving({name.split()[0]: runtime})).url

        yield serve


def test_blank_texts_are_classified(head):
    checkpoint, url = head("classify")
    pipe = pipeline("text-classification", model=checkpoint)
    expected = [pipe(each, top_k=None) for each in (" ", {"text": "a", "text_pair": " "})]
    actual = post(url, "/predict", inputs=[[" "], ["a", " "]]).json()
    close(
        [[{"label": each["label"], "score": each["score"]} for each in row] for row in actual],
        expected,
        absolute=1e-4,
    )
    assert len(post(url, "/predict/text-classification", inputs=["a", " "]).json()) == 2
    check_rejected(
        post(url, "/predict", inputs=""),
        422,
        "Validation",
        seen="''",
    )


@pytest.mark.parametrize(
    "name, path, body",
    [
        ("classify", "/predict", {"inputs": TEXTS[0]}),
        ("one label", "/rerank", {"query": TEXTS[0], "texts": TEXTS}),
    ],
)
def test_root_matches_endpoint_of_model_task(head, name, path, body):
    url = head(name)[1]
    actual, expected = post(url, "/", **body), post(url, path, **body)
    assert actual.status_code == 200 and actual.json() == expected.json()


def test_root_of_unsupported_model_returns_424_and_names_model(head):
    answer = post(head("fill_mask")[1], "/", inputs="a")
    check_rejected(answer, 424, "Backend", seen=("embed", "fill_mask"))


@pytest.mark.parametrize(
    "name, path, body",
    [
        ("classify", "/predict", {"inputs": LONG * 12}),
        ("classify", "/predict", {"inputs": [["a", LONG * 12]]}),
        ("one label", "/rerank", {"query": "the man", "texts": ["a", LONG * 12]}),
    ],
)
def test_long_texts_to_classify_are_truncated_by_default(head, name, path, body):
    url = head(name)[1]
    limit = httpx.get(f"{url}/info").json()["max_input_length"]
    answer = post(url, path, **body)
    assert answer.status_code == 200
    assert answer.json() == post(url, path, **body, truncate=True).json()
    check_rejected(post(url, path, **body, truncate=False), 413, "Validation", expected=limit)


def test_characters_of_both_texts_of_a_pair_count(head):
    """They are counted before the pair is tokenized."""
    url = head("one label")[1]
    limit = httpx.get(f"{url}/info").json()["max_input_length"] * 250
    half = "a" * (limit // 2 + 1)  # a word of one token
    answer = post(url, "/rerank", query=half, texts=[half], truncate=False)
    check_rejected(answer, 413, "Validation", seen=2 * len(half), expected=limit)
    assert post(url, "/rerank", query="a", texts=[half], truncate=False).status_code == 200
    assert post(url, "/rerank", query=half, texts=[half]).status_code == 200


@pytest.mark.slow
def test_predict_matches_text_classification_pipeline(head):
    checkpoint, url = head("classify")
    pipe = pipeline("text-classification", model=checkpoint)

    def label_scores(rows):
        return [[{"label": each["label"], "score": each["score"]} for each in own] for own in rows]

    close(
        label_scores([post(url, "/predict", inputs=MANY[0]).json()]),
        [pipe(MANY[0], top_k=None)],
        absolute=1e-4,
    )
    dicts = [{"text": text, "text_pair": pair} for text, pair in PAIRS]
    expected = pipe(dicts, top_k=None)
    close(
        label_scores(post(url, "/predict", inputs=[list(pair) for pair in PAIRS]).json()),
        expected,
        absolute=1e-4,
    )
    close(
        label_scores([post(url, "/predict", inputs=list(PAIRS[0])).json()]),
        expected[:1],
        absolute=1e-4,
    )
    mixed = post(url, "/predict", inputs=[[MANY[0]], list(PAIRS[0])], raw_scores=True).json()
    expected = [pipe(each, top_k=None, function_to_apply="none") for each in (MANY[0], dicts[0])]
    close(label_scores(mixed), expected, absolute=1e-3)
    check_rejected(
        post(url, "/predict", inputs=[["a", "b", "c"]]),
        422,
        "Validation",
    )
    check_rejected(post(url, "/rerank", query="a", texts=["b"]), 424, "Backend")
    check_rejected(post(url, "/embed", inputs="a"), 424, "Backend")
    assert (
        httpx.get(f"{url}/info").json()["model_type"]["classifier"]["id2label"]["2"] == "entailment"
    )


@pytest.mark.slow
def test_rerank_matches_pipeline(head):
    checkpoint, url = head("one label")
    pipe = pipeline("text-classification", model=checkpoint)
    pairs = [{"text": "the man", "text_pair": text} for text in MANY]
    for raw in (False, True):
        scores = [
            each["score"] for each in pipe(pairs, function_to_apply="none" if raw else "sigmoid")
        ]
        result = post(
            url, "/rerank", query="the man", texts=MANY, raw_scores=raw, return_text=raw
        ).json()
        assert [each["index"] for each in result] == sorted(
            range(len(MANY)), key=lambda place: -scores[place]
        )
        np.testing.assert_allclose(
            [each["score"] for each in result], sorted(scores, reverse=True), rtol=1e-4, atol=1e-4
        )
        assert [each.get("text") for each in result] == [
            MANY[each["index"]] if raw else None for each in result
        ]
    check_rejected(post(url, "/rerank", query="a", texts=[]), 400, "Empty", seen="texts")
    assert AutoTokenizer.from_pretrained(checkpoint)("a", "b")["token_type_ids"][-1] == 1
