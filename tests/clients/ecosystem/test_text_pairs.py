"""Tests of the shipped classifiers with text pairs, in pipelines and in sentence-transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

import vanilla_transformer  # noqa: F401 - registers the models

CARDS = Path(__file__).parents[3] / "model_cards"
FIRST, SECOND = "a film about the highest waterfall", "what is it ?"


@pytest.fixture(scope="module", params=["vanilla-encoder-tiny-sst2", "vanilla-encoder-tiny-trec"])
def path(request):
    return str(CARDS / request.param)


@torch.no_grad()
def logits(path, first, second):
    """Return the logits of a text pair, with token ids joined by hand."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    one, other = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (first, second)
    )
    return model.eval()(torch.tensor([[1, *one, 2, *other, 2]])).logits[0]


def test_text_classification_scores_pairs(path):
    classify = pipeline("text-classification", path)
    actual = classify({"text": FIRST, "text_pair": SECOND}, top_k=None, function_to_apply="none")
    expected = dict(
        zip(classify.model.config.id2label.values(), logits(path, FIRST, SECOND).tolist())
    )
    assert {one["label"]: one["score"] for one in actual} == pytest.approx(expected, abs=1e-4)


def test_zero_shot_classification_scores_pairs(path):
    names, template = ["film", "water"], "this is {} ."
    choose = pipeline("zero-shot-classification", path)
    actual = choose(FIRST, names, hypothesis_template=template)
    entails = torch.stack(
        [logits(path, FIRST, template.format(name))[choose.entailment_id] for name in names]
    )
    expected = dict(zip(names, entails.softmax(0).tolist()))
    assert dict(zip(actual["labels"], actual["scores"])) == pytest.approx(expected, abs=1e-4)


def test_cross_encoder_scores_pairs(path):
    pairs = [(FIRST, SECOND), (SECOND, FIRST), ("one", "another film")]
    actual = CrossEncoder(path, device="cpu").predict(pairs, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(
        actual, torch.stack([logits(path, *pair) for pair in pairs]), atol=1e-4
    )


def test_padded_batch_of_pairs_has_same_logits(path):
    """The tokenizer is called with two lists, as in courses on paraphrases."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    batch = tokenizer(
        [FIRST, "one"], [SECOND, "a film"], truncation=True, padding=True, return_tensors="pt"
    )
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        actual = model(**batch).logits
    torch.testing.assert_close(actual[0], logits(path, FIRST, SECOND), atol=1e-4, rtol=1e-4)
