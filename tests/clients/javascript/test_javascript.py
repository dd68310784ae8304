"""Transformers.js runs exports without options, in Node and in a browser, and gives what torch
gives."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoTokenizer, pipeline

from vanilla_transformer_export.exporting.repository_files import client_config

TRANSLATOR = "vanilla-seq2seq-tiny-multi30k-en-de"
CLASSIFIER = "vanilla-encoder-tiny-sst2"
ENGLISH = ["A man sleeps.", "A woman is reading a book in the park."]
TEXTS = ["the film wins", "who sees the old man and the big dog, but a red bird?"]
LABELS = ["sport", "politics", "the red bird"]
CONTEXTS = [
    "the big dog finds a red bird.",
    "the old man wants a boy, the film wins and the cast shines.",
]
HERE = Path(__file__).parent
FP32 = {"dtype": "fp32", "device": "cpu"}


def job(task, model, *args):
    return {"task": task, "model": model, "args": args}


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_a_translator_gives_torch_s_text(exported, node):
    torch_pipeline = pipeline("translation", str(exported(TRANSLATOR)))
    [single, batch] = node(
        job("translation", TRANSLATOR, ENGLISH[1]), job("translation", TRANSLATOR, ENGLISH)
    )
    # Transformers.js has no beams, whatever the generation config says
    expected = torch_pipeline(ENGLISH, num_beams=1)
    assert (single["result"], batch["result"]) == ([expected[1]], expected)
    assert batch["loaded"] == [FP32, FP32]


@pytest.mark.parametrize(
    "task, name",
    [
        ("summarization", "seq2seq"),
        *(("text2text-generation", name) for name in ("seq2seq", "t5", "m2m")),
    ],
)
def test_an_encoder_decoder_gives_torch_s_text(exported, node, task, name):
    torch_pipeline = pipeline(task, str(exported(name)))
    for text in TEXTS:
        [found] = node(job(task, name, text, {"max_new_tokens": 12}))
        assert found["result"] == torch_pipeline(text, max_new_tokens=12, num_beams=1)


@pytest.mark.parametrize("name", [CLASSIFIER, "labels", "decoder-labels", "bert"])
def test_a_classifier_gives_torch_s_probabilities(exported, node, name):
    expected = pipeline("text-classification", str(exported(name)), top_k=None)(TEXTS)
    [found] = node(job("text-classification", name, TEXTS, {"top_k": 3}))
    assert [[row["label"] for row in rows] for rows in found["result"]] == [
        [row["label"] for row in rows] for rows in expected
    ]
    close(
        [[row["score"] for row in rows] for rows in found["result"]],
        [[row["score"] for row in rows] for rows in expected],
    )


@pytest.mark.parametrize("name", ["nli", "bert"])
@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_gives_torch_s_probabilities(exported, node, name, multi_label):
    classify = pipeline("zero-shot-classification", str(exported(name)))
    expected = classify(TEXTS, LABELS, multi_label=multi_label)
    [found] = node(
        job("zero-shot-classification", name, TEXTS, LABELS, {"multi_label": multi_label})
    )
    for ours, theirs in zip(found["result"], expected, strict=True):
        assert (ours["sequence"], ours["labels"]) == (theirs["sequence"], theirs["labels"])
        close(ours["scores"], theirs["scores"])


def test_each_token_has_torch_s_label(exported, node):
    expected = pipeline("token-classification", str(exported("names")), ignore_labels=[])(TEXTS)
    [found] = node(job("token-classification", "names", TEXTS, {"ignore_labels": []}))
    fields = ("entity", "index", "word")
    for ours, theirs in zip(found["result"], expected, strict=True):
        assert [[row[field] for field in fields] for row in ours] == [
            [row[field] for field in fields] for row in theirs if row["word"] not in ("<s>", "</s>")
        ]
        close(
            [row["score"] for row in ours],
            [row["score"] for row in theirs if row["word"] not in ("<s>", "</s>")],
        )


def test_questions_are_answered_as_torch_answers_them(exported, node):
    answer = pipeline("question-answering", str(exported("answers")))
    questions = ["who wins?", "who wants a boy and a dog?"]
    expected = [answer(question, context) for question, context in zip(questions, CONTEXTS)]
    [found] = node(job("question-answering", "answers", questions, CONTEXTS))
    # the tokenizer keeps no spaces
    plain = [re.sub(r"\W", "", each["answer"]) for each in expected]
    assert [re.sub(r"\W", "", each["answer"]) for each in found["result"]] == plain
    close([each["score"] for each in found["result"]], [each["score"] for each in expected])


def test_masks_are_filled_as_torch_fills_them(exported, node):
    texts = ["the <mask> wins", "who sees the old man and the <mask> dog?"]
    expected = pipeline("fill-mask", str(exported("mask")), top_k=4)(texts)
    [found] = node(job("fill-mask", "mask", texts, {"top_k": 4}))
    assert [[row["token"] for row in rows] for rows in found["result"]] == [
        [row["token"] for row in rows] for rows in expected
    ]
    close(
        [[row["score"] for row in rows] for rows in found["result"]],
        [[row["score"] for row in rows] for rows in expected],
    )


@pytest.mark.parametrize("name", ["features", "decoder-features", "mpnet"])
@torch.no_grad()
def test_features_are_torch_s(exported, node, name):
    tokenizer, model = (kind.from_pretrained(exported(name)) for kind in (AutoTokenizer, AutoModel))
    states = [model(**tokenizer(text, return_tensors="pt"))[0] for text in TEXTS]
    pooled, plain = node(
        job("feature-extraction", name, TEXTS, {"pooling": "mean", "normalize": True}),
        job("feature-extraction", name, TEXTS[0]),
    )
    close(
        pooled["result"],
        [torch.nn.functional.normalize(each[0].mean(0), dim=0).tolist() for each in states],
    )
    close(plain["result"], states[0].tolist())


def test_an_image_has_torch_s_label(exported, node, tmp_path):
    """The image has the size that the model reads, because Transformers.js resizes with another
    library."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    expected = pipeline("image-classification", str(exported("vit")), top_k=3)(
        str(tmp_path / "picture.png")
    )
    [found] = node(job("image-classification", "vit", str(tmp_path / "picture.png"), {"top_k": 3}))
    assert [row["label"] for row in found["result"]] == [row["label"] for row in expected]
    close([row["score"] for row in found["result"]], [row["score"] for row in expected])


@pytest.mark.parametrize("name", ["decoder", "characters", "opt"])
def test_a_decoder_continues_a_prompt_and_a_ragged_batch_as_torch_does(exported, node, name):
    checkpoint = exported(name)
    model = pipeline("text-generation", str(checkpoint))
    model.tokenizer.padding_side = "left"
    # both rows as long, for Transformers.js does not pad what ended
    options = {"max_new_tokens": 12, "min_new_tokens": 12}
    [found] = node(job("text-generation", name, TEXTS, options))
    # Transformers.js: none, unless tokenizer_config.json says add_bos_token
    own = {"add_special_tokens": name == "opt"}
    expected = [model(text, do_sample=False, **options, **own) for text in TEXTS]
    assert found["result"] == expected


def test_of_several_precisions_node_loads_the_first(both, node):
    first, only = node(
        job("text-classification", "both", TEXTS), job("text-classification", "labels-int8", TEXTS)
    )
    assert (first["loaded"], only["loaded"]) == ([FP32], [{**FP32, "dtype": "int8"}])
    assert first["result"] != only["result"]
    [expected] = node(job("text-classification", "labels", TEXTS))
    assert first["result"] == expected["result"]


@pytest.fixture(scope="module")
def both(exported, root):
    """The export `both`, which holds the graphs of the export `labels` and those of
    `labels-int8`."""
    exported("labels"), exported("labels", "int8")
    out = shutil.copytree(root / "exports/labels", root / "exports/both")
    shutil.copyfile(root / "exports/labels-int8/onnx/model_int8.onnx", out / "onnx/model_int8.onnx")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps(client_config(config, ["encoder"], ["fp32", "int8"]))
    )


def test_in_a_browser_a_translator_and_a_classifier_give_what_torch_gives(exported, browser):
    translate = pipeline("translation", str(exported(TRANSLATOR)))
    classify = pipeline("text-classification", str(exported(CLASSIFIER)), top_k=None)
    translated, classified = browser(
        job("translation", TRANSLATOR, ENGLISH),
        job("text-classification", CLASSIFIER, TEXTS, {"top_k": 2}),
    )
    assert translated["result"] == translate(ENGLISH, num_beams=1)
    assert translated["loaded"] == [{"dtype": "fp32", "device": "wasm"}] * 2
    expected = classify(TEXTS)
    assert [[row["label"] for row in rows] for rows in classified["result"]] == [
        [row["label"] for row in r] for r in expected
    ]
    close(
        [[row["score"] for row in rows] for rows in classified["result"]],
        [[row["score"] for row in r] for r in expected],
    )
    assert any(path.endswith(".wasm") for path in browser.paths)


def test_in_a_browser_int8_is_loaded_where_it_is(both, browser, node):
    alone, among = browser(
        job("text-classification", "labels-int8", TEXTS), job("text-classification", "both", TEXTS)
    )
    assert alone["loaded"] == among["loaded"] == [{"dtype": "int8", "device": "wasm"}]
    [expected] = node(job("text-classification", "labels-int8", TEXTS))
    for found in (alone, among):
        close(
            [row["score"] for row in found["result"]], [row["score"] for row in expected["result"]]
        )
    asked = {path for path in browser.paths if path.startswith("/exports/both/onnx/")}
    assert asked == {"/exports/both/onnx/model_int8.onnx"}


@pytest.mark.parametrize(
    "name", [TRANSLATOR, CLASSIFIER, "features", "mask", "names", "answers", "decoder", "seq2seq"]
)
def test_what_the_card_of_an_export_shows_runs(exported, root, name):
    exported(name)
    [snippet] = re.findall(
        r"```js\n(.*?)```", (root / "exports" / name / "README.md").read_text(), re.DOTALL
    )
    where = (
        f"import {{ env }} from '@huggingface/transformers'; env.localModelPath = "
        f"'{root / 'exports'}';"
    )
    code = f"{where} env.allowRemoteModels = false;\n{snippet.replace('NAME', name)}"
    command = ["node", "--input-type=module", "-e", code]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
