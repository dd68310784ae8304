"""Tests of `generate` without a length, against models of other families in transformers."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import random_config, random_model
from messages import raises
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, Trainer, TrainingArguments

from vanilla_transformer.conversion import convert
from vanilla_transformer_export import Runtime
from vanilla_transformer_export.ort_models import ORTModelForCausalLM, ORTModelForSeq2SeqLM

CLASSES = {
    "gpt2": ("GPT2LMHeadModel", ORTModelForCausalLM, AutoModelForCausalLM),
    "bart": ("BartForConditionalGeneration", ORTModelForSeq2SeqLM, AutoModelForSeq2SeqLM),
}
IDS = torch.tensor([[5, 6, 7]])
SAMPLED = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 4, "do_sample": True}


@dataclass(frozen=True)
class Source:
    """A model of another family without a length or an end token, and its export."""

    model: Any
    directory: Path
    opened: Any
    auto_class: Any

    def open(self, directory, **options):
        return type(self.opened).from_pretrained(directory, **options)


@pytest.fixture(scope="module", params=[*CLASSES])
def source(request, tmp_path_factory):
    architecture, ort_class, auto_class = CLASSES[request.param]
    config = random_config(request.param, architecture, 0)
    config.eos_token_id = None
    model = random_model(architecture, config)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    directory = tmp_path_factory.mktemp(request.param) / "source"
    model.save_pretrained(directory)
    return Source(model, directory, ort_class.from_pretrained(directory, export=True), auto_class)


@pytest.fixture
def logged(caplog):
    """A function that returns the log of transformers as text."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield lambda: caplog.text
    logger.removeHandler(caplog.handler)


def test_tokens_equal_those_of_source_without_a_length(source, tmp_path, logged):
    model, opened = source.model, source.opened
    expected = model.generate(IDS)
    start = 1 if model.config.is_encoder_decoder else IDS.shape[1]
    positions = model.config.max_position_embeddings
    assert expected.shape[1] == start + 20 < positions  # transformers' default
    assert torch.equal(opened.generate(IDS), expected)
    opened.save_pretrained(tmp_path / "saved")
    saved = source.open(tmp_path / "saved")
    assert torch.equal(saved.generate(IDS), expected)
    assert saved.generate(IDS, max_length=positions).shape[1] == positions
    # the runtime's default is all positions
    assert Runtime(tmp_path / "saved").generate(IDS.numpy()).shape[1] == positions
    assert saved.generate(IDS, **SAMPLED).shape[1] == start + 4
    assert "max_length" not in logged()


def test_length_of_source_is_kept_even_if_it_is_all_positions(source, tmp_path, logged):
    positions = source.model.config.max_position_embeddings
    other = source.auto_class.from_pretrained(source.directory)
    other.generation_config.max_length = positions
    other.save_pretrained(tmp_path / "other")
    opened = source.open(tmp_path / "other", export=True)
    assert torch.equal(opened.generate(IDS), other.generate(IDS))
    assert opened.generate(IDS).shape[1] == positions
    opened.generate(IDS, **SAMPLED)
    assert f"`max_length`(={positions})" in logged()  # as transformers warns of the source


def test_changed_length_is_saved(source, tmp_path):
    source.opened.save_pretrained(tmp_path)
    opened = source.open(tmp_path)
    opened.generation_config.max_length = 9
    opened.save_pretrained(tmp_path)
    assert source.open(tmp_path).generate(IDS).shape[1] == 9


def test_model_converted_back_has_no_length_again(source, tmp_path):
    model = source.model
    convert(source.directory, tmp_path / "ours")
    settings = json.loads((tmp_path / "ours/generation_config.json").read_text())
    assert settings["max_length"] == model.config.max_position_embeddings
    convert(tmp_path / "ours", tmp_path / "back", to=model.config.model_type)
    back = source.auto_class.from_pretrained(tmp_path / "back")
    assert back.generation_config.max_length is None
    assert torch.equal(back.generate(IDS), model.generate(IDS))


def test_guidance_of_encoder_decoder_raises_and_of_decoder_matches_transformers(source):
    options = {"guidance_scale": 1.5, "max_new_tokens": 6}
    if source.model.config.is_encoder_decoder:
        with raises(ValueError, seen=("guidance_scale", 1.5), expected=None):
            source.opened.generate(IDS, **options)
    else:
        expected = source.model.generate(IDS, **options)
        assert torch.equal(source.opened.generate(IDS, **options), expected)


def test_trainer_raises_type_error_in_one_line(source, tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    name = type(source.opened).__name__
    with pytest.raises(TypeError, match=f"^{name} is not a torch.nn.Module"):
        Trainer(source.opened, arguments)
