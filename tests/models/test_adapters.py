"""Tests of the PEFT dictionaries that map a model type to its target modules."""

import sys
from types import ModuleType

import pytest
import torch
from checkpoints import CHECKPOINTS, build
from messages import raises

from vanilla_transformer import VanillaDecoderConfig, VanillaEncoderConfig, VanillaSeq2SeqConfig
from vanilla_transformer.registration import register_adapters

TYPES = [
    config.model_type
    for config in (VanillaEncoderConfig, VanillaDecoderConfig, VanillaSeq2SeqConfig)
]
PREFIX = "TRANSFORMERS_MODELS_TO"


@pytest.fixture
def constants(monkeypatch):
    """Return a stand-in for the module peft.utils.constants, with the same names."""
    module = ModuleType("peft.utils.constants")
    for name in ("LORA_TARGET", "VERA_TARGET", "IA3_TARGET", "IA3_FEEDFORWARD", "LNTUNING_TARGET"):
        setattr(module, f"{PREFIX}_{name}_MODULES_MAPPING", {"bert": ["query", "value"]})
    module.TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING = {}
    module.CONFIG_NAME = "adapter_config.json"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_registered_target_modules_exist_in_models(constants):
    constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["vanilla-decoder"] = ["mine"]
    for model_type in TYPES:
        register_adapters(model_type)
    lora, ia3 = (
        getattr(constants, f"{PREFIX}_{name}_TARGET_MODULES_MAPPING") for name in ("LORA", "IA3")
    )
    expected = {
        "bert": ["query", "value"],
        **dict.fromkeys(TYPES, ["q_proj", "v_proj"]),
        "vanilla-decoder": ["mine"],
    }
    assert lora == expected
    assert set(
        constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING["vanilla-encoder"]
    ) < set(ia3["vanilla-encoder"])
    assert constants.TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING == {}
    constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.pop("vanilla-decoder")
    register_adapters("vanilla-decoder")
    names = {model_type: set() for model_type in TYPES}
    for checkpoint in CHECKPOINTS:
        model = build(checkpoint)
        names[model.config.model_type] |= {
            name.rpartition(".")[2] for name, _ in model.named_modules()
        }
    for name, dictionary in vars(constants).items():
        for model_type in TYPES if name.endswith("_MODULES_MAPPING") else ():
            missing = set(dictionary[model_type]) - names[model_type]
            assert missing <= ({"cross_attn_norm"} if model_type != "vanilla-seq2seq" else set())


@pytest.mark.parametrize("name", ["encoder", "masked-lm", "classification"])
def test_encoder_rejects_past_key_values(name):
    model, ids = build(name), torch.randint(4, 40, (2, 5))
    with raises(ValueError, seen=("past_key_values", "encoder")):
        model(ids, past_key_values=[(torch.zeros(2, 4, 3, 6), torch.zeros(2, 4, 3, 10))] * 2)
    assert torch.isfinite(model(ids, past_key_values=None)[0]).all()
