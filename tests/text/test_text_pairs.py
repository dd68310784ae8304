"""Tests of text pairs: tokenizers return token types only for models with token types."""

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
def build_checkpoint(tmp_path_factory):
    """Return a function that builds a classifier checkpoint for a number of token types."""
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
    """Return the logits of a pair of texts, with its input ids built by hand."""
    model = VanillaEncoderForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    one, other = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (first, second)
    )
    ids = [1, *one, 2, *other, 2]
    types = [0] * (len(one) + 2) + [1] * (len(other) + 1)
    type_inputs = (
        {"token_type_ids": torch.tensor([types])} if model.config.type_vocab_size > 1 else {}
    )
    return model(torch.tensor([ids]), **type_inputs).logits[0]


@pytest.mark.parametrize("types", [0, 1, 2])
def test_token_type_ids_are_returned_only_for_models_with_types(build_checkpoint, types):
    tokenizer = AutoTokenizer.from_pretrained(build_checkpoint(types))
    pair = tokenizer(FIRST, SECOND)
    assert list(pair) == ["input_ids", *(["token_type_ids"] if types > 1 else []), "attention_mask"]
    assert set(tokenizer(FIRST, SECOND, return_token_type_ids=True)["token_type_ids"]) == (
        {0, 1} if types > 1 else {0}
    )
    # TEI and browsers read tokenizer.json
    assert max(tokenizer.backend_tokenizer.encode(FIRST, SECOND).type_ids) == (types > 1)


@pytest.mark.parametrize("types", [0, 1, 2])
def test_pipelines_and_cross_encoder_match_model_on_pairs(build_checkpoint, types):
    directory = str(build_checkpoint(types))
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
    probabilities = (
        torch.stack([logits(directory, FIRST, f"the {name}")[2] for name in names])
        .softmax(0)
        .tolist()
    )
    assert dict(zip(actual["labels"], actual["scores"])) == pytest.approx(
        dict(zip(names, probabilities)), abs=1e-5
    )


@pytest.mark.parametrize("types", [0, 2])
def test_export_matches_model_on_pairs(build_checkpoint, types, tmp_path):
    export(build_checkpoint(types), tmp_path / "onnx", cases=2)
    runtime, pair = (
        Runtime(tmp_path / "onnx", threads=1),
        AutoTokenizer.from_pretrained(build_checkpoint(types))(FIRST, SECOND),
    )
    actual = runtime.outputs(**{name: np.array([values]) for name, values in pair.items()})[
        "logits"
    ]
    np.testing.assert_allclose(actual[0], logits(build_checkpoint(types), FIRST, SECOND), atol=1e-4)
    last = np.full((1, len(pair["input_ids"])), types or 1)
    expected = (0, 1) if types else "input_ids"
    with raises(ValueError, seen="token_type_ids", expected=expected):
        runtime.outputs(np.array([pair["input_ids"]]), token_type_ids=last)


def test_question_answering_works_without_token_types(build_checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(build_checkpoint(0))
    model = VanillaEncoderForQuestionAnswering(
        VanillaEncoderConfig(vocab_size=len(tokenizer), **SHAPE)
    )
    torch.nn.init.normal_(model.qa_outputs.weight, std=0.6)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = pipeline("question-answering", str(tmp_path))(question=SECOND, context=FIRST)
    assert FIRST[result["start"] : result["end"]] == result["answer"] and result["answer"]


def test_tokenizer_with_types_for_model_without_types_raises(build_checkpoint, tmp_path):
    model = VanillaEncoderForSequenceClassification.from_pretrained(build_checkpoint(0))
    model.save_pretrained(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *FIRST.split(), "plot"]
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(tmp_path)
    with raises(ValueError, seen=(1, "type_vocab_size", 0)):
        pipeline("text-classification", str(tmp_path))({"text": FIRST, "text_pair": SECOND})
