"""Tests of masked-LM, pretraining and sequence classification as training tasks."""

import math
from itertools import chain

import numpy as np
import pytest
import torch
from checkpoints import OPINIONS
from messages import raises
from training_texts import ENCODER, RANDOM, VERSE
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from vanilla_transformer.training.augment import AugmentedDataset, build_augmentation
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train
from vanilla_transformer.training.tasks import masked_lm, pretraining, sequence_classification
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer.training.trainer import make_trainer, training_arguments

# ---------------------------------------------------------------------------------------- masked-lm


def masked_recipe(path, training):
    tokenizer = {"kind": "bpe", "vocab_size": 45}
    return Recipe("masked-lm", {"train": str(path)}, tokenizer, ENCODER, training)


def test_whole_words_are_masked_at_bert_rates():
    lines = VERSE.splitlines()
    tokenizer = train_tokenizer(lines, 36, variant="encoder")  # some words are several pieces
    rows = masked_lm.encode({"text": lines * 40}, tokenizer, {})
    batch = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    actual = masked_lm.collator(tokenizer, None)(
        [masked_lm.augment(row, RANDOM, tokenizer) for row in batch]
    )
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row["input_ids"]) for row in batch], batch_first=True
    )
    words = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row["labels"]) for row in batch], True, -1
    )
    selected = actual["labels"] != -100
    assert torch.equal(actual["labels"][selected], ids[selected])
    assert torch.equal(actual["input_ids"][~selected], ids[~selected])
    assert not (selected & (words == -1)).any()
    for row_words, row_selected in zip(words, selected):
        for word in row_words.unique():
            assert len(row_selected[row_words == word].unique()) == 1
    assert max((words[0] == word).sum() for word in range(5)) > 1
    count = selected.sum().item()
    expected = 0.15 + 0.85**6 / 6  # if no word is drawn, one of the six is masked
    assert count / (words >= 0).sum().item() == pytest.approx(expected, abs=0.02)
    assert (
        actual["input_ids"][selected] == tokenizer.mask_token_id
    ).sum().item() / count == pytest.approx(0.8, abs=0.04)
    assert (actual["input_ids"][selected] == ids[selected]).sum().item() / count == pytest.approx(
        0.1, abs=0.04
    )


def test_short_row_has_at_least_one_masked_word():
    tokenizer = train_tokenizer(["the cat"], kind="character", variant="encoder")
    row = {"input_ids": [1, 7, 8, 9, 2], "labels": [-1, 0, 1, 2, -1]}
    counts = [
        sum(label != -100 for label in masked_lm.augment(row, RANDOM, tokenizer)["labels"])
        for _ in range(200)
    ]
    assert min(counts) == 1 and max(counts) > 1


def test_training_masks_change_each_epoch_and_validation_masks_do_not(tmp_path):
    (tmp_path / "text.txt").write_text(VERSE)
    files = {"train": str(tmp_path / "text.txt"), "validation": str(tmp_path / "text.txt")}
    recipe = Recipe("masked-lm", files, {"kind": "bpe", "vocab_size": 45}, ENCODER, {"seed": 3})
    tokenizer, _, rows = prepare(recipe)
    augmented = AugmentedDataset(
        rows["train"], build_augmentation(recipe, tokenizer, rows["train"]), seed=3
    )
    every = list(range(len(augmented)))
    first = augmented.__getitems__(every)
    assert augmented.__getitems__(every[::-1])[::-1] == first
    augmented.set_epoch(1)
    assert augmented.__getitems__(every) != first
    assert (
        AugmentedDataset(
            rows["train"], build_augmentation(recipe, tokenizer, rows["train"]), seed=4
        ).__getitems__(every)
        != first
    )
    assert tokenizer.mask_token_id in chain(*rows["validation"]["input_ids"])
    assert list(prepare(recipe)[2]["validation"]) == list(rows["validation"])


@torch.no_grad()
def test_packed_texts_have_same_logits_as_single_texts(tmp_path):
    (tmp_path / "text.txt").write_text(
        "the cat\nthe dog saw the cat\na mouse\nthe bone ate the dog\n" * 5
    )
    recipe = Recipe(
        "masked-lm",
        {"train": str(tmp_path / "text.txt")},
        {"kind": "bpe", "vocab_size": 32},
        ENCODER,
    )
    tokenizer, model, alone = prepare(recipe)
    recipe.data["block_size"] = 24
    [blocks] = prepare(recipe)[2].values()
    assert (
        max(map(len, blocks["input_ids"]))
        <= 24
        < len(blocks[0]["input_ids"]) + len(blocks[1]["input_ids"])
    )
    assert [*chain(*blocks["input_ids"])] == [*chain(*alone["train"]["input_ids"])]
    for row in blocks:  # no word spans two texts
        words = {pair for pair in zip(row["documents"], row["labels"]) if pair[1] >= 0}
        assert len({word for _, word in words}) == len(words) > 2
    batch = masked_lm.collator(tokenizer, model)(list(blocks))
    actual = model.eval()(**{**batch, "labels": None}).logits
    states = [actual[place, : len(row["input_ids"])] for place, row in enumerate(blocks)]
    expected = [model(torch.tensor([ids])).logits[0] for ids in alone["train"]["input_ids"]]
    torch.testing.assert_close(torch.cat(states), torch.cat(expected), rtol=1e-4, atol=1e-5)
    model.config.sliding_window = 4
    with raises(ValueError, seen=("sliding_window", 4), expected="block_size"):
        masked_lm.collator(tokenizer, model)(list(blocks))
    recipe.data["block_size"] = 5
    with raises(ValueError, expected=("block_size", 5)):
        prepare(recipe)


@pytest.mark.parametrize("block_size", [None, pytest.param(64, marks=pytest.mark.slow)])
def test_masked_language_model_learns(tmp_path, block_size):
    (tmp_path / "train.txt").write_text(VERSE * 3)
    training = dict(
        tokens_per_update=256, num_train_epochs=40, learning_rate=3e-3, save_strategy="no", seed=0
    )
    files = {"train": str(tmp_path / "train.txt"), "validation": str(tmp_path / "train.txt")}
    files |= {"block_size": block_size} if block_size else {}
    recipe = Recipe("masked-lm", files, {"kind": "bpe", "vocab_size": 45}, ENCODER, training)
    metrics = train(recipe, tmp_path / "model")
    assert metrics["validation_nll"] < 1.5 < math.log(45)


@pytest.mark.parametrize("compiled", [False, True])
def test_only_masked_tokens_are_projected_in_training_unless_compiled(tmp_path, compiled):
    (tmp_path / "train.txt").write_text(VERSE)
    training = dict(tokens_per_update=64, torch_compile=compiled)
    recipe = masked_recipe(tmp_path / "train.txt", training)
    tokenizer, model, rows = prepared = prepare(recipe)
    trainer = make_trainer(recipe, training_arguments(recipe, tmp_path), prepared)
    batch = next(iter(trainer.get_train_dataloader()))
    every, masked = batch["labels"].shape, (batch["labels"].ne(-100).sum().item(),)
    assert model.train()(**batch).logits.shape[:-1] == (every if compiled else masked)
    assert model.eval()(**batch).logits.shape[:-1] == every


# -------------------------------------------------------------------------------------- pretraining


def pretrainer(path, **training):
    settings = dict(
        tokens_per_update=128,
        num_train_epochs=40,
        learning_rate=3e-3,
        warmup_steps=20,
        save_strategy="no",
        seed=0,
    )
    data = {"train": str(path), "validation": str(path), "max_length": 18}
    return Recipe(
        "pretraining",
        data,
        {"kind": "bpe", "vocab_size": 40},
        {**ENCODER, "norm_first": True},
        {**settings, **training},
    )


def test_half_of_second_sentences_follow_and_others_are_random(documents):
    stories = [[f"{place} {number}" for number in range(9)] for place in range(200)]
    documents.write_text("\n\n".join("\n".join(story) for story in stories))
    rows = pretraining.read({"train": str(documents)}, "train")
    assert rows["first"] == [sentence for story in stories for sentence in story[:-1]]
    follow = 0
    for first, second, label in zip(
        rows["first"], rows["second"], rows["next_sentence_label"], strict=True
    ):
        (place, number), (other, other_number) = (
            map(int, sentence.split()) for sentence in (first, second)
        )
        assert (
            (other, other_number) == (place, number + 1)
            if label == pretraining.FOLLOWS
            else other != place
        )
        follow += label == pretraining.FOLLOWS
    assert follow / len(rows) == pytest.approx(0.5, abs=0.04)
    # any sentence of a document may be drawn
    assert {second.split()[1] for second in rows["second"]} == set("012345678")
    assert pretraining.read({"train": str(documents)}, "train").to_dict() == rows.to_dict()
    assert pretraining.read({"train": str(documents)}, "validation") is None


def test_sentence_pair_has_two_token_types_and_masked_words(documents):
    tokenizer, model, rows = prepare(pretrainer(documents))
    rows, text = rows["train"], pretraining.read({"train": str(documents)}, "train")
    for index, row in enumerate(rows):
        pair = [tokenizer(text[index][side])["input_ids"][1:] for side in ("first", "second")]
        if sum(map(len, pair)) + 1 <= 18:
            assert row["input_ids"] == [tokenizer.bos_token_id, *pair[0], *pair[1]]
            assert row["token_type_ids"] == [0] * (1 + len(pair[0])) + [1] * len(pair[1])
            assert list(dict.fromkeys(row["labels"])) == [-1, *range(8)]  # four words each
    lengths = [len(ids) for ids in rows["input_ids"]]
    assert max(lengths) == 18 and min(lengths) < 18, sorted(lengths)
    batch = pretraining.TASK.collator(tokenizer, model)(
        [pretraining.TASK.augment(row, RANDOM, tokenizer) for row in rows]
    )
    assert batch["next_sentence_label"].tolist() == rows["next_sentence_label"]
    selected = batch["labels"] != -100
    assert 0.1 < selected.sum() / sum(word >= 0 for row in rows["labels"] for word in row) < 0.25
    assert (batch["input_ids"][selected] == tokenizer.mask_token_id).float().mean() > 0.6


@pytest.mark.slow
def test_pretraining_learns_masked_words_and_next_sentences(documents, tmp_path):
    metrics = train(pretrainer(documents, num_train_epochs=60), tmp_path / "model")
    assert metrics["validation_next_sentence_accuracy"] > 0.8
    assert metrics["validation_nll"] < 1.8  # 2.5 from token frequencies alone


def test_untrained_encoder_has_chance_level_metrics(documents, tmp_path):
    metrics = train(pretrainer(documents, max_steps=2), tmp_path / "model")
    assert metrics["validation_next_sentence_accuracy"] == pytest.approx(0.5, abs=0.15)
    assert metrics["validation_nll"] == pytest.approx(math.log(40), abs=0.8)
    assert metrics["validation_loss"] == pytest.approx(
        metrics["validation_nll"] + math.log(2), abs=0.3
    )


def test_pretraining_metrics():
    logits = torch.zeros(2, 3, 4), torch.tensor([[2.0, 1.0], [0.0, 1.0]])
    labels = torch.tensor([[1, -100, 2], [-100, -100, -100]]), torch.tensor([0, 0])
    kept = [values.numpy() for values in pretraining.reduce(logits, labels)]
    scores = pretraining.metrics((kept, [values.numpy() for values in labels]), None)
    assert scores == {"nll": pytest.approx(math.log(4)), "next_sentence_accuracy": 0.5}


@pytest.mark.parametrize(
    "text, seen",
    [("a\nb\n", (1, 2)), ("a\n\nb\n\nc\n", (3, 1))],
)
def test_text_without_sentence_pairs_raises(documents, text, seen):
    documents.write_text(text)
    with raises(ValueError, seen=seen, expected=2):
        pretraining.read({"train": str(documents)}, "train")


def test_label_smoothing_for_pretraining_raises(documents):
    with raises(ValueError, seen=("label_smoothing_factor", 0.1), expected=0):
        pretrainer(documents, label_smoothing_factor=0.1)


# -------------------------------------------------------------------------- sequence-classification


def classifier(path, **training):
    settings = dict(
        tokens_per_update=128, num_train_epochs=30, learning_rate=3e-3, save_strategy="no", seed=0
    )
    data = {"train": str(path), "validation": str(path)}
    return Recipe(
        "sequence-classification",
        data,
        {"kind": "bpe", "vocab_size": 40},
        ENCODER,
        {**settings, **training},
    )


@pytest.fixture
def opinions(tmp_path):
    path = tmp_path / "opinions.txt"
    path.write_text("".join(line + "\n" for line in OPINIONS))
    return path


def test_training_text_with_one_label_raises(opinions):
    [label] = {line.partition(" ")[0] for line in OPINIONS[:1]}
    opinions.write_text(f"{label} fine\n{label} nice\n")
    with raises(ValueError, seen=("labels", label), expected="two"):
        prepare(classifier(opinions))


def test_classifier_learns_labels_by_name(opinions, tmp_path):
    metrics = train(classifier(opinions), tmp_path / "model")
    assert metrics["validation_accuracy"] == 1.0
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "model"),
        AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    inputs = tokenizer(["the plot delights", "the cast bores"], padding=True, return_tensors="pt")
    assert [
        model.config.id2label[index] for index in model(**inputs).logits.argmax(-1).tolist()
    ] == ["good", "bad"]


def test_r_drop_with_bpe_dropout_pairs_rows_with_other_subwords(opinions, tmp_path):
    """Pair default subwords of each row with other subwords (Wang et al. 2021)."""
    recipe = classifier(opinions, r_drop=2.0)
    recipe.tokenizer["bpe_dropout"] = 0.5
    tokenizer, model, rows = prepared = prepare(recipe)
    trainer = make_trainer(recipe, training_arguments(recipe, tmp_path), prepared)
    for batch in trainer.get_train_dataloader():
        first, second = (
            tokenizer.batch_decode(ids, skip_special_tokens=True)
            for ids in batch["input_ids"].chunk(2)
        )
        assert first == second and {*first} <= {line.partition(" ")[2] for line in OPINIONS}
        assert torch.equal(*batch["labels"].chunk(2))
        mask, pieces = batch["attention_mask"].chunk(2)
        assert mask.sum() == sum(map(len, tokenizer(first)["input_ids"])) < pieces.sum()


def test_classifier_starts_from_pretrained_encoder(opinions, tmp_path):
    (tmp_path / "train.txt").write_text("".join(line.partition(" ")[2] + "\n" for line in OPINIONS))
    training = dict(tokens_per_update=128, max_steps=3, save_strategy="no")
    recipe = masked_recipe(tmp_path / "train.txt", training)
    train(recipe, tmp_path / "pretrained")
    recipe = classifier(opinions)
    recipe.model, recipe.tokenizer = (
        {"path": str(tmp_path / "pretrained"), "classifier_dropout": 0.3},
        {},
    )
    tokenizer, model, _ = prepare(recipe)
    pretrained = AutoModelForSequenceClassification.from_pretrained(tmp_path / "pretrained")
    assert (
        tokenizer.get_vocab() == AutoTokenizer.from_pretrained(tmp_path / "pretrained").get_vocab()
    )
    weights, expected = dict(model.named_parameters()), dict(pretrained.named_parameters())
    same = [
        name
        for name in weights
        if name.startswith("model.") and torch.equal(weights[name], expected[name])
    ]
    assert len(same) == len([name for name in weights if name.startswith("model.")])
    assert (model.config.classifier_dropout, model.config.id2label) == (0.3, {0: "bad", 1: "good"})
    train(recipe, tmp_path / "classifier")
    configs = {
        (tmp_path / name / "tokenizer_config.json").read_text()
        for name in ("pretrained", "classifier")
    }
    assert len(configs) == 1  # does not contain the path of the source


def test_folds_partition_unique_lines(opinions):
    opinions.write_text(opinions.read_text() * 2)
    data, validation = {"train": str(opinions), "folds": 5}, []
    for fold in range(5):
        parts = {
            split: sequence_classification.read(data | {"fold": fold}, split)
            for split in ("train", "validation")
        }
        lines = {
            split: set(map(" ".join, zip(rows["label"], rows["text"])))
            for split, rows in parts.items()
        }
        assert lines["train"] | lines["validation"] == set(OPINIONS)
        assert len(parts["train"]) + len(parts["validation"]) == len(OPINIONS)
        validation += lines["validation"]
    assert sorted(validation) == sorted(OPINIONS)
    opinions.write_text("good fine\nbad poor\n")
    with raises(ValueError, seen=("validation", 3), expected=("folds", 5)):
        sequence_classification.read(data | {"fold": 3}, "validation")


def test_missing_and_unknown_labels_raise(opinions, tmp_path):
    (tmp_path / "bad.txt").write_text("good the film\nalone\n")
    with raises(ValueError, seen=("bad.txt", 2, "alone")):
        sequence_classification.read({"validation": str(tmp_path / "bad.txt")}, "validation")
    (tmp_path / "bad.txt").write_text("good the film\nodd the film\n")
    recipe = classifier(opinions)
    recipe.data["validation"] = str(tmp_path / "bad.txt")
    with raises(ValueError, seen=("validation", "odd"), expected=("bad", "good")):
        prepare(recipe)


def test_file_is_read_with_encoding_of_recipe(tmp_path):
    (tmp_path / "latin.txt").write_bytes("good café\nbad thé\n".encode("latin-1"))
    data = {"train": str(tmp_path / "latin.txt")}
    assert sequence_classification.read(data | {"encoding": "latin-1"}, "train")["text"] == [
        "café",
        "thé",
    ]
    with raises(ValueError, seen=("latin.txt", 1, "0xe9")):
        sequence_classification.read(data, "train")


def test_classification_metrics():
    prediction = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])
    assert sequence_classification.TASK.metrics(prediction, None) == {"accuracy": 0.75}


def test_validation_rows_of_one_text_have_different_masks(tmp_path):
    (tmp_path / "text.txt").write_text(f"{VERSE.splitlines()[0]}\n" * 20)
    files = {"train": str(tmp_path / "text.txt"), "validation": str(tmp_path / "text.txt")}
    rows = prepare(Recipe("masked-lm", files, {"kind": "character"}, ENCODER)).rows
    assert len({tuple(row["labels"]) for row in rows["validation"]}) > 5
