"""Graphs of whole sequences without a manifest, as other exporters leave them."""

import pickle
import shutil

import numpy as np
import pytest

from vanilla_transformer_export.ort_models import (
    ORTModelForCausalLM,
    ORTModelForFeatureExtraction,
    ORTModelForSequenceClassification,
    pipeline,
)

IDS = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.fixture
def foreign(saved, tmp_path):
    """A classifier's graph under a name of its own, with configs and tokenizer."""
    directory = saved("classify").directory
    (tmp_path / "onnx").mkdir()
    shutil.copy(directory / "onnx/model.onnx", tmp_path / "onnx/model_O3.onnx")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, tmp_path)
    return tmp_path


def opened(*args, **options):
    return ORTModelForSequenceClassification.from_pretrained(*args, **options)


def test_a_graph_gives_the_logits_of_the_export(saved, foreign, tmp_path):
    expected = opened(saved("classify").directory)(IDS, attention_mask=MASK).logits
    for options in ({}, {"file_name": "model_O3.onnx"}, {"subfolder": "onnx"}):
        model = opened(foreign, **options)
        actual = model(IDS, attention_mask=MASK).logits
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
        assert model.config.model_type == "bert"
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again(IDS, attention_mask=MASK).logits, actual)
    opened(saved("classify").directory).save_pretrained(tmp_path / "saved")  # which is replaced
    model.save_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(opened(tmp_path / "saved")(IDS).logits, model(IDS).logits)


def test_a_pipeline_reads_it(saved, foreign):
    texts = ["the old man", "two dogs"]
    actual = pipeline("text-classification", model=foreign)(texts)
    expected = pipeline("text-classification", model=saved("classify").directory)(texts)
    assert [answer["label"] for answer in actual] == [answer["label"] for answer in expected]


def test_what_cannot_be_opened_is_one_line(foreign):
    with pytest.raises(FileNotFoundError, match=r"no other.onnx, expected as file_name one of"):
        opened(foreign, file_name="other.onnx")
    with pytest.raises(ValueError, match=r"returns \['logits'\], expected some of \['last_hidden"):
        ORTModelForFeatureExtraction.from_pretrained(foreign)
    with pytest.raises(
        ValueError, match="is of another exporter, expected for ORTModelForCausalLM"
    ):
        ORTModelForCausalLM.from_pretrained(foreign)
    model = opened(foreign)
    with pytest.raises(ValueError, match=r"input_ids must be in \[0, 68\], got 5 to 99"):
        model(np.array([[5, 99]]))
    with pytest.raises(ValueError, match="input_ids"):
        model(attention_mask=MASK)
