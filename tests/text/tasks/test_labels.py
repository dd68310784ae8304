"""Tests of text and token classification, against transformers' pipelines."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from checkpoints import copy_folder, edit_json, list_file, seal
from heads import MANY, PAIRS, TEXTS
from pipelines_compared import both, same
from sentence_transformers import CrossEncoder
from transformers import pipeline

from vanilla_transformer_export import TextRuntime

# ----------------------------------------------------------------------------------- classification


@pytest.mark.parametrize(
    "options", [{}, {"top_k": None}, {"top_k": 2, "function_to_apply": "sigmoid"}], ids=str
)
def test_classification_matches_pipeline(made, options):
    pipe, runtime = both(made, "classify", "text-classification")
    same(runtime.classify(MANY, **options), pipe(MANY, **{"top_k": 1, **options}))
    dicts = [{"text": text, "text_pair": pair} for text, pair in PAIRS]
    expected = pipe(dicts, **{"top_k": 1, **options})
    same(runtime.classify(PAIRS, **options), expected)
    same(runtime.classify(dicts, **options), expected)
    same(runtime.classify([MANY[0], *dicts], **options)[1:], expected)


@pytest.mark.parametrize(
    "problem", ["regression", "multi_label_classification", "single_label_classification", None]
)
def test_scores_for_each_problem_type_match_pipeline(made, monkeypatch, problem):
    pipe, runtime = both(made, "classify", "text-classification")
    monkeypatch.setattr(pipe.model.config, "problem_type", problem)
    monkeypatch.setitem(runtime.info.config, "problem_type", problem)
    same(runtime.classify(TEXTS, top_k=None), pipe(TEXTS, top_k=None))
    for function in ("none", "softmax"):
        options = {"top_k": 3, "function_to_apply": function}
        same(runtime.classify(TEXTS, **options), pipe(TEXTS, **options))


@pytest.mark.parametrize("longest", [1000, 40, 12])  # hypotheses have more than 12 tokens
@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_scores_match_pipeline(made, cut_at, longest, multi_label):
    pipe, runtime = both(made, "classify", "zero-shot-classification")
    cut_at(pipe, runtime, longest)
    for labels in (["a man", "the river", "and"], ["a man"], "the red , two"):
        options = {"multi_label": multi_label, "hypothesis_template": "the {} runs"}
        same(runtime.zero_shot(MANY, labels, **options), pipe(MANY, labels, **options))


def test_zero_shot_default_template_matches_pipeline(made):
    pipe, runtime = both(made, "classify", "zero-shot-classification")
    same(runtime.zero_shot(TEXTS, ["a man", "a house"]), pipe(TEXTS, ["a man", "a house"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classify by a decoder", "classify by both stacks", "one label"])
def test_classification_with_other_models_matches_pipeline(made, name):
    pipe, runtime = both(made, name, "text-classification")
    for options in ({}, {"top_k": None}):
        same(runtime.classify(MANY, **options), pipe(MANY, **{"top_k": 1, **options}))
    if name != "one label":
        pipe = pipeline("zero-shot-classification", model=made(name)[0])
        same(runtime.zero_shot(TEXTS, ["man", "people"]), pipe(TEXTS, ["man", "people"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"dtype": "int8"}, {"target": "cpu", "dtype": "int8"}, {"target": "cpu"}], ids=str
)
def test_labels_of_int8_and_cpu_exports_match_pipeline(made, settings):
    pipe, runtime = both(made, "classify", "text-classification", **settings)
    actual, expected = runtime.classify(MANY), pipe(MANY, top_k=1)
    assert [each[0]["label"] for each in actual] == [each[0]["label"] for each in expected]
    if "dtype" not in settings:
        same(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["config_sentence_transformers.json", "config.json", "config.json of old"]
)
@pytest.mark.parametrize("name", ["Identity", "Sigmoid", "Tanh"])
def test_cross_encoder_activation_is_read_from_config(made, tmp_path, place, name):
    checkpoint, runtime = made("one label")
    scores = CrossEncoder(
        checkpoint, device="cpu", activation_fn=getattr(torch.nn, name)()
    ).predict(PAIRS)
    directory = copy_folder(runtime.path.parent, tmp_path)
    recorded = f"torch.nn.modules.activation.{name}"
    if place == "config_sentence_transformers.json":
        (directory / place).write_text(json.dumps({"activation_fn": recorded}))
        list_file(directory, place)
    elif place == "config.json":
        edit_json(directory / "config.json", sentence_transformers={"activation_fn": recorded})
    else:
        edit_json(directory / "config.json", sbert_ce_default_activation_function=recorded)
    seal(directory)
    result = TextRuntime(directory, threads=1).classify(PAIRS)
    np.testing.assert_allclose([each[0]["score"] for each in result], scores, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize(
    "name",
    [
        "tag",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tag by a decoder", "tag words with spaces")
        ),
    ],
)
def test_entities_match_pipeline(made, cut_at, name, strategy):
    pipe, runtime = both(made, name, "token-classification")
    for options in ({}, {"ignore_labels": []}, {"ignore_labels": ["PER", "I-PER"]}):
        expected = pipe(MANY, aggregation_strategy=strategy, **options)
        assert any(expected)
        same(runtime.tag(MANY, aggregation_strategy=strategy, **options), expected)
    cut_at(pipe, runtime, 24)
    same(
        runtime.tag(MANY, aggregation_strategy=strategy), pipe(MANY, aggregation_strategy=strategy)
    )
    if strategy != "none":
        for stride in (0, 7):
            options = {"aggregation_strategy": strategy, "stride": stride}
            same(runtime.tag(MANY, **options), [pipe(text, **options) for text in MANY])


def test_truncation_does_not_affect_concurrent_calls(made, cut_at):
    pipe, runtime = both(made, "tag", "token-classification")
    cut_at(pipe, runtime, 24)
    full_ids = [encoding.ids for encoding in runtime.encode(MANY, special_tokens=True)]
    expected = runtime.tag(MANY)
    with ThreadPoolExecutor(4) as pool:
        truncated = [pool.submit(runtime.tag, MANY) for _ in range(20)]
        encoded = [pool.submit(runtime.encode, MANY, special_tokens=True) for _ in range(200)]
        assert all([encoding.ids for encoding in each.result()] == full_ids for each in encoded)
        assert all(each.result() == expected for each in truncated)


def test_zero_shot_at_every_length_matches_pipeline(made, cut_at):
    """Some lengths leave room for the hypothesis only, or for one token of the text."""
    pipe, runtime = both(made, "classify", "zero-shot-classification")
    options = {"hypothesis_template": "{} runs"}
    for longest in range(4, 16):
        cut_at(pipe, runtime, longest)
        same(
            runtime.zero_shot(TEXTS[:1], ["a man"], **options),
            pipe(TEXTS[:1], ["a man"], **options),
        )
