"""Tests of token classification as a training task: labels, spans and runs."""

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from messages import raises
from training_texts import ENCODER, TRAINING
from transformers import AutoModelForTokenClassification, AutoTokenizer

from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train
from vanilla_transformer.training.tasks import token_classification
from vanilla_transformer.training.tasks.task import Scored

SENTENCES = [
    [(name, "B-PER"), ("saw", "O"), *place, (".", "O")]
    for name in ("Ann", "Bob", "Eve")
    for place in (
        [("Rome", "B-LOC")],
        [("New", "B-LOC"), ("York", "I-LOC")],
        [("Acme", "B-ORG"), ("Ltd", "I-ORG")],
    )
]
CONLL = "\n".join("".join(f"{word} {tag}\n" for word, tag in sentence) for sentence in SENTENCES)


def tagger(path):
    data, training = (
        {"train": str(path), "validation": str(path)},
        {"tokens_per_update": 128, "num_train_epochs": 40},
    )
    return Recipe(
        "token-classification",
        data,
        {"kind": "bpe", "vocab_size": 36},
        ENCODER,
        {**TRAINING, **training},
    )


@pytest.fixture
def conll(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(CONLL)
    return path


def test_conll_file_is_read_with_last_column_as_tag(tmp_path):
    text = "-DOCSTART- -X- -X- O\n\nEU\tNNP\tB-ORG\nrejects VBZ  O\n\n\nPeter NNP B-PER\n"
    for newline in ("\n", "\r\n"):
        (tmp_path / "a.txt").write_bytes(text.replace("\n", newline).encode())
        rows = token_classification.read({"train": str(tmp_path / "a.txt")}, "train")
        assert rows.to_dict() == {
            "words": [["EU", "rejects"], ["Peter"]],
            "tags": [["B-ORG", "O"], ["B-PER"]],
        }
    assert token_classification.read({"train": "a.txt"}, "test") is None


def test_dataset_of_tagged_words_matches_conll_file(tmp_path, conll):
    expected = token_classification.read({"train": str(conll)}, "train").to_dict()
    names = ["O", "B-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"]
    ids = [[names.index(tag) for tag in tags] for tags in expected["tags"]]
    features = Features(
        tokens=List(Value("string")), ner_tags=List(ClassLabel(names=names)), id=Value("int64")
    )
    rows = Dataset.from_dict(
        {"tokens": expected["words"], "ner_tags": ids, "id": range(len(ids))}, features=features
    )
    DatasetDict(train=rows).save_to_disk(tmp_path / "saved")
    data = {"dataset": str(tmp_path / "saved")}
    assert token_classification.read(data, "train").to_dict() == expected
    assert token_classification.read(data, "test") is None
    with raises(ValueError, seen="pos", expected=("id", "ner_tags", "tokens")):
        token_classification.read(data | {"columns": ["tokens", "pos"]}, "train")


def test_dataset_tags_may_be_numbers_but_not_missing(tmp_path):
    columns = {"tokens": [["a", "b"], None], "ner_tags": [[0, 1], None]}
    DatasetDict(train=Dataset.from_dict(columns)).save_to_disk(tmp_path / "saved")
    data = {"dataset": str(tmp_path / "saved")}
    with raises(ValueError, seen=("row", 1, "words")):
        token_classification.read(data, "train")
    rows = token_classification.read(data | {"skip_bad_rows": True}, "train")
    assert rows.to_dict() == {"words": [["a", "b"]], "tags": [["0", "1"]]}


def test_word_tag_is_assigned_to_first_piece(conll):
    tokenizer, model, rows = prepare(tagger(conll))
    row = rows["train"][3]
    pieces = tokenizer.convert_ids_to_tokens(row["input_ids"])
    first = [index for index, piece in enumerate(pieces) if piece.startswith("▁")]
    assert len(first) == 4 < len(pieces) - 2  # Bob saw Rome . in more than four pieces
    assert {index: tag for index, tag in enumerate(row["labels"]) if tag is not None} == dict(
        zip(first, ["B-PER", "O", "B-LOC", "O"], strict=True)
    )
    batch = token_classification.collator(tokenizer, model)(
        [rows["train"][index] for index in (0, 3, 4)]
    )
    names = [
        [model.config.id2label.get(label) for label in labels.tolist()]
        for labels in batch["labels"]
    ]
    width = batch["input_ids"].shape[1]
    expected = [rows["train"][index]["labels"] for index in (0, 3, 4)]
    assert names == [labels + [None] * (width - len(labels)) for labels in expected]
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


def test_tagger_learns_entities_of_two_words(conll, tmp_path):
    metrics = train(tagger(conll), tmp_path / "model")
    assert [
        metrics[f"validation_{name}"] for name in ("accuracy", "precision", "recall", "f1")
    ] == [1.0] * 4
    model, tokenizer = (
        AutoModelForTokenClassification.from_pretrained(tmp_path / "model"),
        AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    inputs = tokenizer(
        ["Eve", "saw", "New", "York", "."], is_split_into_words=True, return_tensors="pt"
    )
    tags = [model.config.id2label[label] for label in model(**inputs).logits[0].argmax(-1).tolist()]
    words = inputs.word_ids()
    assert [tags[words.index(word)] for word in range(5)] == ["B-PER", "O", "B-LOC", "I-LOC", "O"]


@pytest.mark.parametrize(
    "tags, expected",
    [
        ("B-X I-X O B-X", {("X", 0, 2), ("X", 3, 4)}),
        ("B-X B-X I-X", {("X", 0, 1), ("X", 1, 3)}),
        ("I-X I-X O I-Y", {("X", 0, 2), ("Y", 3, 4)}),  # IOB1: I after O begins an entity
        ("B-X I-Y I-Y O", {("X", 0, 1), ("Y", 1, 3)}),  # I after another type, too
        ("O O", set()),
    ],
)
def test_entities_follow_conlleval(tags, expected):
    assert token_classification.entities(tags.split()) == expected


def test_entity_scores():
    gold = [["B-X", "I-X", "O", "B-Y"], ["B-Y", "O"]]
    result = [["B-X", "O", "O", "B-Y"], ["B-Y", "B-Y"]]
    assert token_classification.scores_of_entities(result, gold) == {
        "precision": 0.5,
        "recall": 2 / 3,
        "f1": 4 / 7,
    }
    assert token_classification.scores_of_entities([["B-X"]], [["B-X"]]) == {
        "precision": 1.0,
        "recall": 1.0,
        "f1": 1.0,
    }
    assert token_classification.scores_of_entities([["O"]], [["O"]]) == {
        "precision": 0.0,
        "recall": 0.0,
        "f1": 0.0,
    }
    names = ["B-X", "B-Y", "I-X", "O"]
    ids = [
        np.array([[-100, *map(names.index, row)] + [-100] * (4 - len(row)) for row in rows])
        for rows in (result, gold)
    ]
    ids[0][ids[0] == -100] = 1  # a model predicts a tag everywhere
    for labels, scores in (
        (names, {"precision", "recall", "f1"}),
        (["NN", "VB", "DT", "IN"], set()),
    ):
        config = token_classification.TASK.config(
            id2label=dict(enumerate(labels)), label2id={n: i for i, n in enumerate(labels)}
        )
        tag_metrics = token_classification.metrics(ids, Scored([], None, config, {}))
        assert tag_metrics["accuracy"] == 4 / 6
        assert tag_metrics.keys() == {"accuracy", *scores}
        assert tag_metrics.get("f1", 4 / 7) == 4 / 7


@pytest.mark.parametrize("separator", ["\t", " "])
def test_comments_of_conll_files_are_no_words(tmp_path, separator):
    comments = "# sent_id = 1\n#\n# text = they run\n#global.columns = ID FORM\n"
    words = "they PRP O\n# SYM O\nrun VBP B-X\n".replace(" ", separator)
    first = "# SYM O\nfun NN O\n".replace(" ", separator)  # a hash with a tag
    path = tmp_path / "train.txt"
    path.write_text(f"{comments}{words}\n{comments}{first}")
    rows = token_classification.read({"train": str(path)}, "train")
    assert rows.to_dict() == {
        "words": [["they", "#", "run"], ["#", "fun"]],
        "tags": [["O", "O", "B-X"], ["O", "O"]],
    }
    path.write_text(f"{words}#comment\n")  # within a sentence
    with raises(ValueError, seen=(path, "line 4", "#comment")):
        token_classification.read({"train": str(path)}, "train")


def test_invalid_conll_files_and_unknown_tags_raise(conll, tmp_path):
    (tmp_path / "bad.txt").write_text("EU B-ORG\nrejects\n")
    with raises(ValueError, seen=("bad.txt", 2, "rejects")):
        token_classification.read({"train": str(tmp_path / "bad.txt")}, "train")
    (tmp_path / "bad.txt").write_text("\n\n")
    with raises(ValueError, seen="bad.txt"):
        token_classification.read({"train": str(tmp_path / "bad.txt")}, "train")
    (tmp_path / "bad.txt").write_text("EU B-MISC\n")
    recipe = tagger(conll)
    recipe.data["validation"] = str(tmp_path / "bad.txt")
    with raises(ValueError, seen=("validation", "B-MISC"), expected="B-LOC"):
        prepare(recipe)
