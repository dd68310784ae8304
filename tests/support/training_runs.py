"""Recipes of small training runs, and what the runs wrote."""

import json

import torch
from safetensors.torch import load_file

from vanilla_transformer.training.recipe import Recipe

SMALL = dict(
    hidden_size=32, intermediate_size=64, num_attention_heads=4, encoder_layers=1, decoder_layers=1
)
STEPS = 6  # updates of an epoch of the corpus


def make_recipe(corpus, model=None, **training):
    """Return a recipe that trains on `corpus`, for three epochs by default.

    `model` are fields of [model], and `training` those of [training].
    """
    settings = dict(
        tokens_per_update=512, tokens_per_batch=256, num_train_epochs=3, learning_rate=5e-3,
        warmup_steps=20, lr_scheduler_type="inverse_sqrt", label_smoothing_factor=0.1,
        save_strategy="epoch", logging_steps=5, seed=0,
    )  # fmt: skip
    data = {"train": list(map(str, corpus[0])), "validation": list(map(str, corpus[1]))}
    tokenizer, generation = (
        {"kind": "bpe", "vocab_size": 60},
        {"num_beams": 2, "max_new_tokens": 8},
    )
    return Recipe(
        "translation",
        data,
        tokenizer,
        {**SMALL, **(model or {})},
        {**settings, **training},
        generation,
    )


def weights(output):
    return load_file(output / "model.safetensors")


def are_equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def history(output):
    return json.loads((output / "training.json").read_text())["history"]
