"""The shipped classifiers take pairs of texts in pipelines and in sentence-transformers."""

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
    """Return the logits of a pair of texts, whose ids are put together by hand."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    one, other = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (first, second)
    )
    return model.eval()(torch.tensor([[1, *one, 2, *other, 2]])).logits[0]


def test_text_classification(path):
    classify = pipeline("text-classification", path)
    found = classify({"text": FIRST, "text_pair": SECOND}, top_k=None, function_to_apply="none")
    expected = dict(
        zip(classify.model.config.id2label.values(), logits(path, FIRST, SECOND).tolist())
    )
    assert {one["label"]: one["score"] for one in found} == pytest.approx(expected, abs=1e-4)


def test_zero_shot_classification(path):
    names, template = ["film", "water"], "this is {} ."
    choose = pipeline("zero-shot-classification", path)
    found = choose(FIRST, names, hypothesis_template=template)
    entails = torch.stack(
        [logits(path, FIRST, template.format(name))[choose.entailment_id] for name in names]
    )
    expected = dict(zip(names, entails.softmax(0).tolist()))
    assert dict(zip(found["labels"], found["scores"])) == pytest.approx(expected, abs=1e-4)


def test_cross_encoder(path):
    pairs = [(FIRST, SECOND), (SECOND, FIRST), ("one", "another film")]
    found = CrossEncoder(path, device="cpu").predict(pairs, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(
        found, torch.stack([logits(path, *pair) for pair in pairs]), atol=1e-4
    )


def test_a_trainer_s_batch_of_pairs(path):
    """The tokenizer is called as courses on paraphrases call it."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    batch = tokenizer(
        [FIRST, "one"], [SECOND, "a film"], truncation=True, padding=True, return_tensors="pt"
    )
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        found = model(**batch).logits
    torch.testing.assert_close(found[0], logits(path, FIRST, SECOND), atol=1e-4, rtol=1e-4)
