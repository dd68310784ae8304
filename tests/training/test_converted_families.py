"""Tests of training: an epoch over converted checkpoints lowers the loss."""

import math

import pytest
import torch
import transformers
from families import random_config
from transformers import Trainer, TrainingArguments, set_seed

import vanilla_transformer
from vanilla_transformer.conversion import convert

CASES = {
    "modernbert": ("ModernBertForMaskedLM", None),
    "nomic_bert": ("NomicBertForMaskedLM", None),
    "gte": ("GteForMaskedLM", None),
    "albert": ("AlbertForMaskedLM", None),
    "deberta-v2": ("DebertaV2ForMaskedLM", None),
    "llama": ("LlamaForCausalLM", None),
    "qwen2": ("Qwen2ForCausalLM", None),
    "qwen3": ("Qwen3ForCausalLM", None),
    "mistral": ("MistralForCausalLM", None),
    "eurobert": ("EuroBertForMaskedLM", None),
    "gemma3_text": ("Gemma3TextModel", "VanillaEncoderForSequenceClassification"),
}


def rows(config, is_classifier):
    """Return 128 rows of tokens that repeat, with one label or with a label for each token."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(4, 8, (128, 1), generator=generator)
    ids = first + torch.arange(8) % 2
    return [
        {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "labels": row[0] % 2 if is_classifier else row,
        }
        for row in ids
    ]


# these share all but the names of their fields with qwen3 and with nomic_bert
ALIKE = ("llama", "qwen2", "mistral", "gte")


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=pytest.mark.slow if family in ALIKE else ()) for family in CASES],
)
def test_epoch_over_converted_checkpoint_lowers_loss(family, tmp_path):
    architecture, head = CASES[family]
    set_seed(0)
    config = random_config(family, architecture, 0)
    getattr(transformers, architecture)(config).save_pretrained(tmp_path / "theirs")
    facts = convert(tmp_path / "theirs", tmp_path / "ours")
    model_class = getattr(vanilla_transformer, head or facts["architecture"])
    model = model_class.from_pretrained(tmp_path / "ours")
    data = rows(model.config, head is not None)
    arguments = TrainingArguments(
        tmp_path / "run", num_train_epochs=1, per_device_train_batch_size=8, learning_rate=1e-2,
        per_device_eval_batch_size=128, lr_scheduler_type="constant",
        save_strategy="no", report_to=[], use_cpu=True, logging_steps=1, max_grad_norm=1.0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(norms) == 16 and all(0 < norm < math.inf for norm in norms)
    assert trainer.evaluate()["eval_loss"] < 0.8 * before
