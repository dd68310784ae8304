"""Tests of errors: texts, pairs, tasks and options that an export does not accept."""

import pytest

from vanilla_transformer_export.errors import UsageError


@pytest.mark.parametrize(
    "texts, said",
    [
        ("a man", "texts must be a list of strings or pairs, got 'a man'"),
        ([], "no texts, expected at least one"),
        ([5], "text 0 of 1 is 5, expected two texts"),
        ([("a", "b", "c")], r"text 0 of 1 is \('a', 'b', 'c'\), expected two texts"),
        ([("a", 5)], "the second part of text 0 of 1 is 5, expected a string"),
        (
            [{"text": "a", "pair": "b"}],
            r"text 0 of 1 has the keys \['text', 'pair'\], expected 'text' and 'text_pair'",
        ),
        (["\ud83d"], "text 0 of 1 is no Unicode text"),
    ],
    ids=ascii,
)
def test_what_is_no_text_or_pair_is_refused(made, texts, said):
    with pytest.raises(ValueError, match=said) as caught:
        made("classify")[1].classify(texts)
    assert "\n" not in str(caught.value)


def test_a_pair_for_a_head_that_reads_one_text_is_refused(made):
    calls = [made("tag")[1].tag, made("fill_mask")[1].fill_mask]
    for call in [*calls, lambda texts: made("classify")[1].zero_shot(texts, ["a"])]:
        for pair in (("a", "b"), {"text": "a", "text_pair": "b"}):
            with pytest.raises(ValueError, match="text 1 of 2 is the pair .*, expected one text"):
                call(["a", pair])


def test_a_task_of_another_head_is_refused_and_names_this_one(made):
    runtime = made("classify")[1]
    for call in (
        runtime.tag,
        runtime.embed,
        runtime.fill_mask,
        runtime.translate,
        runtime.next_sentence,
    ):
        with pytest.raises(
            ValueError,
            match="VanillaEncoderForSequenceClassification, which .* is not for, expected one",
        ):
            call(["a"])


@pytest.mark.parametrize(
    "name, call, said",
    [
        (
            "classify",
            lambda r: r.classify(["a"], top_k=0),
            "top_k must be a whole number of at least 1, got 0",
        ),
        (
            "classify",
            lambda r: r.classify(["a"], function_to_apply="soft"),
            "function_to_apply is 'soft', expected one of",
        ),
        (
            "classify",
            lambda r: r.zero_shot(["a"], []),
            r"candidate_labels must be strings, at least one, got \[\]",
        ),
        (
            "classify",
            lambda r: r.zero_shot(["a"], "b", "no place"),
            "hypothesis_template must have {} where the label goes",
        ),
        (
            "tag",
            lambda r: r.tag(["a"], "simpel"),
            "aggregation_strategy is 'simpel', expected .*; did you mean 'simple'",
        ),
        ("tag", lambda r: r.tag(["a"], stride=3), "a stride is for entities, expected another"),
        (
            "tag",
            lambda r: r.tag(["a"], "first", stride=-1),
            "stride must be a whole number of at least 0",
        ),
        (
            "fill_mask",
            lambda r: r.fill_mask(["<mask>"], top_k=9999),
            "top_k must be .* of at least 1 and at most 100",
        ),
        (
            "fill_mask",
            lambda r: r.fill_mask(["<mask>"], targets=[]),
            "targets are .*, expected at least one token",
        ),
        (
            "answer",
            lambda r: r.answer(["a"], ["b"], max_answer_len=0),
            "max_answer_len must be a whole number",
        ),
        (
            "answer",
            lambda r: r.answer(["a"], ["b"], max_seq_len=5, doc_stride=6),
            "doc_stride must be at most max_seq_len, 5",
        ),
    ],
)
def test_wrong_options_are_named(made, name, call, said):
    with pytest.raises(UsageError, match=said):
        call(made(name)[1])


@pytest.mark.parametrize(
    "name, call, said",
    [
        (
            "fill_mask",
            lambda r: r.fill_mask(["a man"]),
            "text 0 of 1 has no mask, expected <mask> in it",
        ),
        (
            "fill_mask",
            lambda r: r.fill_mask([f"<mask> {'a ' * 200}"]),
            "text 0 of 1: 20[0-9] tokens.* the 160 learned",
        ),
        (
            "answer",
            lambda r: r.answer(["a"], ["b", "c"]),
            "1 questions and 2 contexts, expected as many",
        ),
        ("answer", lambda r: r.answer(["a"], [""]), "context 0 of 1 is '', expected words"),
        (
            "answer",
            lambda r: r.answer(["a b"], ["b " * 50], max_seq_len=12, doc_stride=9),
            "leaves [0-9]+ tokens for",
        ),
    ],
)
def test_texts_that_do_not_fit_are_named(made, name, call, said):
    with pytest.raises(ValueError, match=said):
        call(made(name)[1])


def test_labels_that_the_config_lacks_are_an_error(made, monkeypatch):
    runtime = made("classify")[1]
    for labels, said in (
        (
            {"0": "a", "2": "c"},
            r"the labels \['0', '2'\], expected each number from 0 to 1: 1 is missing",
        ),
        ({"0": "a", "1": "b", "2": "c"}, None),
    ):
        monkeypatch.setitem(runtime.info.config, "id2label", labels)
        if said:
            with pytest.raises(ValueError, match=said):
                runtime.classify(["a"])
        with pytest.raises(
            ValueError,
            match=said or r"needs a label that begins with 'entail', and this model's are \['a'",
        ):
            runtime.zero_shot(["a"], ["b"])
