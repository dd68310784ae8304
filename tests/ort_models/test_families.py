"""Tests of small checkpoints of other families, exported by `from_pretrained`, against their torch
models."""

import pytest
import torch
from families import compute_outputs, make_arguments, random_config, random_model

from vanilla_transformer_export import ort_models

# (family, architecture) -> suffix of the class
ARCHITECTURES = {
    ("bert", "BertForSequenceClassification"): "SequenceClassification",
    ("bert", "BertForMultipleChoice"): "MultipleChoice",
    ("mpnet", "MPNetModel"): "FeatureExtraction",
    ("mpnet", "MPNetForMaskedLM"): "MaskedLM",
    ("bart", "BartForSequenceClassification"): "SequenceClassification",
    ("vit", "ViTForImageClassification"): "ImageClassification",
    ("gpt2", "GPT2LMHeadModel"): "CausalLM",
    ("t5", "T5ForConditionalGeneration"): "Seq2SeqLM",
    ("marian", "MarianMTModel"): "Seq2SeqLM",
    ("m2m_100", "M2M100ForConditionalGeneration"): "Seq2SeqLM",
}


FAST = ("BertForSequenceClassification", "GPT2LMHeadModel", "T5ForConditionalGeneration")
FAST += ("ViTForImageClassification",)
CASES = [
    pytest.param(*case, marks=() if case[1] in FAST else pytest.mark.slow) for case in ARCHITECTURES
]


@pytest.mark.parametrize("family, architecture", CASES)
def test_outputs_and_tokens_match_torch_model(tmp_path, family, architecture):
    model = random_model(architecture, random_config(family, architecture, 0))
    if model.config.is_encoder_decoder and model.can_generate():
        model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id
    model.save_pretrained(tmp_path)
    name = f"ORTModelFor{ARCHITECTURES[family, architecture]}"
    exported = getattr(ort_models, name).from_pretrained(tmp_path)
    inputs = make_arguments(model)
    actual, expected = compute_outputs(exported, inputs), compute_outputs(model, inputs)
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        limit = 1e-4 * max(1, tensor.abs().max().item())
        torch.testing.assert_close(actual[key], tensor, rtol=0, atol=limit)
    if not model.can_generate():
        return
    inputs.pop("decoder_input_ids", None)
    if not model.config.is_encoder_decoder:
        inputs = {"input_ids": inputs["input_ids"][:1]}
    for options in ({}, {"num_beams": 3}, {"do_sample": True}):
        torch.manual_seed(0)
        tokens = model.generate(**inputs, max_new_tokens=8, **options)
        torch.manual_seed(0)
        assert torch.equal(exported.generate(**inputs, max_new_tokens=8, **options), tokens)
