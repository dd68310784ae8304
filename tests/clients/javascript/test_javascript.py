"""Tests of Transformers.js without options, in Node and in a browser, against torch pipelines."""

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


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def test_translation_matches_torch(exported, node):
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
def test_encoder_decoder_text_matches_torch(exported, node, task, name):
    torch_pipeline = pipeline(task, str(exported(name)))
    for text in TEXTS:
        [actual] = node(job(task, name, text, {"max_new_tokens": 12}))
        assert actual["result"] == torch_pipeline(text, max_new_tokens=12, num_beams=1)


@pytest.mark.parametrize("name", [CLASSIFIER, "labels", "decoder-labels", "bert"])
def test_text_classification_matches_torch(exported, node, name):
    expected = pipeline("text-classification", str(exported(name)), top_k=None)(TEXTS)
    [actual] = node(job("text-classification", name, TEXTS, {"top_k": 3}))
    assert [[row["label"] for row in rows] for rows in actual["result"]] == [
        [row["label"] for row in rows] for rows in expected
    ]
    assert_close(
        [[row["score"] for row in rows] for rows in actual["result"]],
        [[row["score"] for row in rows] for rows in expected],
    )


@pytest.mark.parametrize("name", ["nli", "bert"])
@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_classification_matches_torch(exported, node, name, multi_label):
    classify = pipeline("zero-shot-classification", str(exported(name)))
    expected = classify(TEXTS, LABELS, multi_label=multi_label)
    [actual] = node(
        job("zero-shot-classification", name, TEXTS, LABELS, {"multi_label": multi_label})
    )
    for ours, theirs in zip(actual["result"], expected, strict=True):
        assert (ours["sequence"], ours["labels"]) == (theirs["sequence"], theirs["labels"])
        assert_close(ours["scores"], theirs["scores"])


def test_token_classification_matches_torch(exported, node):
    expected = pipeline("token-classification", str(exported("names")), ignore_labels=[])(TEXTS)
    [actual] = node(job("token-classification", "names", TEXTS, {"ignore_labels": []}))
    fields = ("entity", "index", "word")
    for ours, theirs in zip(actual["result"], expected, strict=True):
        assert [[row[field] for field in fields] for row in ours] == [
            [row[field] for field in fields] for row in theirs if row["word"] not in ("<s>", "</s>")
        ]
        assert_close(
            [row["score"] for row in ours],
            [row["score"] for row in theirs if row["word"] not in ("<s>", "</s>")],
        )


def test_question_answering_matches_torch(exported, node):
    answer = pipeline("question-answering", str(exported("answers")))
    questions = ["who wins?", "who wants a boy and a dog?"]
    expected = [answer(question, context) for question, context in zip(questions, CONTEXTS)]
    [actual] = node(job("question-answering", "answers", questions, CONTEXTS))
    # the tokenizer keeps no spaces
    plain = [re.sub(r"\W", "", each["answer"]) for each in expected]
    assert [re.sub(r"\W", "", each["answer"]) for each in actual["result"]] == plain
    assert_close([each["score"] for each in actual["result"]], [each["score"] for each in expected])


def test_fill_mask_matches_torch(exported, node):
    texts = ["the <mask> wins", "who sees the old man and the <mask> dog?"]
    expected = pipeline("fill-mask", str(exported("mask")), top_k=4)(texts)
    [actual] = node(job("fill-mask", "mask", texts, {"top_k": 4}))
    assert [[row["token"] for row in rows] for rows in actual["result"]] == [
        [row["token"] for row in rows] for rows in expected
    ]
    assert_close(
        [[row["score"] for row in rows] for rows in actual["result"]],
        [[row["score"] for row in rows] for rows in expected],
    )


@pytest.mark.parametrize("name", ["features", "decoder-features", "mpnet"])
@torch.no_grad()
def test_feature_extraction_matches_torch(exported, node, name):
    tokenizer, model = (kind.from_pretrained(exported(name)) for kind in (AutoTokenizer, AutoModel))
    states = [model(**tokenizer(text, return_tensors="pt"))[0] for text in TEXTS]
    pooled, plain = node(
        job("feature-extraction", name, TEXTS, {"pooling": "mean", "normalize": True}),
        job("feature-extraction", name, TEXTS[0]),
    )
    assert_close(
        pooled["result"],
        [torch.nn.functional.normalize(each[0].mean(0), dim=0).tolist() for each in states],
    )
    assert_close(plain["result"], states[0].tolist())


def test_image_classification_matches_torch(exported, node, tmp_path):
    """The image has the size that the model reads, because Transformers.js resizes with another
    library."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    expected = pipeline("image-classification", str(exported("vit")), top_k=3)(
        str(tmp_path / "picture.png")
    )
    [actual] = node(job("image-classification", "vit", str(tmp_path / "picture.png"), {"top_k": 3}))
    assert [row["label"] for row in actual["result"]] == [row["label"] for row in expected]
    assert_close([row["score"] for row in actual["result"]], [row["score"] for row in expected])


@pytest.mark.parametrize("name", ["decoder", "grouped", "characters", "opt"])
def test_text_generation_of_prompt_and_ragged_batch_matches_torch(exported, node, name):
    checkpoint = exported(name)
    model = pipeline("text-generation", str(checkpoint))
    model.tokenizer.padding_side = "left"
    # both rows have the same length, because Transformers.js does not pad finished rows
    options = {"max_new_tokens": 12, "min_new_tokens": 12}
    single, batch = node(
        job("text-generation", name, TEXTS[1], options),
        job("text-generation", name, TEXTS, options),
    )
    # Transformers.js adds special tokens only if tokenizer_config.json has add_bos_token
    tokenizer_options = {"add_special_tokens": name == "opt"}
    expected = [model(text, do_sample=False, **options, **tokenizer_options) for text in TEXTS]
    assert (single["result"], batch["result"]) == (expected[1], expected)


def test_node_loads_first_of_several_dtypes(both, node):
    first, only = node(
        job("text-classification", "both", TEXTS), job("text-classification", "labels-int8", TEXTS)
    )
    assert (first["loaded"], only["loaded"]) == ([FP32], [{**FP32, "dtype": "int8"}])
    assert first["result"] != only["result"]
    [expected] = node(job("text-classification", "labels", TEXTS))
    assert first["result"] == expected["result"]


@pytest.fixture(scope="module")
def both(exported, root):
    """Write the export `both` with the graphs of the exports `labels` and `labels-int8`."""
    exported("labels"), exported("labels", "int8")
    out = shutil.copytree(root / "exports/labels", root / "exports/both")
    shutil.copyfile(root / "exports/labels-int8/onnx/model_int8.onnx", out / "onnx/model_int8.onnx")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps(client_config(config, ["encoder"], ["fp32", "int8"]))
    )


def test_browser_translation_and_classification_match_torch(exported, browser):
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
    assert_close(
        [[row["score"] for row in rows] for rows in classified["result"]],
        [[row["score"] for row in r] for r in expected],
    )
    assert any(path.endswith(".wasm") for path in browser.paths)


def test_browser_loads_int8_if_available(both, browser, node):
    alone, among = browser(
        job("text-classification", "labels-int8", TEXTS), job("text-classification", "both", TEXTS)
    )
    assert alone["loaded"] == among["loaded"] == [{"dtype": "int8", "device": "wasm"}]
    [expected] = node(job("text-classification", "labels-int8", TEXTS))
    for actual in (alone, among):
        assert_close(
            [row["score"] for row in actual["result"]], [row["score"] for row in expected["result"]]
        )
    requested = {path for path in browser.paths if path.startswith("/exports/both/onnx/")}
    assert requested == {"/exports/both/onnx/model_int8.onnx"}


@pytest.mark.parametrize(
    "name", [TRANSLATOR, CLASSIFIER, "features", "mask", "names", "answers", "decoder", "seq2seq"]
)
def test_export_card_snippet_runs(exported, root, name):
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
