"""Tests of sentence-transformers with exports, against its results in torch.

Exports are opened by its ONNX backend after `stand_in_for_optimum()`, or by `OrtTransformer`.
"""

import sys

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

from vanilla_transformer_export import Runtime, TextRuntime, export
from vanilla_transformer_export.ort_models import OrtTransformer, stand_in_for_optimum

TEXTS = ["the old man sees a red house", "two dogs", "a woman reads the book . " * 6]
PAIRS = [("two dogs", "a red house"), ("hello", "world")]
POOLINGS = ["mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    stand_in_for_optimum()
    yield
    del sys.modules["optimum.onnxruntime"], sys.modules["optimum"]


@pytest.fixture(scope="module")
def sentences(saved, folder):
    """Return a sentence model with mean pooling, and the paths of its checkpoint and its export."""
    states = saved("VanillaEncoderModel")
    modules = [Transformer(states.checkpoint), Pooling(32, pooling_mode="mean"), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "the "})
    model.save(str(folder / "checkpoint"))
    export(folder / "checkpoint", folder / "export", cases=1)
    return model, str(folder / "checkpoint"), str(folder / "export")


def load_onnx(path, **options):
    return SentenceTransformer(path, device="cpu", backend="onnx", **options)


def assert_close(actual, expected):
    limit = 1e-5 * max(1, np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_match_torch_for_each_pooling(saved, pooling):
    states = saved("VanillaEncoderModel")
    expected, actual = (
        SentenceTransformer(modules=[module, Pooling(32, pooling_mode=pooling)], device="cpu")
        for module in (Transformer(states.checkpoint), OrtTransformer(states.directory))
    )
    assert_close(actual.encode(TEXTS), expected.encode(TEXTS))


def test_dense_layers_prompts_and_truncation_match_torch(saved):
    states = saved("VanillaEncoderModel")
    dense = Dense(32, 16)
    expected, actual = (
        SentenceTransformer(
            modules=[module, Pooling(32, pooling_mode="mean"), dense],
            device="cpu",
            truncate_dim=8,
            prompts={"query": "the "},
        )
        for module in (Transformer(states.checkpoint), OrtTransformer(states.directory))
    )
    embeddings = actual.encode(TEXTS, prompt_name="query")
    assert embeddings.shape == (3, 8)
    assert_close(embeddings, expected.encode(TEXTS, prompt_name="query"))
    assert_close(
        actual.similarity(embeddings, embeddings), expected.similarity(embeddings, embeddings)
    )


def test_onnx_backend_opens_exports_and_exports_checkpoints(sentences):
    model, checkpoint, directory = sentences
    expected = model.encode(TEXTS, prompt_name="query")
    for path, options in (
        (directory, {}),
        (directory, {"file_name": "onnx/model.onnx", "provider": "CPUExecutionProvider"}),
        (checkpoint, {}),
    ):
        actual = load_onnx(path, model_kwargs=options)
        assert actual.get_backend() == "onnx"
        assert_close(actual.encode(TEXTS, prompt_name="query"), expected)


@pytest.mark.parametrize("source", [1, 2], ids=["checkpoint", "export"])
def test_saved_model_opens_with_onnx_backend_and_runtimes(sentences, tmp_path, source):
    expected = sentences[0].encode(TEXTS)
    model = load_onnx(sentences[source])
    for _ in range(2):  # the second model is saved over the first
        model.save(str(tmp_path))
        model = load_onnx(str(tmp_path))
        assert_close(model.encode(TEXTS), expected)
    assert Runtime(tmp_path).architecture == "VanillaEncoderModel"
    assert_close(TextRuntime(tmp_path).embed(TEXTS), expected)


def test_ort_transformer_module_is_saved_and_reloaded(sentences, tmp_path):
    expected, directory = sentences[0].encode(TEXTS), sentences[2]
    pooling = [Pooling(32, pooling_mode="mean"), Normalize()]
    model = SentenceTransformer(modules=[OrtTransformer(directory), *pooling], device="cpu")
    assert_close(model.encode(TEXTS), expected)
    model.save(str(tmp_path))
    reloaded = SentenceTransformer(modules=[OrtTransformer(str(tmp_path)), *pooling], device="cpu")
    assert_close(reloaded.encode(TEXTS), expected)
    # modules.json names a class outside sentence-transformers
    trusted = SentenceTransformer(str(tmp_path), device="cpu", trust_remote_code=True)
    assert_close(trusted.encode(TEXTS), expected)


def test_multi_process_pool_gives_same_embeddings(sentences):
    model = load_onnx(sentences[2])
    pool = model.start_multi_process_pool(["cpu", "cpu"])
    try:
        actual = model.encode(TEXTS * 4, pool=pool)
    finally:
        model.stop_multi_process_pool(pool)
    assert_close(actual, np.tile(sentences[0].encode(TEXTS), (4, 1)))


def test_cross_encoder_scores_match_torch(saved):
    exported = saved("VanillaEncoderForSequenceClassification", num_labels=1)
    expected = CrossEncoder(exported.checkpoint, device="cpu").predict(PAIRS)
    for model in (
        CrossEncoder(exported.directory, device="cpu", backend="onnx"),
        CrossEncoder(exported.checkpoint, device="cpu", backend="onnx"),
        CrossEncoder(
            modules=[
                OrtTransformer(exported.directory, transformer_task="sequence-classification")
            ],
            device="cpu",
        ),
    ):
        assert_close(model.predict(PAIRS), expected)


def test_sparse_encoder_embeddings_match_torch(saved):
    exported = saved("VanillaEncoderForMaskedLM")
    expected = SparseEncoder(exported.checkpoint, device="cpu").encode(TEXTS).to_dense()
    model = SparseEncoder(exported.directory, device="cpu", backend="onnx")
    assert_close(model.encode(TEXTS).to_dense(), expected)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "has VanillaEncoderForMaskedLM, expected for ORTModelFor"),
        ({"transformer_task": "any-to-any"}, "transformer_task is 'any-to-any', expected one of"),
    ],
)
def test_wrong_transformer_task_error_is_one_line(saved, options, message):
    exported = saved("VanillaEncoderForMaskedLM")
    with pytest.raises(ValueError, match=message) as caught:
        OrtTransformer(exported.directory, **options)
    assert "\n" not in str(caught.value)
