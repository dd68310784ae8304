"""Tests of language models as a training task: their blocks, batches and runs."""

import gzip
import math

import pytest
import torch
from messages import raises
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F
from training_texts import DECODER, VERSE
from transformers import AutoModelForCausalLM, AutoTokenizer

from vanilla_transformer import VanillaDecoderConfig, VanillaDecoderForCausalLM
from vanilla_transformer.errors import UsageError
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train
from vanilla_transformer.training.tasks import causal_lm, sequence_classification
from vanilla_transformer.training.tokenizer import train_tokenizer


def language_model(path, model=None, **training):
    data = {"train": str(path), "validation_fraction": 0.2, "block_size": 16}
    settings = dict(
        per_device_train_batch_size=8,
        max_steps=150,
        learning_rate=5e-3,
        warmup_steps=10,
        save_strategy="no",
        seed=0,
    )
    return Recipe(
        "causal-lm",
        data,
        {"kind": "character"},
        {**DECODER, **(model or {})},
        {**settings, **training},
    )


def test_token_batches_of_blocks_raise():
    training, blocks = {"tokens_per_update": 64}, {"block_size": 16}
    names = ("per_device_train_batch_size", "data.block_size")
    with raises(UsageError, seen=("training.tokens_per_update", 64), expected=names):
        Recipe("causal-lm", blocks, training=training)
    assert Recipe("causal-lm", {**blocks, "documents": "line"}, training=training)


@pytest.fixture
def verse(tmp_path):
    path = tmp_path / "verse.txt.gz"
    path.write_bytes(gzip.compress(VERSE.encode()))
    return path


def test_validation_fraction_takes_end_of_training_text(verse):
    data = {"train": str(verse), "validation_fraction": 0.2}
    [first], [last] = (
        causal_lm.read(data, "train")["text"],
        causal_lm.read(data, "validation")["text"],
    )
    assert first + last == VERSE
    assert len(first) == int(0.8 * len(VERSE))
    assert causal_lm.read(data, "test") is None
    assert causal_lm.read({"train": str(verse)}, "train")["text"] == [VERSE]
    assert causal_lm.read({"train": str(verse)}, "validation") is None


def test_training_has_every_window_and_validation_every_token_once(verse):
    tokenizer, _, rows = prepare(language_model(verse))
    ids = tokenizer(VERSE, add_special_tokens=False)["input_ids"]
    kept = int(0.8 * len(VERSE))
    assert len(rows["train"]) == kept - 16
    for index in (0, 5, len(rows["train"]) - 1):
        window = rows["train"][index]
        assert window["input_ids"].tolist() == ids[index : index + 16]
        assert (
            window["labels"].tolist()
            == window["shift_labels"].tolist()
            == ids[index + 1 : index + 17]
        )
    predicted = [token for row in rows["validation"] for token in row["labels"] if token != -100]
    assert predicted == ids[kept + 1 :]
    assert {len(row["input_ids"]) for row in rows["validation"]} == {16}


@pytest.mark.parametrize("length", range(5, 14))
def test_validation_predicts_every_token_after_first_once(length):
    ids = list(range(length))
    rows = causal_lm.examples({"input_ids": [ids]}, {"block_size": 4}, "validation")
    assert [token for row in rows for token in row["labels"] if token != -100] == ids[1:]


def test_language_model_learns_and_nll_covers_whole_validation_text(verse, tmp_path):
    metrics = train(language_model(verse), tmp_path / "model")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").double(),
        AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    ids = torch.tensor(tokenizer(VERSE, add_special_tokens=False)["input_ids"])[
        int(0.8 * len(VERSE)) :
    ]
    losses = []
    for start in range(0, len(ids) - 1, 16):
        piece = ids[start : start + 17]
        losses.append(
            F.cross_entropy(model(piece[None, :-1]).logits[0], piece[1:], reduction="none")
        )
    assert metrics["validation_nll"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)
    assert metrics["validation_perplexity"] == pytest.approx(math.exp(metrics["validation_nll"]))
    assert metrics["validation_nll"] < 1.0 < math.log(len(tokenizer))


def test_packed_documents_have_same_logits_as_single_documents():
    documents = [list(range(4, 4 + length)) for length in (5, 3, 9, 2, 30)]
    blocks = causal_lm.pack(documents, 12)
    model = VanillaDecoderForCausalLM(VanillaDecoderConfig(vocab_size=40, **DECODER)).eval()
    actual = []
    for block in blocks:
        assert {len(values) for values in block.values()} == {12}
        inputs = {name: torch.tensor([block[name]]) for name in ("input_ids", "position_ids")}
        logits, labels = model(**inputs, use_cache=False).logits[0], torch.tensor(block["labels"])
        actual += [
            (label.item(), row) for label, row in zip(labels, logits, strict=True) if label != -100
        ]
    pieces = [ids[start : start + 13] for ids in documents for start in range(0, len(ids) - 1, 12)]
    assert (
        len(actual)
        == sum(len(piece) - 1 for piece in pieces)
        == sum(len(ids) - 1 for ids in documents)
    )
    alone = [
        (label, row)
        for piece in pieces
        for label, row in zip(piece[1:], model(torch.tensor([piece[:-1]])).logits[0])
    ]
    for (label, row), (expected_label, expected) in zip(actual, alone, strict=True):
        assert label == expected_label
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-4)


def test_nll_of_packed_documents_is_that_of_single_documents(tmp_path):
    lines = [line for line in VERSE.split("\n") if line]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    recipe = language_model(tmp_path / "lines.txt", max_steps=20)
    del recipe.data["validation_fraction"]
    recipe.data |= {"validation": recipe.data["train"], "documents": "line", "block_size": 200}
    metrics = train(recipe, tmp_path / "model")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    assert model.config.use_cache
    losses = []
    for line in lines:
        ids = tokenizer(line)["input_ids"][1:] + [tokenizer.eos_token_id]
        logits = model(torch.tensor([tokenizer(line)["input_ids"]])).logits[0]
        losses.append(F.cross_entropy(logits, torch.tensor(ids), reduction="none"))
    assert metrics["validation_nll"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)


def test_line_documents_end_with_end_token(tmp_path):
    (tmp_path / "lines.txt").write_text(VERSE)
    recipe = language_model(tmp_path / "lines.txt")
    recipe.data |= {
        "documents": "line",
        "block_size": 64,
        "validation": str(tmp_path / "lines.txt"),
    }
    del recipe.data["validation_fraction"]
    tokenizer, _, rows = prepare(recipe)
    lines = VERSE.splitlines()
    predicted = [token for row in rows["train"] for token in row["labels"] if token != -100]
    assert predicted == [
        token
        for line in lines
        for token in [*tokenizer(line)["input_ids"][1:], tokenizer.eos_token_id]
    ]
    assert predicted.count(tokenizer.eos_token_id) == len(lines)
    # Tokenizers that add an end token after the text, or a special token before it.
    columns, expected = (
        {"text": [*lines, "a</s>"]},
        [[*tokenizer(line)["input_ids"], 2] for line in [*lines, "a</s>"]],
    )
    for front, back in (("", "</s>"), ("</s>", ""), ("<s>", "</s>")):
        around = TemplateProcessing(
            single=f"{front} $A {back}".strip(), special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        tokenizer.backend_tokenizer.post_processor = around
        actual = causal_lm.encode(columns, tokenizer, recipe.data)["input_ids"]
        added = [tokenizer.convert_tokens_to_ids(front)] if front else []
        assert actual == [added + ids for ids in expected]


def test_text_without_documents_raises(tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    data = {"train": "lines.txt", "validation": "empty.txt", "directory": str(tmp_path)}
    with raises(ValueError, seen="validation", expected="one document"):
        causal_lm.read(data | {"documents": "line"}, "validation")


def test_line_documents_without_end_token_raise():
    tokenizer = train_tokenizer(["the cat"], kind="character", variant="decoder")
    tokenizer.eos_token = None
    with raises(ValueError, expected=("data.documents", "line")):
        causal_lm.encode({"text": ["the cat"]}, tokenizer, {"documents": "line"})


def test_text_shorter_than_block_raises(tmp_path):
    (tmp_path / "short.txt").write_text("ab")
    recipe = language_model(tmp_path / "short.txt")
    del recipe.data["validation_fraction"]
    with raises(ValueError, seen=2, expected=("block_size", 16)):
        prepare(recipe)


def test_label_numbers_get_label_names_of_recipe(tmp_path):
    (tmp_path / "train").write_text("0 what is it\n1 who is it\n0 why is it\n")
    (tmp_path / "test").write_text("2 when is it\n")
    files = {split: str(tmp_path / split) for split in ("train", "test")}
    data = {**files, "label_names": ["HUM", "ABBR", "a number"]}
    recipe = Recipe(
        "sequence-classification",
        data,
        {"kind": "word", "vocab_size": 10},
        {"num_hidden_layers": 1},
    )
    tokenizer, model, rows = prepare(recipe)
    assert model.config.id2label == {0: "HUM", 1: "ABBR", 2: "a number"}
    assert model.config.label2id == {"HUM": 0, "ABBR": 1, "a number": 2}
    batch = sequence_classification.collator(tokenizer, model)([*rows["train"], *rows["test"]])
    assert batch["labels"].tolist() == [0, 1, 0, 2]
    (tmp_path / "train").write_text("0 what is it\n3 who is it\n")
    with raises(ValueError, seen=("train", 2, 3), expected=(0, 2, "data.label_names")):
        prepare(recipe)
    recipe.data["skip_bad_rows"] = True
    assert sequence_classification.read(recipe.data, "train")["label"] == ["HUM"]
    with raises(UsageError, seen=("data.label_names", "A")):
        Recipe("sequence-classification", {**files, "label_names": ["A", "A"]})
