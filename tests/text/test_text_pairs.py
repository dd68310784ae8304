"""Pairs of texts: a tokenizer that we train gives token types to a model that has some, and to no
other."""

import numpy as np
import pytest
import torch
from checkpoints import OPINIONS
from messages import raises
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer, BertTokenizer, pipeline

from vanilla_transformer import (
    VanillaEncoderConfig,
    VanillaEncoderForQuestionAnswering,
    VanillaEncoderForSequenceClassification,
)
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer_export import Runtime, export

FIRST, SECOND = "the film good", "the plot"
SHAPE = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
LABELS = ["contradiction", "neutral", "entailment"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A number of token types -> the checkpoint of a classifier of pairs, as a recipe makes it."""
    root = tmp_path_factory.mktemp("pairs")
    (root / "train").write_text("\n".join(OPINIONS) + "\n")

    def make(types):
        directory = root / str(types)
        if not directory.exists():
            fields = {**SHAPE, **({"type_vocab_size": types} if types else {})}
            recipe = Recipe(
                "sequence-classification",
                {"train": str(root / "train")},
                {"vocab_size": 40},
                fields,
            )
            tokenizer, model, _ = prepare(recipe)
            config = VanillaEncoderConfig(
                **{**model.config.to_dict(), "id2label": dict(enumerate(LABELS))}
            )
            torch.manual_seed(0)
            model = VanillaEncoderForSequenceClassification(config)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        return directory

    return make


@torch.no_grad()
def logits(directory, first, second):
    """Return the logits of a pair of texts, whose ids are put together by hand."""
    model = VanillaEncoderForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    one, other = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (first, second)
    )
    ids = [1, *one, 2, *other, 2]
    types = [0] * (len(one) + 2) + [1] * (len(other) + 1)
    given = {"token_type_ids": torch.tensor([types])} if model.config.type_vocab_size > 1 else {}
    return model(torch.tensor([ids]), **given).logits[0]


@pytest.mark.parametrize("types", [0, 1, 2])
def test_only_a_model_with_several_types_gets_them(made, types):
    tokenizer = AutoTokenizer.from_pretrained(made(types))
    pair = tokenizer(FIRST, SECOND)
    assert list(pair) == ["input_ids", *(["token_type_ids"] if types > 1 else []), "attention_mask"]
    assert set(tokenizer(FIRST, SECOND, return_token_type_ids=True)["token_type_ids"]) == (
        {0, 1} if types > 1 else {0}
    )
    # what TEI and browsers read
    assert max(tokenizer.backend_tokenizer.encode(FIRST, SECOND).type_ids) == (types > 1)


@pytest.mark.parametrize("types", [0, 1, 2])
def test_pipelines_and_cross_encoders_take_pairs(made, types):
    directory = str(made(types))
    expected = logits(directory, FIRST, SECOND)
    classify = pipeline("text-classification", directory)
    actual = classify({"text": FIRST, "text_pair": SECOND}, function_to_apply="none", top_k=None)
    assert {one["label"]: one["score"] for one in actual} == pytest.approx(
        dict(zip(LABELS, expected.tolist())), abs=1e-5
    )
    scores = CrossEncoder(directory, device="cpu").predict(
        [(FIRST, SECOND)], activation_fn=torch.nn.Identity()
    )
    np.testing.assert_allclose(scores[0], expected, atol=1e-5)
    names = ["film", "plot"]
    choose = pipeline("zero-shot-classification", directory)
    actual = choose(FIRST, names, hypothesis_template="the {}")
    chances = (
        torch.stack([logits(directory, FIRST, f"the {name}")[2] for name in names])
        .softmax(0)
        .tolist()
    )
    assert dict(zip(actual["labels"], actual["scores"])) == pytest.approx(
        dict(zip(names, chances)), abs=1e-5
    )


@pytest.mark.parametrize("types", [0, 2])
def test_exports_read_pairs_as_the_model_does(made, types, tmp_path):
    export(made(types), tmp_path / "onnx", cases=2)
    runtime, pair = (
        Runtime(tmp_path / "onnx", threads=1),
        AutoTokenizer.from_pretrained(made(types))(FIRST, SECOND),
    )
    actual = runtime.outputs(**{name: np.array([values]) for name, values in pair.items()})[
        "logits"
    ]
    np.testing.assert_allclose(actual[0], logits(made(types), FIRST, SECOND), atol=1e-4)
    last = np.full((1, len(pair["input_ids"])), types or 1)
    expected = (0, 1) if types else "input_ids"
    with raises(ValueError, seen="token_type_ids", expected=expected):
        runtime.outputs(np.array([pair["input_ids"]]), token_type_ids=last)


def test_questions_are_answered_without_types(made, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(made(0))
    model = VanillaEncoderForQuestionAnswering(
        VanillaEncoderConfig(vocab_size=len(tokenizer), **SHAPE)
    )
    torch.nn.init.normal_(model.qa_outputs.weight, std=0.6)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = pipeline("question-answering", str(tmp_path))(question=SECOND, context=FIRST)
    assert FIRST[result["start"] : result["end"]] == result["answer"] and result["answer"]


def test_a_foreign_tokenizer_with_types_is_an_error_that_names_the_field(made, tmp_path):
    model = VanillaEncoderForSequenceClassification.from_pretrained(made(0))
    model.save_pretrained(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *FIRST.split(), "plot"]
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(tmp_path)
    with raises(ValueError, seen=(1, "type_vocab_size", 0)):
        pipeline("text-classification", str(tmp_path))({"text": FIRST, "text_pair": SECOND})
