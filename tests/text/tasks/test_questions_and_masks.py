"""Tests of question answering, masks, choices and next sentences, against transformers."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from heads import HEADS, PAIRS, TEXTS
from messages import raises
from pipelines_compared import CONTEXTS, QUESTIONS, WINDOWS, both, same


@pytest.mark.parametrize(
    "name",
    [
        "answer",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in HEADS
            if name.startswith("answer ")
        ),
    ],
)
def test_answers_match_question_answering_pipeline(made, name):
    pipe, runtime = both(made, name, "question-answering")
    for options in (
        {},
        {"top_k": 4},
        {"top_k": 3, "handle_impossible_answer": True, "max_answer_len": 3},
        {"top_k": 3, "align_to_words": False, **WINDOWS},
        {"top_k": 5, "handle_impossible_answer": True, **WINDOWS},
        {"max_seq_len": 50, "doc_stride": 0, "max_question_len": 2},
    ):
        expected = pipe(question=QUESTIONS, context=CONTEXTS, **options)
        same(
            runtime.answer(QUESTIONS, CONTEXTS, **options),
            [answer if isinstance(answer, list) else [answer] for answer in expected],
        )


def test_longest_answer_may_be_any_integer(made):
    runtime = made("answer")[1]
    whole = runtime.answer(QUESTIONS[:1], CONTEXTS[:1], max_answer_len=10**4)
    assert runtime.answer(QUESTIONS[:1], CONTEXTS[:1], max_answer_len=10**30) == whole


def test_windows_and_questions_are_cut_at_tokenizer_max_length(made, cut_at):
    pipe, runtime = both(made, "answer", "question-answering")
    cut_at(pipe, runtime, 44)
    same(
        runtime.answer(QUESTIONS, CONTEXTS, top_k=2),
        pipe(question=QUESTIONS, context=CONTEXTS, top_k=2),
    )


def test_answers_with_left_padding_match_pipeline(made, monkeypatch):
    pipe, runtime = both(made, "answer", "question-answering")
    monkeypatch.setattr(pipe.tokenizer, "padding_side", "left")
    settings = dataclasses.replace(runtime.tokenizer_settings, padding_side="left")
    monkeypatch.setitem(runtime.__dict__, "tokenizer_settings", settings)
    expected = pipe(question=QUESTIONS, context=CONTEXTS, top_k=2, **WINDOWS)
    same(runtime.answer(QUESTIONS, CONTEXTS, top_k=2, **WINDOWS), expected)


# -------------------------------------------------------------------------------------------- masks

MASKED = ["the <mask> man sees a house", "two <mask>", "<mask> woman reads a <mask> ."]


def test_fill_mask_matches_pipeline(made):
    pipe, runtime = both(made, "fill_mask", "fill-mask")
    for options in ({}, {"top_k": 2}, {"targets": ["▁the", "▁a"]}, {"targets": "▁the"}):
        same(runtime.fill_mask(MASKED, **options), pipe(MASKED, **options))
    with pytest.warns(UserWarning, match="'the'.*'▁the'"):
        same(runtime.fill_mask(MASKED, targets=["the"]), pipe(MASKED, targets=["the"]))


# -------------------------------------------------------------------- choices and next sentences


def logits(checkpoint, model_class, *texts):
    model = getattr(transformers, model_class).from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    with torch.no_grad():
        outputs = model(
            **{
                name: values[None]
                for name, values in tokenizer(*texts, return_tensors="pt", padding=True).items()
            }
        )
    return outputs.logits[0].numpy()


@pytest.mark.slow
def test_choice_scores_match_model(made):
    checkpoint, runtime = made("choose")
    choices = [["the red house", "a book and the river"], ["a", "b c", "the man"], ["one"]]
    actual = runtime.choose(TEXTS, choices)
    for text, text_choices, scores in zip(TEXTS, choices, actual, strict=True):
        expected = logits(
            checkpoint, "AutoModelForMultipleChoice", [text] * len(text_choices), text_choices
        )
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["next_sentence", "pretraining"])
def test_next_sentence_scores_match_model(made, name):
    checkpoint, runtime = made(name)
    model_class = (
        "AutoModelForNextSentencePrediction"
        if name == "next_sentence"
        else "AutoModelForPreTraining"
    )
    model = getattr(transformers, model_class).from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    for pair, scores in zip(PAIRS, runtime.next_sentence(PAIRS), strict=True):
        with torch.no_grad():
            outputs = model(**tokenizer(*pair, return_tensors="pt"))
        expected = outputs.logits if name == "next_sentence" else outputs.seq_relationship_logits
        np.testing.assert_allclose(scores, expected[0], rtol=1e-4, atol=1e-5)
    if name == "pretraining":
        [[first, *_]] = runtime.fill_mask(["the [MASK] man"])
        ids = tokenizer("the [MASK] man", return_tensors="pt")
        with torch.no_grad():
            probabilities = model(**ids).prediction_logits[0, 2].softmax(-1)
        assert first["token"] == int(probabilities.argmax())
        assert first["score"] == pytest.approx(float(probabilities.max()), rel=1e-4)


def test_windows_that_share_all_but_one_token_advance_and_others_are_rejected(made):
    runtime = made("answer")[1]
    others = len(runtime.tokenizer.encode(QUESTIONS[0], "a").ids) - 1
    sizes = {"max_seq_len": others + 4}
    [[answer]] = runtime.answer(QUESTIONS[:1], CONTEXTS[:1], doc_stride=3, **sizes)
    assert answer["answer"] in CONTEXTS[0]
    with raises(ValueError, seen=(others + 4, 4, 0), expected="doc_stride=4"):
        runtime.answer(QUESTIONS[:1], CONTEXTS[:1], doc_stride=4, **sizes)
