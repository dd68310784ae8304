"""Tests of errors: texts, pairs, tasks and options that an export does not accept."""

import dataclasses

import numpy as np
import pytest
from messages import raises

from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.text.text_model import plain_row


@pytest.mark.parametrize(
    "texts, seen, expected",
    [
        ("a man", "a man", ()),
        ([], (), ()),
        ([5], (0, 1, 5), "a string"),
        ([("a", "b", "c")], (0, 1, "a", "b", "c"), ()),
        ([("a", 5)], (0, 1, 5), ()),
        ([{"text": "a", "pair": "b"}], (0, 1, "text", "pair"), ("text", "text_pair")),
        (["\ud83d"], (0, 1), ()),
    ],
    ids=ascii,
)
def test_invalid_texts_and_pairs_raise(made, texts, seen, expected):
    with raises(ValueError, seen=seen, expected=expected) as caught:
        made("classify")[1].classify(texts)
    assert "\n" not in str(caught.value)


def test_pair_for_single_text_task_raises(made):
    calls = [made("tag")[1].tag, made("fill_mask")[1].fill_mask]
    for call in [*calls, lambda texts: made("classify")[1].zero_shot(texts, ["a"])]:
        for pair in (("a", "b"), {"text": "a", "text_pair": "b"}):
            with raises(ValueError, seen=(1, 2)):
                call(["a", pair])


def test_task_of_another_head_raises_and_names_architecture(made):
    runtime = made("classify")[1]
    for call in (
        runtime.tag,
        runtime.embed,
        runtime.fill_mask,
        runtime.translate,
        runtime.next_sentence,
    ):
        with raises(ValueError, seen="VanillaEncoderForSequenceClassification"):
            call(["a"])


@pytest.mark.parametrize(
    "name, call, seen, expected",
    [
        ("classify", lambda r: r.classify(["a"], top_k=0), ("top_k", 0), 1),
        ("classify", lambda r: r.classify(["a"], top_k=np.int64(0)), "top_k", 1),
        (
            "classify",
            lambda r: r.classify(["a"], function_to_apply="soft"),
            ("function_to_apply", "soft"),
            (),
        ),
        ("classify", lambda r: r.classify(["a"], function_to_apply=["none"]), "none", ()),
        ("classify", lambda r: r.zero_shot(["a"], []), ("candidate_labels", "[]"), ()),
        ("classify", lambda r: r.zero_shot(["a"], "b", multi_label=1), ("multi_label", 1), "True"),
        ("one label", lambda r: r.rerank(["a"], [["b"]], raw_scores="x"), "raw_scores", "False"),
        ("tag", lambda r: r.tag(["a"], ignore_labels="O"), ("ignore_labels", "O"), ()),
        ("tag", lambda r: r.tag(["a"], ignore_labels=5), ("ignore_labels", 5), ()),
        ("answer", lambda r: r.answer(["a"], ["b"], align_to_words=0), "align_to_words", "True"),
        ("answer", lambda r: r.answer(["a"], ["b"], doc_stride="2"), ("doc_stride", "'2'"), 0),
        ("classify", lambda r: r.zero_shot(["a"], "b", "no place"), "hypothesis_template", "{}"),
        ("tag", lambda r: r.tag(["a"], "simpel"), ("aggregation_strategy", "simpel"), "simple"),
        ("tag", lambda r: r.tag(["a"], stride=3), "stride", ()),
        ("tag", lambda r: r.tag(["a"], "first", stride=-1), ("stride", -1), 0),
        ("fill_mask", lambda r: r.fill_mask(["<mask>"], top_k=9999), "top_k", (1, 100)),
        ("fill_mask", lambda r: r.fill_mask(["<mask>"], targets=[]), "targets", ()),
        ("answer", lambda r: r.answer(["a"], ["b"], max_answer_len=0), "max_answer_len", ()),
        (
            "answer",
            lambda r: r.answer(["a"], ["b"], max_seq_len=5, doc_stride=6),
            "doc_stride",
            ("max_seq_len", 5),
        ),
    ],
)
def test_error_names_invalid_option(made, name, call, seen, expected):
    with raises(UsageError, seen=seen, expected=expected):
        call(made(name)[1])


@pytest.mark.parametrize(
    "name, call, seen, expected",
    [
        ("fill_mask", lambda r: r.fill_mask(["a man"]), (0, 1), "<mask>"),
        ("fill_mask", lambda r: r.fill_mask([f"<mask> {'a ' * 200}"]), (0, 1), 160),
        ("answer", lambda r: r.answer(["a"], ["b", "c"]), (1, 2), ()),
        ("answer", lambda r: r.answer(["a"], [""]), (0, 1), ()),
        ("answer", lambda r: r.answer(["a b"], ["b " * 50], max_seq_len=12, doc_stride=9), (), ()),
        (
            "answer",
            lambda r: r.answer(["a"], ["b " * 50], max_seq_len=12, doc_stride=2, max_windows=3),
            0,
            3,
        ),
        ("classify", lambda r: r.zero_shot(["a"] * 4, ["b", "c"], max_pairs=7), 8, 7),
    ],
)
def test_unsuitable_texts_raise(made, name, call, seen, expected):
    with raises(ValueError, seen=seen, expected=expected):
        call(made(name)[1])


@pytest.mark.parametrize(
    "name, call, argument",
    [
        ("one label", lambda r: r.rerank("a man", [["b"]]), "queries"),
        ("one label", lambda r: r.rerank(["b"], "a man"), "texts"),
        ("answer", lambda r: r.answer("a man", ["b"]), "questions"),
        ("answer", lambda r: r.answer(["b"], "a man"), "contexts"),
        ("choose", lambda r: r.choose(["b"], "a man"), "choices"),
    ],
)
def test_error_names_argument_that_is_no_list(made, name, call, argument):
    with raises(ValueError, seen=(f"{argument} is", "a man"), expected="list"):
        call(made(name)[1])


def test_windows_are_counted_before_they_are_made(made, monkeypatch):
    runtime = made("tag")[1]
    settings = dataclasses.replace(runtime.tokenizer_settings, longest=10)
    monkeypatch.setitem(runtime.__dict__, "tokenizer_settings", settings)
    options = {"aggregation_strategy": "first", "stride": 4}
    text = "a b c d e f g h"  # 10 tokens with [CLS] and [SEP], of which a window has 4 new ones
    assert runtime.tag([text], **options, max_windows=2) == runtime.tag([text], **options)
    with raises(ValueError, seen=("text 1 of 2", 10), expected=9):
        runtime.tag([text, text * 5], **options, max_windows=9)


def test_window_without_tokens_is_named_by_its_text(made):
    windows = [[plain_row([5]), plain_row([6])], [plain_row([])]]
    with raises(ValueError, seen="second"):
        made("tag")[1].run_windows(windows, lambda row, outputs: None, ["first", "second"])


def test_missing_labels_in_config_raise(made, monkeypatch):
    runtime = made("classify")[1]
    monkeypatch.setitem(runtime.info.config, "id2label", {"0": "a", "2": "c"})
    for call in (lambda: runtime.classify(["a"]), lambda: runtime.zero_shot(["a"], ["b"])):
        with raises(ValueError, seen=("0", "2"), expected=(0, 1)):
            call()
    monkeypatch.setitem(runtime.info.config, "id2label", {"0": "a", "1": "b", "2": "c"})
    with raises(ValueError, seen=("a", "b", "c"), expected="entail"):
        runtime.zero_shot(["a"], ["b"])


def test_wrong_types_of_prompts_and_targets_are_named(made):
    with raises(UsageError, seen=("targets", 5), expected="string"):
        made("fill_mask")[1].fill_mask(["<mask>"], targets=5)
    with raises(UsageError, seen=("prompt", 5), expected="string"):
        made("one label")[1].rerank(["a"], [["b"]], prompt=5)
