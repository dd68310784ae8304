"""Tests of label smoothing, R-Drop and averaged weights."""

import shutil

import numpy as np
import pytest
import torch
from checkpoints import edit_json
from messages import raises
from torch.distributions import Categorical, kl_divergence
from training_runs import SMALL, STEPS, are_equal, history, make_recipe, weights
from transformers.trainer_pt_utils import LabelSmoother

from vanilla_transformer import VanillaSeq2SeqConfig, VanillaSeq2SeqForConditionalGeneration
from vanilla_transformer.training.averaging import average, average_weights
from vanilla_transformer.training.loss import loss_function
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
@pytest.mark.parametrize("items", [None, 40])
def test_smoothed_loss_and_gradient_match_transformers(smoothing, items):
    """Use more rows than a chunk of the loss, and compute the expected loss in float64.

    In evaluation the loss does not change the logits.
    """
    logits, labels = (
        torch.randn(30, 9, 11, dtype=torch.float64, requires_grad=True),
        torch.randint(11, (30, 9)),
    )
    labels[0, 3:] = -100
    expected = LabelSmoother(smoothing)({"logits": logits}, labels, num_items_in_batch=items)
    expected.backward()
    actual, seen = logits.detach().float().requires_grad_(), []
    loss = loss_function(seen.append, smoothing)
    with torch.no_grad():
        assert loss({"logits": actual}, labels, items).item() == pytest.approx(
            expected.item(), rel=1e-5
        )
    assert torch.equal(actual, logits.float())
    value = loss({"logits": actual}, labels, items)
    value.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert [total.item() for total in seen] == pytest.approx(
        2 * [value.item() * (items or 264)], rel=1e-5
    )
    torch.testing.assert_close(actual.grad, logits.grad.float(), rtol=1e-4, atol=1e-7)


def test_loss_function_is_none_without_smoothing():
    assert loss_function(None, 0.0) is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("items", [None, 500])
def test_r_drop_loss_and_gradient_match_reference(smoothing, items):
    """Compare with R-Drop (Liang et al. 2021), computed in float64 with autograd.

    The loss of a label is the cross-entropy of both passes, plus alpha / 2 times the divergences
    in both directions. The mean is over the labels of both passes, without padding. There are
    more rows than a chunk of the loss.
    """
    logits, labels = (
        torch.randn(2, 30, 9, 11, dtype=torch.float64, requires_grad=True),
        torch.randint(11, (30, 9)),
    )
    labels[0, 3:] = -100
    first, second = (Categorical(logits=part[labels != -100]) for part in logits)
    divergences = (kl_divergence(first, second) + kl_divergence(second, first)).sum()
    twice, count = torch.cat([labels, labels]), items or 528
    plain = LabelSmoother(smoothing)({"logits": logits.flatten(0, 1)}, twice)
    expected = (plain * 528 + 1.5 * divergences) / count
    expected.backward()
    actual = logits.detach().float().flatten(0, 1).requires_grad_()
    loss = loss_function(lambda total: None, smoothing, r_drop=3.0)
    with torch.no_grad():
        assert loss({"logits": actual}, twice).item() == pytest.approx(plain.item())
    value = loss({"logits": actual}, twice, items)
    value.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(actual.grad, logits.grad.float().flatten(0, 1), rtol=1e-4, atol=1e-7)


def test_r_drop_trains_on_each_row_twice(short, corpus, tmp_path):
    train(make_recipe(corpus, r_drop=1.0), tmp_path / "model")
    tokens = [
        sum(record["tokens"] for record in history(path) if "tokens" in record)
        for path in (tmp_path / "model", short[0])
    ]
    assert tokens[0] == 2 * tokens[1]
    assert not are_equal(weights(tmp_path / "model"), weights(short[0]))
    with raises(ValueError, seen=("r_drop", "1.0"), expected=(0, "tokens_per_update")):
        Recipe("causal-lm", training={"r_drop": 1.0, "per_device_train_batch_size": 1})


def is_mean_of(directory, checkpoints):
    expected = dict(average_weights(checkpoints).named_parameters())
    return all(torch.equal(weight, expected[name]) for name, weight in weights(directory).items())


def test_average_is_mean_of_every_weight(short, corpus, tmp_path):
    state = short[0].with_name("model-run")
    paths = sorted(state.glob("checkpoint-*"))
    assert len(paths) == 2
    actual, ours = (
        [weights(path) for path in paths],
        dict(average_weights(paths).named_parameters()),
    )
    for name in actual[0]:
        expected = sum(tensors[name].numpy().astype(np.float64) for tensors in actual) / 2
        np.testing.assert_allclose(ours[name].detach().numpy(), expected, rtol=1e-6, atol=1e-9)
    average(paths, tmp_path / "mean")
    assert are_equal(
        weights(tmp_path / "mean"),
        {name: ours[name].detach() for name in weights(tmp_path / "mean")},
    )
    assert (tmp_path / "mean/tokenizer.json").is_file()
    with raises(FileExistsError, expected="--force"):
        average(paths, tmp_path / "mean")


def test_average_of_one_checkpoint_equals_checkpoint(short):
    actual, expected = dict(average_weights(short[:1]).named_parameters()), weights(short[0])
    assert are_equal({name: actual[name].detach() for name in expected}, expected)


def test_early_stopping_with_average_last_saves_mean_of_last_checkpoints(corpus, tmp_path):
    settings = dict(
        num_train_epochs=9,
        eval_strategy="epoch",
        early_stopping_patience=1,
        metric_for_best_model="loss",
    )
    # the loss falls, so no evaluation is better than the first
    recipe = make_recipe(corpus, **settings, greater_is_better=True, average_last=2)
    train(recipe, tmp_path / "model")
    paths = [*(tmp_path / "model-run").glob("checkpoint-*")]
    assert {path.name for path in paths} == {f"checkpoint-{STEPS}", f"checkpoint-{2 * STEPS}"}
    assert not are_equal(*map(weights, paths))
    assert is_mean_of(tmp_path / "model", paths)


def test_average_of_different_shapes_raises(short, tmp_path):
    other = VanillaSeq2SeqConfig(vocab_size=60, **{**SMALL, "intermediate_size": 48})
    VanillaSeq2SeqForConditionalGeneration(other).save_pretrained(tmp_path / "other")
    with raises(ValueError, seen="other"):
        average_weights([short[0], tmp_path / "other"])


def test_average_last_saves_mean_of_last_checkpoints(short, corpus, tmp_path):
    train(make_recipe(corpus, average_last=2), tmp_path / "model")
    checkpoints = sorted(short[0].with_name("model-run").glob("checkpoint-*"))
    assert is_mean_of(tmp_path / "model", checkpoints)


def test_tokenizers_of_an_average_may_differ_in_what_a_call_left(short, tmp_path):
    """tokenizer.json also has the truncation and padding of the last call."""
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        shutil.copytree(short[0], path)
    left = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    edit_json(paths[1] / "tokenizer.json", truncation=left)
    average(paths, tmp_path / "mean")
    edit_json(paths[1] / "tokenizer.json", normalizer={"type": "Lowercase"})
    with raises(ValueError, seen="normalizer"):
        average(paths, tmp_path / "other")
