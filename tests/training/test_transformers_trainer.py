"""Tests of the models with transformers' own `Trainer`, against formulas and larger batches."""

import copy

import pytest
import torch
from models import build, inputs, tokens
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from vanilla_transformer import (
    VanillaDecoderForCausalLM,
    VanillaDecoderForSequenceClassification,
    VanillaEncoderForSequenceClassification,
    VanillaVisionForImageClassification,
)

NO_DROPOUT = dict(embedding_dropout=0, dropout=0, classifier_dropout=0)


def make_trainer(model, rows, directory, **settings):
    arguments = TrainingArguments(
        directory, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", **settings
    )
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)


def test_smoothed_loss_of_decoder_predicts_next_tokens(tmp_path):
    model, ids = build(VanillaDecoderForCausalLM), tokens()
    logits = model(ids).logits
    expected = cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = make_trainer(model, rows, tmp_path, label_smoothing_factor=0.1)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)


def first_update(model, rows, directory, **settings):
    """Return the loss and the norm of the gradient of the first update."""
    trainer = make_trainer(model, rows, directory, max_steps=1, logging_steps=1, **settings)
    trainer.train()
    return [trainer.state.log_history[0][name] for name in ("loss", "grad_norm")]


@pytest.mark.parametrize(
    "model_class, problem_type",
    [
        (VanillaEncoderForSequenceClassification, "regression"),
        (VanillaDecoderForSequenceClassification, "multi_label_classification"),
        (VanillaVisionForImageClassification, "multi_label_classification"),
        (VanillaVisionForImageClassification, "regression"),
    ],
)
def test_accumulated_gradients_equal_those_of_one_batch(model_class, problem_type, tmp_path):
    model = build(model_class, **NO_DROPOUT, num_labels=3, problem_type=problem_type)
    batch = inputs(model, 4) | {"labels": torch.randint(2, (4, 3)).float()}
    rows = [{name: values[row] for name, values in batch.items()} for row in range(4)]
    whole, accumulated = (
        first_update(
            copy.deepcopy(model),
            rows,
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=4 // size,
        )
        for size in (4, 1)
    )
    assert accumulated == pytest.approx(whole, rel=1e-4)
