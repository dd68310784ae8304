"""Tests of libraries over sentence-transformers: `backend="onnx"` gives the results of torch."""

import sys

import numpy as np
import pytest
from bertopic import BERTopic
from keybert import KeyBERT
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from setfit import SetFitModel
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from txtai import Embeddings

from vanilla_transformer_export import export
from vanilla_transformer_export.ort_models import stand_in_for_optimum

TEXTS = ["the old man sees a red house", "two dogs run", "a woman reads the book", "the dog runs"]


@pytest.fixture(scope="module")
def paths(saved, folder):
    """Yield the paths of a sentence-transformers checkpoint and its export."""
    states = saved("VanillaEncoderModel")
    modules = [Transformer(states.checkpoint), Pooling(32, pooling_mode="mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "pooled"))
    export(folder / "pooled", folder / "pooled-export", cases=1)
    stand_in_for_optimum()
    yield str(folder / "pooled"), str(folder / "pooled-export")
    del sys.modules["optimum.onnxruntime"], sys.modules["optimum"]


@pytest.fixture(scope="module")
def models(paths):
    """Return the model in torch and the model of the export."""
    checkpoint, directory = paths
    return (
        SentenceTransformer(checkpoint, device="cpu"),
        SentenceTransformer(directory, device="cpu", backend="onnx"),
    )


def test_keybert_extracts_the_same_keywords(models):
    expected, actual = (KeyBERT(model=model).extract_keywords(TEXTS[0]) for model in models)
    assert [word for word, _ in actual] == [word for word, _ in expected]
    np.testing.assert_allclose(
        [score for _, score in actual], [score for _, score in expected], atol=1e-4
    )


def test_bertopic_finds_the_same_topics(models):
    expected, actual = (
        BERTopic(
            embedding_model=model,
            umap_model=PCA(n_components=2),
            hdbscan_model=KMeans(2, random_state=0),
        ).fit_transform(TEXTS * 3)[0]
        for model in models
    )
    assert actual == expected and {*actual} == {0, 1}


def test_setfit_predicts_the_same_probabilities(models):
    predictions = []
    for model in models:
        classifier = SetFitModel(model_body=model, model_head=LogisticRegression())
        classifier.fit(TEXTS, [0, 1, 0, 1], num_epochs=1)
        predictions.append(classifier.predict_proba(TEXTS, as_numpy=True))
    np.testing.assert_allclose(*predictions, atol=1e-4)


def test_txtai_finds_the_same_texts(paths):
    results = []
    for path, options in zip(paths, ({}, {"backend": "onnx"})):
        embeddings = Embeddings(
            path=path, method="sentence-transformers", vectors=options, gpu=False, backend="numpy"
        )
        embeddings.index(TEXTS)
        results.append(embeddings.search("the dog", 2))
    expected, actual = results
    assert [index for index, _ in actual] == [index for index, _ in expected]
    np.testing.assert_allclose(
        [score for _, score in actual], [score for _, score in expected], atol=1e-4
    )
