"""Tests of settings in generation_config.json that have no effect in its generation mode.

Transformers loads such files and generates, and so does this package.
"""

import json
import logging

import pytest
from checkpoints import SIZES, edit_json, perturbed
from families import RIGHT, make_arguments, random_config, random_model
from messages import raises
from transformers import GenerationConfig

import vanilla_transformer
from vanilla_transformer.conversion import convert
from vanilla_transformer_export import Runtime, export, load_checkpoint

# Settings and the reason why they have no effect, or None if they have one.
SETTINGS = [
    (dict(temperature=0.0, do_sample=False), "do_sample"),
    (dict(top_p=0.6, top_k=7, min_p=0.1), "do_sample"),
    (dict(typical_p=0.5, epsilon_cutoff=0.1, eta_cutoff=0.1), "do_sample"),
    (dict(length_penalty=2.0), "beams"),
    (dict(early_stopping=True, num_beams=1), "beams"),
    (dict(num_beam_groups=2, diversity_penalty=0.5), "beams"),
    (dict(output_scores=True), "return_dict_in_generate"),
    (dict(use_cache=False, cache_implementation="static"), "use_cache"),
    (dict(pad_token_id=-1), "not a token"),
    (dict(eos_token_id=-1), "not a token"),
    (dict(length_penalty=2.0, early_stopping=True, num_beams=3), None),
    (dict(temperature=0.7, top_k=7, do_sample=True), None),
]
FLAGS = {"do_sample", "num_beams", "use_cache"}
settings = pytest.mark.parametrize("settings, reason", SETTINGS, ids=str)


@pytest.fixture
def bart(tmp_path):
    model = random_model("BartForConditionalGeneration", random_config("bart", "", 0))
    model.save_pretrained(tmp_path / "theirs")
    return model


def read_generation_config(directory):
    return json.loads((directory / "generation_config.json").read_text())


@settings
def test_convert_drops_settings_without_effect_and_notes_them(settings, reason, bart, tmp_path):
    edit_json(tmp_path / "theirs" / "generation_config.json", **settings)
    facts = convert(tmp_path / "theirs", tmp_path / "ours")
    unused = settings.keys() - FLAGS if reason else set()
    assert len(facts["notes"]) == len(unused)
    assert all(
        any(f"{name}={settings[name]!r}" in note and reason in note for note in facts["notes"])
        for name in unused
    )
    assert {
        name: read_generation_config(tmp_path / "ours").get(name) for name in unused
    } == dict.fromkeys(unused)
    GenerationConfig.from_pretrained(tmp_path / "ours").validate(strict=True)
    if not reason:
        assert read_generation_config(tmp_path / "ours").items() >= settings.items()


def test_export_error_names_generation_config_of_source(bart, tmp_path):
    edit_json(tmp_path / "theirs" / "generation_config.json", forced_bos_token_id=-1)
    with raises(
        ValueError, seen=(f"{tmp_path}/theirs/generation_config.json", "forced_bos_token_id", -1)
    ):
        export(tmp_path / "theirs", tmp_path / "out")


def test_settings_without_effect_in_config_json_are_dropped(bart, tmp_path):
    (tmp_path / "theirs" / "generation_config.json").unlink()
    edit_json(tmp_path / "theirs" / "config.json", length_penalty=2.0, top_k=7)
    notes = convert(tmp_path / "theirs", tmp_path / "ours")["notes"]
    assert [note.split()[1] for note in notes] == ["top_k=7", "length_penalty=2.0"]
    assert not read_generation_config(tmp_path / "ours").keys() & {"length_penalty", "top_k"}


@settings
def test_converted_model_generates_tokens_of_source(settings, reason, bart, tmp_path):
    edit_json(tmp_path / "theirs" / "generation_config.json", **settings)
    source = type(bart).from_pretrained(tmp_path / "theirs").eval()
    ours = getattr(
        vanilla_transformer, convert(tmp_path / "theirs", tmp_path / "ours")["architecture"]
    )
    ours = ours.from_pretrained(tmp_path / "ours").eval()
    kwargs = dict(
        input_ids=make_arguments(bart)["input_ids"], attention_mask=RIGHT, max_new_tokens=8
    )
    if settings.get("do_sample"):
        kwargs["do_sample"] = False  # two models sample different tokens
    assert ours.generate(**kwargs).tolist() == source.generate(**kwargs).tolist()


def test_default_values_are_not_reported(bart, tmp_path):
    neutral = dict(
        temperature=1.0, top_p=1.0, top_k=50, length_penalty=1.0, early_stopping=False, num_beams=1
    )
    edit_json(tmp_path / "theirs" / "generation_config.json", **neutral)
    assert convert(tmp_path / "theirs", tmp_path / "ours")["notes"] == []


@pytest.mark.parametrize(
    "settings",
    [dict(temperature=0.0, do_sample=False), dict(pad_token_id=-1), dict(top_k=7)],
    ids=str,
)
def test_load_logs_and_export_ignores_settings_without_effect(
    settings, tmp_path, caplog, monkeypatch
):
    model = perturbed(
        "VanillaSeq2SeqForConditionalGeneration",
        SIZES | dict(encoder_layers=1, decoder_layers=1, head_dim=8, value_head_dim=8),
    )
    model.save_pretrained(tmp_path / "ours")
    edit_json(tmp_path / "ours" / "generation_config.json", **settings)
    kwargs = dict(input_ids=make_arguments(model)["input_ids"], attention_mask=RIGHT)
    expected = (
        type(model).from_pretrained(tmp_path / "ours").eval().generate(**kwargs, max_new_tokens=8)
    )
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.clear()
    loaded = load_checkpoint(tmp_path / "ours")
    [(name, value)] = {
        name: value for name, value in settings.items() if name != "do_sample"
    }.items()
    assert f"{name}={value!r}" in caplog.text
    assert loaded.generate(**kwargs, max_new_tokens=8).tolist() == expected.tolist()
    export(tmp_path / "ours", tmp_path / "export", target="cpu", cases=3)
    actual = Runtime(tmp_path / "export").generate(
        *(tensor.numpy() for tensor in kwargs.values()), max_new_tokens=8
    )
    assert actual.tolist() == expected.tolist()
