"""Tests of PEFT, which finds our target modules if it is imported before this package."""

import subprocess
import sys

import peft  # before vanilla_transformer, as its documentation says
import pytest
import torch
from transformers import set_seed

import vanilla_transformer

SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_attention_heads=2)
# Class: PEFT's task type.
MODELS = {
    "VanillaEncoderModel": "FEATURE_EXTRACTION",
    "VanillaEncoderForSequenceClassification": "SEQ_CLS",
    "VanillaEncoderForTokenClassification": "TOKEN_CLS",
    "VanillaEncoderForQuestionAnswering": "QUESTION_ANS",
    "VanillaDecoderForCausalLM": "CAUSAL_LM",
    "VanillaSeq2SeqForConditionalGeneration": "SEQ_2_SEQ_LM",
}
ENCODERS = [name for name in MODELS if "Encoder" in name]
GENERATORS = [name for name in MODELS if name not in ENCODERS]
# Target modules of each method, from the papers: LoRA (Hu et al. 2021), IA3 (Liu et al. 2022).
TARGETS = {"LoraConfig": {"q_proj", "v_proj"}, "IA3Config": {"k_proj", "v_proj", "down_proj"}}


def make_model(name):
    set_seed(0)
    model_class = getattr(vanilla_transformer, name)
    model = model_class(model_class.config_class(**SIZES, num_hidden_layers=2)).eval()
    for parameter in model.parameters():
        # with initial weights, layers hardly change their input
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def make_inputs(name):
    ids = torch.randint(4, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}
    return inputs | ({"decoder_input_ids": ids.flip(1)} if "Seq2Seq" in name else {})


def states(model, name):
    with torch.no_grad():
        return model(**make_inputs(name))[0]


def make_adapted_model(name, method, **settings):
    """Return a model with random adapter weights; PEFT's initial adapters change nothing."""
    model = peft.get_peft_model(
        make_model(name), getattr(peft, method)(task_type=MODELS[name], **settings)
    )
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name or "ia3_" in parameter_name:
            torch.nn.init.normal_(parameter, mean=float("ia3_" in parameter_name), std=0.2)
    return model.eval()


@pytest.mark.parametrize("method", TARGETS)
@pytest.mark.parametrize("name", MODELS)
def test_default_target_modules_are_adapted_saved_and_merged(name, method, tmp_path):
    model = make_adapted_model(name, method)
    changed = {
        key.split(".lora_")[0].split(".ia3_")[0]
        for key, _ in model.named_parameters()
        if ".lora_" in key or ".ia3_" in key
    }
    assert {key.rpartition(".")[2] for key in changed} == TARGETS[method]
    assert len(changed) == sum(
        key.rpartition(".")[2] in TARGETS[method] for key, _ in make_model(name).named_modules()
    )
    actual = states(model, name)
    assert not torch.allclose(actual, states(make_model(name), name), atol=1e-3)
    model.save_pretrained(tmp_path)
    reloaded = peft.PeftModel.from_pretrained(make_model(name), tmp_path).eval()
    torch.testing.assert_close(states(reloaded, name), actual)
    torch.testing.assert_close(states(model.merge_and_unload(), name), actual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", TARGETS)
@pytest.mark.parametrize("name", GENERATORS)
def test_adapters_learn_and_generate(name, method):
    model = make_adapted_model(name, method).train()
    inputs = {key: value for key, value in make_inputs(name).items() if key != "decoder_input_ids"}
    optimizer = torch.optim.Adam(
        [value for value in model.parameters() if value.requires_grad], lr=0.05
    )
    losses = []
    for _ in range(40):
        losses.append(model(**inputs, labels=inputs["input_ids"]).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.2
    assert model.eval().generate(**inputs, max_new_tokens=3, min_new_tokens=3).shape[0] == 2


@pytest.mark.parametrize("name", GENERATORS)
def test_prefix_tuning_of_generators_changes_states(name):
    model = peft.get_peft_model(
        make_model(name), peft.PrefixTuningConfig(task_type=MODELS[name], num_virtual_tokens=3)
    )
    assert not torch.allclose(states(model, name), states(make_model(name), name), atol=1e-6)
    ids = make_inputs(name)["input_ids"]
    model.generate(input_ids=ids, max_new_tokens=3)


@pytest.mark.parametrize("name", ENCODERS)
def test_prefix_tuning_of_encoder_raises(name):
    """PEFT raises if it checks the arguments of the model; otherwise our model raises."""
    model = peft.get_peft_model(
        make_model(name), peft.PrefixTuningConfig(task_type=MODELS[name], num_virtual_tokens=3)
    )
    with pytest.raises(ValueError, match="past key values|encoder"):
        model(**make_inputs(name))


@pytest.mark.parametrize("name", MODELS)
def test_prompt_tuning_gives_finite_states(name):
    model = peft.get_peft_model(
        make_model(name), peft.PromptTuningConfig(task_type=MODELS[name], num_virtual_tokens=3)
    )
    assert torch.isfinite(states(model, name)).all()


@pytest.mark.parametrize("first", ["peft", "vanilla_transformer"])
def test_target_modules_are_required_if_peft_is_imported_second(first):
    """PEFT asks for target modules if it is imported second; "all-linear" works in both orders."""
    second = {"peft": "vanilla_transformer", "vanilla_transformer": "peft"}[first]
    code = f"""
import {first}
import {second}
from peft import LoraConfig, get_peft_model
from vanilla_transformer import VanillaEncoderConfig, VanillaEncoderModel
sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=24)
config = VanillaEncoderConfig(**sizes, num_attention_heads=2, num_hidden_layers=1)
get_peft_model(VanillaEncoderModel(config), LoraConfig(target_modules="all-linear"))
try:
    get_peft_model(VanillaEncoderModel(config), LoraConfig())
except ValueError as error:
    print(error)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    assert ("Please specify `target_modules`" in process.stdout) == (first == "vanilla_transformer")
