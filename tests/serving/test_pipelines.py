"""Tests of `/predict/{task}` with huggingface_hub's client, against transformers' pipelines."""

import base64
import contextlib
import io

import httpx
import huggingface_hub
import numpy as np
import pytest
from heads import (
    MANY,
    PAIRS,
    TEXTS,
    close,
    export_for_images,
    head_exports,
    save_head,
    tokenizer_for,
)
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from messages import check_message, raises
from opened_engines import text_client
from PIL import Image
from served import served
from served_models import PROTOCOLS, loaded_model, serving
from transformers import pipeline

from vanilla_transformer_export import ImageRuntime, TextRuntime, export
from vanilla_transformer_export.inference.export_info import ExportInfo


@pytest.fixture(autouse=True)
def allow_requests(monkeypatch):
    """The client sends no requests with HF_HUB_OFFLINE, not even to this machine."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function that returns the checkpoint and the export of a head of `HEADS`."""
    return head_exports(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def serve_head(made):
    """A function that returns the pipeline of a head and a task, and the url of its server."""
    with contextlib.ExitStack() as stack:
        urls = {}

        def ask(name, task):
            checkpoint, directory = made(name)
            if name not in urls:
                urls[name] = stack.enter_context(
                    serving({"it": TextRuntime(directory, threads=1)})
                ).url
            pipe = None if task is None else pipeline(task, model=checkpoint)
            return pipe, urls[name]

        yield ask


def client(url, task, name=None):
    return InferenceClient(
        model=f"{url}{f'/models/{name}' if name else ''}/predict/{task}", timeout=60
    )


def post(url, task, inputs, **parameters):
    return httpx.post(
        f"{url}/predict/{task}", json={"inputs": inputs, "parameters": parameters}, timeout=60
    )


def check_same(results, reference):
    close([dict(item) for item in results], plain(reference), absolute=1e-4)


def plain(value):
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def items(results, *names):
    """Return the fields `names` of the client's objects, which have other fields that are None."""
    return [{name: item[name] for name in names} for item in results]


def test_text_classification_matches_pipeline(serve_head):
    pipe, url = serve_head("classify", "text-classification")
    for place in (None, "it"):
        result = client(url, "text-classification", place).text_classification(MANY[0])
        check_same(items(result, "label", "score"), pipe(MANY[0], top_k=None))
    result = client(url, "text-classification").text_classification(
        MANY[0], top_k=2, function_to_apply="sigmoid"
    )
    check_same(items(result, "label", "score"), pipe(MANY[0], top_k=2, function_to_apply="sigmoid"))
    close(post(url, "text-classification", MANY).json(), pipe(MANY, top_k=None), absolute=1e-4)
    close(
        post(url, "text-classification", MANY[0], top_k=1).json(),
        pipe([MANY[0]], top_k=1),
        absolute=1e-4,
    )
    pairs = [{"text": text, "text_pair": pair} for text, pair in PAIRS]
    close(
        post(url, "text-classification", pairs, top_k=1).json(), pipe(pairs, top_k=1), absolute=1e-4
    )


def test_zero_shot_classification_matches_pipeline(serve_head):
    pipe, url = serve_head("classify", "zero-shot-classification")
    for options in ({}, {"multi_label": True}, {"hypothesis_template": "the {} runs"}):
        actual = client(url, "zero-shot-classification").zero_shot_classification(
            MANY[1], ["a man", "the river"], **options
        )
        expected = pipe(MANY[1], ["a man", "the river"], **options)
        check_same(
            items(actual, "label", "score"),
            [{"label": a, "score": b} for a, b in zip(expected["labels"], expected["scores"])],
        )


WRONG = {
    "no object": (b"[1]", dict(seen="[1]")),
    "no JSON": (b"{", dict(seen="JSON")),
    "no inputs": (b"{}", dict(seen="inputs")),
    "an empty list": (b'{"inputs": []}', dict(seen="inputs")),
    "a number": (b'{"inputs": 5}', dict(seen=(0, 1, 5))),
    "an unknown option": (
        b'{"inputs": "a", "parameters": {"topk": 1}}',
        dict(seen="topk", expected="top_k"),
    ),
    "another type": (
        b'{"inputs": "a", "parameters": {"top_k": "3"}}',
        dict(seen=("top_k", "'3'"), expected=1),
    ),
    "a wrong value": (
        b'{"inputs": "a", "parameters": {"top_k": 0}}',
        dict(seen=("top_k", 0), expected=1),
    ),
    "parameters of another type": (
        b'{"inputs": "a", "parameters": []}',
        dict(seen=("parameters", "[]")),
    ),
    "a stream": (
        b'{"inputs": "a", "stream": true}',
        dict(seen="stream"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_request_returns_400_and_names_value(serve_head, name):
    _, url = serve_head("classify", None)
    body, values = WRONG[name]
    result = httpx.post(
        f"{url}/predict/text-classification",
        content=body,
        headers={"content-type": "application/json"},
    )
    assert result.status_code == 400, result.text
    check_message(result.json()["error"], **values)


def test_one_input_has_one_answer_and_a_list_has_a_list(serve_head):
    """An input is a text, an object with the keys of the task, or a pair, also as a list of two."""
    _, url = serve_head("next_sentence", None)
    pairs = [list(pair) for pair in PAIRS[:2]]
    answers = post(url, "next-sentence", pairs).json()
    assert [post(url, "next-sentence", pair).json() for pair in pairs] == answers
    objects = [{"text": text, "text_pair": pair} for text, pair in pairs]
    assert post(url, "next-sentence", objects).json() == answers
    assert post(url, "next-sentence", objects[0]).json() == answers[0]
    assert answers[0][0]["score"] >= answers[0][1]["score"]
    _, url = serve_head("choose", None)
    inputs = {"text": TEXTS[0], "choices": TEXTS[1:]}
    [answer] = post(url, "multiple-choice", [inputs]).json()
    assert post(url, "multiple-choice", inputs).json() == answer
    assert {item["label"] for item in answer} == {*TEXTS[1:]}
    too_many = {"text": "a", "choices": ["b"] * 129}
    assert post(url, "multiple-choice", too_many).status_code == 413
    for wrong in ({"text": "a"}, {**inputs, "more": 1}, "a", [inputs, 5]):
        refused = post(url, "multiple-choice", wrong)
        assert refused.status_code == 400
        check_message(refused.json()["error"], seen="inputs", expected=("text", "choices"))


@pytest.mark.parametrize(
    "task, parameters, seen, expected",
    [
        ("zero-shot-classification", {}, "candidate_labels", "parameters"),
        ("zero-shot-classification", {"candidate_labels": None}, "candidate_labels", "parameters"),
        ("zero-shot-classification", {"candidate_labels": "a", "max_pairs": 9}, "max_pairs", ()),
        ("zero-shot-classification", {"candidate_labels": "a", "multi_label": 1}, 1, "True"),
        ("text-classification", {"function_to_apply": ["none"]}, "function_to_apply", "softmax"),
    ],
)
def test_options_are_those_of_the_task(serve_head, task, parameters, seen, expected):
    _, url = serve_head("classify", None)
    refused = post(url, task, "a", **parameters)
    assert refused.status_code == 400
    check_message(refused.json()["error"], seen=seen, expected=expected)


def test_unsupported_tasks_and_too_large_inputs_return_errors(serve_head):
    _, url = serve_head("classify", None)
    for task, status, expected in [
        ("text-clasification", 404, "text-classification"),
        ("fill-mask", 400, ()),
        ("translation", 400, ()),
    ]:
        actual = post(url, task, "a")
        assert actual.status_code == status
        check_message(actual.json()["error"], seen=task, expected=expected)
    actual = post(url, "text-classification", ["a"] * 1000)
    assert actual.status_code == 413
    check_message(actual.json()["error"], seen=1000, expected=128)
    actual = post(url, "text-classification", "a " * 3000)
    assert actual.status_code == 413
    check_message(actual.json()["error"], expected=512)
    actual = post(url, "zero-shot-classification", ["a"] * 100, candidate_labels=["b"] * 100)
    assert actual.status_code == 413 and "10000 pairs" in actual.json()["error"]
    with pytest.raises(HfHubHTTPError):
        client(url, "text-classification").text_classification("a " * 3000)


@pytest.mark.slow
def test_token_classification_matches_pipeline(serve_head):
    pipe, url = serve_head("tag", "token-classification")
    fields = {"none": ("entity", "score", "index", "word", "start", "end")}
    for strategy in ("none", "simple", "average"):
        names = fields.get(strategy, ("entity_group", "score", "word", "start", "end"))
        result = client(url, "token-classification").token_classification(
            MANY[3], aggregation_strategy=strategy
        )
        check_same(items(result, *names), pipe(MANY[3], aggregation_strategy=strategy))
    close(post(url, "token-classification", MANY).json(), plain(pipe(MANY)), absolute=1e-4)
    assert post(url, "token-classification", "a", ignore_labels=5).status_code == 400


@pytest.mark.slow
def test_question_answering_matches_pipeline(serve_head):
    pipe, url = serve_head("answer", "question-answering")
    ask = client(url, "question-answering").question_answering
    names = ("score", "start", "end", "answer")
    for options in (
        {},
        {"max_answer_len": 3, "align_to_words": False},
        {"max_seq_len": 40, "doc_stride": 6},
    ):
        actual = ask(question=TEXTS[0], context=MANY[5], **options)
        check_same(items([actual], *names), [pipe(question=TEXTS[0], context=MANY[5], **options)])
    actual = ask(question=TEXTS[0], context=MANY[5], top_k=3, handle_impossible_answer=True)
    expected = pipe(question=TEXTS[0], context=MANY[5], top_k=3, handle_impossible_answer=True)
    check_same(items(actual, *names), expected)
    hostile = {"question": "a " * 100, "context": "b " * 50_000}
    refused = post(url, "question-answering", hostile, max_seq_len=384, doc_stride=275)
    assert (
        refused.status_code == 413 and "windows, expected at most 2000" in refused.json()["error"]
    )
    assert post(url, "question-answering", {"question": 5, "context": 6}).status_code == 400


@pytest.mark.slow
def test_fill_mask_matches_pipeline(serve_head):
    pipe, url = serve_head("fill_mask", "fill-mask")
    fill = client(url, "fill-mask").fill_mask
    names = ("score", "token", "token_str", "sequence")
    check_same(items(fill("the <mask> man"), *names), pipe("the <mask> man"))
    check_same(
        items(fill("the <mask>", targets=["▁the", "▁a"], top_k=2), *names),
        pipe("the <mask>", targets=["▁the", "▁a"], top_k=2),
    )
    many = ["the <mask> man", "<mask> and <mask>"]
    close(post(url, "fill-mask", many).json(), pipe(many), absolute=1e-4)


@pytest.mark.slow
def test_multiple_choice_and_next_sentence_match_runtime(made):
    runtimes = {name: TextRuntime(made(name)[1], threads=1) for name in ("choose", "next_sentence")}
    unserved = {name: TextRuntime(made(name)[1], threads=1) for name in runtimes}
    with serving(runtimes) as server:
        result = post(server.url, "multiple-choice", {"text": TEXTS[0], "choices": MANY}).json()
        scores = unserved["choose"].choose([TEXTS[0]], [MANY])[0]
        powers = np.exp(np.float64(scores))
        assert [item["label"] for item in result] == [
            MANY[place] for place in np.argsort(-scores, kind="stable")
        ]
        np.testing.assert_allclose(
            [item["score"] for item in result],
            sorted(powers / powers.sum(), reverse=True),
            atol=1e-4,
        )
        result = post(server.url, "next-sentence", [list(pair) for pair in PAIRS]).json()
        powers = np.exp(np.float64(unserved["next_sentence"].next_sentence(PAIRS)))
        for own, row in zip(result, powers / powers.sum(axis=1, keepdims=True), strict=True):
            scores = {item["label"]: item["score"] for item in own}
            np.testing.assert_allclose([scores["isNext"], scores["notNext"]], row, atol=1e-4)


@pytest.mark.slow
def test_image_tasks_match_pipelines(tmp_path):
    export_for_images(tmp_path / "labels", num_labels=3)
    export_for_images(tmp_path / "states", "VanillaVisionModel")
    runtimes = {
        name: ImageRuntime(tmp_path / name / "export", threads=1) for name in ("labels", "states")
    }
    file = io.BytesIO()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))
    image.save(file, "PNG")
    classify = pipeline("image-classification", model=str(tmp_path / "labels/model"))
    states = pipeline("image-feature-extraction", model=str(tmp_path / "states/model"))(image)
    with serving(runtimes) as server:
        ask = client(server.url, "image-classification").image_classification
        for options in ({}, {"top_k": 2}):  # as bytes, and as base64
            check_same(
                items(ask(file.getvalue(), **options), "label", "score"),
                classify(image, **options),
            )
        text = base64.b64encode(file.getvalue()).decode()
        np.testing.assert_allclose(
            post(server.url, "image-feature-extraction", text).json(), states, atol=1e-4
        )
        for wrong in ("not base64!", base64.b64encode(b"no image").decode(), 5):
            assert post(server.url, "image-classification", wrong).status_code == 400


# --------------------------------------------------------------------------------------- generation


@pytest.fixture(scope="module")
def generators(tmp_path_factory):
    """Runtimes without a server, by name, and the url of a server of the same exports."""
    made, models = {}, {}
    for name, architecture in (
        ("decoder", "VanillaDecoderForCausalLM"),
        ("seq2seq", "VanillaSeq2SeqForConditionalGeneration"),
    ):
        folder = tmp_path_factory.mktemp(name)
        checkpoint = save_head(
            architecture, tokenizer_for("bpe", architecture), folder / "checkpoint"
        )
        export(checkpoint, folder / "export", cases=1, alignments=name == "seq2seq")
        made[name] = TextRuntime(folder / "export", threads=1)
        served_runtime, engine = text_client(folder / "export")
        models[name] = loaded_model(name, served_runtime, engine)
    with served(protocols=PROTOCOLS) as server:
        server.server.service.models.models.update(models)
        yield made, server.url
    for model in models.values():
        model.client.close()


@pytest.mark.slow
def test_text_generation_matches_runtime(generators):
    made, url = generators
    generate, ask = made["decoder"].generate, client(url, "text-generation").text_generation
    [expected] = generate([TEXTS[0]], max_new_tokens=12)
    assert ask(TEXTS[0], max_new_tokens=12) == TEXTS[0] + expected
    assert ask(TEXTS[0], max_new_tokens=12, return_full_text=False) == expected
    sampling = {"do_sample": True, "seed": 5, "temperature": 0.9, "top_k": 9}
    [sampled] = generate([TEXTS[0]], max_new_tokens=12, **sampling)
    assert ask(TEXTS[0], max_new_tokens=12, return_full_text=False, **sampling) == sampled
    sampling |= {"num_return_sequences": 2, "max_new_tokens": 12}
    actual = post(url, "text-generation", TEXTS, return_full_text=False, **sampling).json()
    answers = [item["generated_text"] for own in actual for item in own]
    assert answers == generate(TEXTS, **sampling)
    with pytest.warns(UserWarning, match="Ignoring following parameters: stop, watermark"):
        assert (
            ask(TEXTS[0], max_new_tokens=12, stop=["a"], watermark=True, return_full_text=False)
            == expected
        )
    # the client remembers from the call above that the server does not stream
    with raises(ValueError, seen="stream"):
        ask(TEXTS[0], stream=True)
    actual = post(
        url, "text-generation", TEXTS, num_beams=2, num_return_sequences=2, return_full_text=False
    ).json()
    expected = generate(TEXTS, num_beams=2, num_return_sequences=2)
    assert [item["generated_text"] for own in actual for item in own] == expected
    for parameters in (
        {"stop": ["x"]},
        {"details": True},
        {"num_beams": 0},
        {"max_new_tokn": 3},
        {"src_lang": "de"},
    ):
        assert post(url, "text-generation", "a", **parameters).status_code == 400


@pytest.mark.slow
def test_translation_and_text2text_tasks_match_runtime(generators):
    made, url = generators
    runtime = made["seq2seq"]
    text = f"{TEXTS[0]}. {TEXTS[1]}."
    [expected] = runtime.translate([text], max_new_tokens=9)
    actual = client(url, "translation").translation(text, generate_parameters={"max_new_tokens": 9})
    assert actual.translation_text == expected
    sampling = {"do_sample": True, "seed": 5, "max_new_tokens": 9}
    actual = post(url, "translation", [text, text], **sampling).json()
    answers = [item["translation_text"] for own in actual for item in own]
    assert answers == runtime.translate([text, text], **sampling) and len(set(answers)) == 2
    for options in ({}, {"num_beams": 2, "num_return_sequences": 2}):
        actual = post(url, "translation", ["12345"], **options).json()
        assert actual == [[{"translation_text": "12345"}] * options.get("num_return_sequences", 1)]
    actual = post(url, "translation", "12345", copy_letterless=False, max_new_tokens=9).json()
    assert actual == [
        {"translation_text": text} for text in runtime.generate(["12345"], max_new_tokens=9)
    ]
    assert post(url, "translation", "12345", copy_letterless="no").status_code == 400
    flags = dict(return_alignments=True, replace_unknowns=True)
    [aligned] = runtime.translate([text], max_new_tokens=9, **flags)
    [actual] = post(url, "translation", text, max_new_tokens=9, **flags).json()
    pairs = [[list(one), list(other)] for one, other in aligned.alignments]
    assert actual == {"translation_text": aligned.text, "alignments": pairs} and pairs
    assert post(url, "translation", "a", return_alignments="no").status_code == 400
    kept_by = (({"markup": "html"}, "</b>"), ({"keep": ["w6"]}, "w6"), ({"keep": True}, "{x}"))
    for marks, kept in kept_by:
        marked = f"{text} w5 <b>w6</b> {{x}} ."
        [actual] = post(url, "translation", marked, max_new_tokens=9, **marks).json()
        [expected] = runtime.translate([marked], max_new_tokens=9, **marks)
        assert actual == {"translation_text": expected} and kept in expected
    for wrong in ({"markup": "xml"}, {"keep": "w."}, {"keep": [5]}, {"keep": ["a"] * 101}):
        response = post(url, "translation", "a", **wrong)
        assert response.status_code in (400, 413) and [*wrong][0] in response.text
    assert post(url, "summarization", "a", copy_letterless=True).status_code == 400
    actual = post(url, "text2text-generation", TEXTS, num_beams=3, max_new_tokens=9).json()
    assert [own[0]["generated_text"] for own in actual] == runtime.generate(
        TEXTS, num_beams=3, max_new_tokens=9
    )
    flags = dict(replace_unknowns=True, max_new_tokens=9)
    actual = post(url, "summarization", TEXTS, **flags).json()
    assert [own[0]["summary_text"] for own in actual] == runtime.generate(TEXTS, **flags)
    assert post(url, "summarization", "a", return_alignments=True).status_code == 400
    [expected] = runtime.generate(TEXTS[:1])
    assert client(url, "summarization").summarization(TEXTS[0]).summary_text == expected
    assert post(url, "translation", "a", src_lang="xx").status_code == 400


def test_translator_that_carries_its_pipeline_does_not_summarize(generators, monkeypatch):
    """A checkpoint that carries a pipeline was trained for that task only."""
    _, url = generators
    assert post(url, "summarization", TEXTS[0]).status_code == 200
    monkeypatch.setattr(ExportInfo, "pipeline", "translation")
    for task in ("translation", "text2text-generation"):
        assert post(url, task, TEXTS[0]).status_code == 200
    response = post(url, "summarization", TEXTS[0])
    assert response.status_code == 404
    check_message(
        response.json()["error"],
        seen="summarization",
        expected=("translation", "text2text-generation"),
    )


def test_copied_text_has_as_many_results_as_other_texts(generators):
    _, url = generators
    options = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 4}
    for texts in (["12345"], ["12345", TEXTS[0]]):
        first, *others = post(url, "translation", texts, **options).json()
        assert first == [{"translation_text": "12345"}] * 2
        assert [len(results) for results in others] == [2] * (len(texts) - 1)


def test_at_most_a_hundred_texts_are_kept(generators):
    _, url = generators
    for count, status in ((100, 200), (101, 413)):
        response = post(url, "translation", "a", keep=["w"] * count, max_new_tokens=4)
        assert response.status_code == status
    check_message(response.json()["error"], seen=("keep", 101), expected=100)
