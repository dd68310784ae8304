"""Tests of our encoder in sentence-transformers: embeddings, saved models and training."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SIZES
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from vanilla_transformer import VanillaEncoderConfig, VanillaEncoderModel
from vanilla_transformer.training.tokenizer import train_tokenizer

TEXTS = ["the old man sees a red house", "two dogs", "a woman reads the book ."]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("encoder")
    tokenizer = train_tokenizer(TEXTS * 2, 50)
    transformers.set_seed(0)
    config = VanillaEncoderConfig(**{**SIZES, "vocab_size": len(tokenizer)}, num_hidden_layers=2)
    VanillaEncoderModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def reference_embedding(checkpoint, text, pooling):
    """Return the pooled embedding of one text, in a batch without padding."""
    model = VanillaEncoderModel.from_pretrained(checkpoint)
    ids = transformers.AutoTokenizer.from_pretrained(checkpoint)(text, return_tensors="pt")[
        "input_ids"
    ]
    with torch.no_grad():
        states = model(ids).last_hidden_state[0]
    return {"mean": states.mean(0), "cls": states[0]}[pooling].numpy()


def make_embedder(checkpoint, pooling):
    encoder = Transformer(checkpoint)
    return SentenceTransformer(
        modules=[encoder, Pooling(SIZES["hidden_size"], pooling_mode=pooling)], device="cpu"
    )


def test_checkpoint_loads_with_mean_pooling(checkpoint):
    result = SentenceTransformer(checkpoint, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(
        result,
        [reference_embedding(checkpoint, text, "mean") for text in TEXTS],
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_batched_embeddings_match_single_texts(checkpoint, pooling, batch_size):
    model = make_embedder(checkpoint, pooling)
    assert type(model[0].model) is VanillaEncoderModel
    expected = [reference_embedding(checkpoint, text, pooling) for text in TEXTS]
    np.testing.assert_allclose(
        model.encode(TEXTS, batch_size=batch_size), expected, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(model.encode(TEXTS[0]), expected[0], rtol=1e-5, atol=1e-5)


def test_similarities_are_cosines(checkpoint):
    model = make_embedder(checkpoint, "mean")
    model.append(Normalize())
    vectors = np.array([reference_embedding(checkpoint, text, "mean") for text in TEXTS])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    embeddings = model.encode(TEXTS)
    np.testing.assert_allclose(embeddings, vectors, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        model.similarity(embeddings, embeddings), vectors @ vectors.T, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_saved_embedder_loads(checkpoint, pooling, tmp_path):
    model = make_embedder(checkpoint, pooling)
    model.save(str(tmp_path))
    again = SentenceTransformer(str(tmp_path), device="cpu")
    assert type(again[0].model) is VanillaEncoderModel
    assert again[1].pooling_mode == pooling
    np.testing.assert_array_equal(again.encode(TEXTS), model.encode(TEXTS))


@pytest.mark.slow
def test_saved_embedder_loads_with_trust_remote_code_without_package(checkpoint, tmp_path):
    model = make_embedder(checkpoint, "mean")
    model.save(str(tmp_path / "embedder"))
    code = f"""
import sys
sys.modules["vanilla_transformer"] = None
import numpy
from sentence_transformers import SentenceTransformer
model = SentenceTransformer({str(tmp_path / "embedder")!r}, device="cpu", trust_remote_code=True)
numpy.save({str(tmp_path / "found.npy")!r}, model.encode({TEXTS!r}))
"""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(
        np.load(tmp_path / "found.npy"), model.encode(TEXTS), rtol=1e-6, atol=1e-6
    )


def test_embedder_trains(checkpoint):
    model = make_embedder(checkpoint, "mean")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        vectors = model(model.preprocess(TEXTS))["sentence_embedding"]
        losses.append((vectors[0] - vectors[1]).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2
