"""Tests of distillation from several teachers."""

import json
from collections import Counter
from random import Random

import pytest
import scores
import torch
from checkpoints import OPINIONS
from messages import raises
from torch.distributions import Categorical, kl_divergence
from transformers import AutoTokenizer

from vanilla_transformer import VanillaEncoderForSequenceClassification
from vanilla_transformer.training.augment import TextAugmentation, build_augmentation
from vanilla_transformer.training.distillation import Teachers, with_text
from vanilla_transformer.training.loss import loss_function
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train

SMALL = dict(num_hidden_layers=1, num_attention_heads=4, hidden_size=32, intermediate_size=64)


WORDS, SUBWORDS = {"kind": "word", "vocab_size": 15}, {"kind": "bpe", "vocab_size": 45}


def classifier(path, lines=OPINIONS, tokenizer=WORDS, **training):
    text = path.with_suffix(".txt")
    text.write_text("".join(line + "\n" for line in lines))
    settings = dict(
        tokens_per_update=128, num_train_epochs=15, learning_rate=1e-2, save_strategy="no"
    )
    data = {"directory": str(path.parent), "train": text.name, "validation": text.name}
    return Recipe("sequence-classification", data, tokenizer, SMALL, {**settings, **training})


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Train a teacher of words and a teacher of subwords, and return their paths."""
    directory = tmp_path_factory.mktemp("teachers")
    for kind in (WORDS, SUBWORDS):
        train(classifier(directory / kind["kind"], tokenizer=kind), directory / kind["kind"])
    return [str(directory / kind["kind"]) for kind in (WORDS, SUBWORDS)]


def compute_logits(path, texts):
    """Return the logits of the checkpoint at `path` for `texts` in float64."""
    model = VanillaEncoderForSequenceClassification.from_pretrained(path).double()
    return model(
        **AutoTokenizer.from_pretrained(path)(texts, padding=True, return_tensors="pt")
    ).logits.detach()


def test_loss_is_cross_entropy_with_geometric_mean_of_teachers(teachers, tmp_path):
    """Compute the expected loss in float64 with torch.distributions.

    Labels have no effect in training. Without gradients the loss depends only on the labels.
    """
    tokenizer, model, _ = prepare(classifier(tmp_path / "student"))
    texts = ["the film bores", "the cast wins the plot"]
    first, second = (Categorical(logits=compute_logits(path, texts)).probs for path in teachers)
    mean = Categorical(probs=(first * second).sqrt())  # Categorical normalizes it
    ensemble = Teachers(teachers, model, model.device)
    model.register_forward_pre_hook(ensemble.forward_pre_hook, with_kwargs=True)
    batch = with_text(
        lambda rows: tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    )
    logits = model.train()(**batch([{"text": text} for text in texts])).logits
    torch.testing.assert_close(ensemble.probabilities.double(), mean.probs, rtol=1e-5, atol=1e-7)
    loss, labels = loss_function(lambda total: None, 0.0, teachers=ensemble), torch.tensor([1, 0])
    expected = (kl_divergence(mean, Categorical(logits=logits.double())) + mean.entropy()).sum()
    assert loss({"logits": logits}, labels, 8).item() == pytest.approx(
        expected.item() / 8, rel=1e-5
    )
    with torch.no_grad():
        expected = -Categorical(logits=logits.double()).log_prob(labels).mean()
        assert loss({"logits": logits}, labels).item() == pytest.approx(expected.item(), rel=1e-5)


def test_student_learns_from_teachers_instead_of_labels(teachers, tmp_path):
    wrong = [
        ("good" if line.startswith("bad") else "bad") + line[line.index(" ") :] for line in OPINIONS
    ]
    recipe = classifier(
        tmp_path / "student",
        wrong,
        seed=2,
        teachers=teachers,
        word_replacement=0.2,
        num_train_epochs=40,
    )
    assert train(recipe, tmp_path / "student")["validation_accuracy"] == 0.0
    said = (
        "Trained from scratch on the predictions of 2 other models instead of labels, by the "
        "recipe below"
    )
    assert said in (tmp_path / "student" / "README.md").read_text()
    record = json.loads((tmp_path / "student" / "training.json").read_text())
    record["recipe"]["training"]["teachers"] = ["gone"]
    (tmp_path / "student" / "training.json").write_text(json.dumps(record))
    assert scores.scores(tmp_path / "student", tmp_path)["validation_accuracy"][0] == 0.0


@pytest.mark.parametrize("dropout", [0, 0.5])
def test_words_are_replaced_at_requested_rate(teachers, tmp_path, dropout):
    recipe = classifier(
        tmp_path / "student",
        tokenizer=SUBWORDS | {"bpe_dropout": dropout},
        teachers=teachers,
        word_replacement=0.25,
    )
    tokenizer, _, rows = prepare(recipe)
    augment, plain = build_augmentation(recipe, tokenizer, rows["train"]), rows["train"]
    augmented_rows = [
        (row, augment(row, Random(f"{epoch} {place}")))
        for epoch in range(200)
        for place, row in enumerate(plain)
    ]
    pairs, num_default_splits = [], 0
    for before, [after] in augmented_rows:
        assert after["label"] == before["label"]
        assert tokenizer.decode(after["input_ids"], skip_special_tokens=True) == after["text"]
        num_default_splits += after["input_ids"] == tokenizer(after["text"])["input_ids"]
        pairs += zip(before["text"].split(), after["text"].split(), strict=True)
    # with BPE-dropout most rows have other subwords
    assert (
        num_default_splits == len(augmented_rows)
        if not dropout
        else num_default_splits < len(augmented_rows) / 10
    )
    said = Counter(word for text in plain["text"] for word in text.split())  # a third are "the"
    share = {word: count / said.total() for word, count in said.items()}
    kept = sum(part * (0.75 + 0.25 * part) for part in share.values())
    assert sum(before == after for before, after in pairs) / len(pairs) == pytest.approx(
        kept, abs=0.01
    )
    # word frequencies do not change
    result = Counter(after for _, after in pairs)
    assert {word: count / len(pairs) for word, count in result.items()} == pytest.approx(
        share, abs=0.01
    )
    assert augment(plain[0], Random(3)) == augment(plain[0], Random(3))


def test_span_crop_draws_length_and_start_uniformly_at_requested_rate(teachers, tmp_path):
    augmented, text = TextAugmentation(0.0, 0.6, ["f"]), "a b c d e"
    actual = Counter(augmented(text, Random(number)) for number in range(30_000))
    parts = {
        (start, end): text[2 * start : 2 * end - 1]
        for start in range(5)
        for end in range(start + 1, 6)
    }
    # the length is drawn first, then the start
    expected = {part: 0.6 / 5 / (6 - (end - start)) for (start, end), part in parts.items()}
    expected[text] += 0.4
    assert {part: count / 30_000 for part, count in actual.items()} == pytest.approx(
        expected, abs=0.01
    )
    recipe = classifier(tmp_path / "student", teachers=teachers, span_crop=1.0)
    tokenizer, _, rows = prepare(recipe)
    augment = build_augmentation(recipe, tokenizer, rows["train"])
    augmented_rows = [
        (row["text"], *augment(row, Random(place))) for place, row in enumerate(rows["train"])
    ]
    assert all(
        row["text"] in text and row["input_ids"] == tokenizer(row["text"])["input_ids"]
        for text, row in augmented_rows
    )
    assert 0 < sum(row["text"] == text for text, row in augmented_rows) < len(augmented_rows) / 2


def test_text_without_augmentation_is_unchanged():
    assert TextAugmentation(0.0, 0.0, ["a b"])("c d", Random(3)) == "c d"


def test_teachers_with_different_labels_raise(teachers, tmp_path):
    _, model, _ = prepare(classifier(tmp_path / "student"))
    model.config.id2label = {0: "bad", 1: "fair"}
    with raises(ValueError, seen=(0, "bad", 1, "good"), expected=(0, "bad", 1, "fair")):
        Teachers(teachers, model, model.device)


def test_augmentation_without_teachers_raises_before_files_are_written(tmp_path):
    with raises(ValueError, seen=("training.word_replacement", 0.1), expected="training.teachers"):
        train(classifier(tmp_path / "student", word_replacement=0.1), tmp_path / "student")
    assert [path.name for path in tmp_path.iterdir()] == ["student.txt"]


@pytest.mark.parametrize(
    "task, training, seen, expected",
    [
        ("sequence-classification", {"teachers": "a"}, ("training.teachers", "a"), ()),
        ("translation", {"teachers": ["a"]}, ("translation", "training.teachers"), ()),
        (
            "sequence-classification",
            {"teachers": ["a"], "r_drop": 2, "tokens_per_update": 128},
            ("r_drop", 2),
            0,
        ),
        (
            "sequence-classification",
            {"teachers": ["a"], "label_smoothing_factor": 0.1},
            ("label_smoothing_factor", 0.1),
            (),
        ),
    ],
)
def test_options_incompatible_with_teachers_raise(task, training, seen, expected):
    with raises(ValueError, seen=seen, expected=expected):
        Recipe(task, training=training)
