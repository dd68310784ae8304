"""Tests of our `pipeline` over exports, against transformers over the torch checkpoint."""

import pytest
import transformers
from heads import close
from messages import raises
from PIL import Image
from plain import plain

from vanilla_transformer_export.ort_models import ORTModelForSequenceClassification, pipeline

TEXTS = ["the old man sees a red house", "two dogs run"]
SHORT = {"max_new_tokens": 8}
# task: (checkpoint, inputs, arguments)
TASKS = {
    "text-classification": ("classify", [TEXTS], {"top_k": None}),
    "zero-shot-classification": ("classify", [TEXTS[0], ["red", "old"]], {}),
    "token-classification": ("tag", [TEXTS], {"aggregation_strategy": "simple"}),
    "question-answering": ("answer", ["who is old", TEXTS[0]], {}),
    "fill-mask": ("fill-mask", ["the [MASK] man"], {"top_k": 3}),
    "feature-extraction": ("states", [TEXTS], {}),
    "image-classification": ("images", [Image.new("RGB", (20, 24), "red")], {}),
    "text-generation": ("causal", TEXTS[:1], {"do_sample": False, **SHORT}),
    "translation": ("seq2seq", [TEXTS], {"batch_size": 2, **SHORT}),
    "translation_en_to_de": ("seq2seq", [TEXTS], SHORT),
    "summarization": ("seq2seq", [TEXTS], {"num_beams": 1, **SHORT}),
    "text2text-generation": ("seq2seq", [TEXTS], {"num_return_sequences": 2, **SHORT}),
}


@pytest.mark.parametrize("task", TASKS)
def test_pipeline_matches_torch(saved, task, capfd):
    name, inputs, arguments = TASKS[task]
    exported = saved(name)
    actual = pipeline(task, model=exported.directory)(*inputs, **arguments)
    expected = transformers.pipeline(task, model=str(exported.checkpoint))(*inputs, **arguments)
    close(plain(actual), plain(expected), absolute=1e-4)
    assert "is not supported" not in capfd.readouterr().err


def test_saved_pipeline_gives_same_results(saved, tmp_path):
    pipe = pipeline("text-classification", model=saved("classify").directory)
    pipe.save_pretrained(tmp_path)
    again = pipeline("text-classification", model=tmp_path)
    assert again(TEXTS) == pipe(TEXTS)
    assert "ORTModelForSequenceClassification" in repr(again)
    images = pipeline("image-classification", model=saved("images").directory)
    images.save_pretrained(tmp_path / "images")
    picture = Image.new("RGB", (20, 24), "blue")
    again = pipeline("image-classification", model=tmp_path / "images")
    assert again(picture) == images(picture)


def test_pipeline_accepts_model_tokenizer_and_model_kwargs(saved):
    directory = saved("classify").directory
    model = ORTModelForSequenceClassification.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    expected = pipeline("sentiment-analysis", model=model)(TEXTS)
    actual = pipeline(
        "text-classification",
        model=directory,
        tokenizer=tokenizer,
        model_kwargs={"file_name": "model.onnx"},
    )
    assert actual.tokenizer is tokenizer
    assert actual(TEXTS) == expected


def test_unsupported_task_raises(saved):
    directory = saved("classify").directory
    with raises(KeyError, seen="no-task", expected="text-classification"):
        pipeline("no-task", model=directory)
    classes = ("AutoModelForSeq2SeqLM", "AutoModelForImageClassification")
    with raises(
        ValueError, seen=("depth-estimation", "AutoModelForDepthEstimation"), expected=classes
    ):
        pipeline("depth-estimation", model=directory)
    names = [f"Vanilla{stack}ForTokenClassification" for stack in ("Encoder", "Decoder")]
    with raises(ValueError, seen="VanillaEncoderForSequenceClassification", expected=tuple(names)):
        pipeline("ner", model=directory)


def test_tokenizer_that_does_not_fit_model_raises(saved):
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved("classify").directory)
    pipe = pipeline("translation", model=saved("seq2seq").directory, tokenizer=tokenizer)
    text = "the old man , the river house"
    with raises(ValueError, seen=(max(tokenizer(text)["input_ids"]), 48)):
        pipe(text)
