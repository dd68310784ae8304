"""Settings of generation_config.json that its mode does not use: transformers loads them and
generates, and so do we."""

import json
import logging

import pytest
from checkpoints import SIZES, edit_json, perturbed
from families import RIGHT, make_arguments, random_config, random_model
from messages import raises
from transformers import GenerationConfig

import vanilla_transformer
from vanilla_transformer.checkpoint import load_checkpoint
from vanilla_transformer.conversion import convert
from vanilla_transformer_export import Runtime, export

# Each with the reason; None where the setting has an effect.
SETTINGS = [
    (dict(temperature=0.0, do_sample=False), "do_sample"),
    (dict(top_p=0.6, top_k=7, min_p=0.1), "do_sample"),
    (dict(typical_p=0.5, epsilon_cutoff=0.1, eta_cutoff=0.1), "do_sample"),
    (dict(length_penalty=2.0), "beams"),
    (dict(early_stopping=True, num_beams=1), "beams"),
    (dict(num_beam_groups=2, diversity_penalty=0.5), "beams"),
    (dict(output_scores=True), "return_dict_in_generate"),
    (dict(use_cache=False, cache_implementation="static"), "use_cache"),
    (dict(pad_token_id=-1), "no token"),
    (dict(eos_token_id=-1), "no token"),
    (dict(length_penalty=2.0, early_stopping=True, num_beams=3), None),
    (dict(temperature=0.7, top_k=7, do_sample=True), None),
]
FLAGS = {"do_sample", "num_beams", "use_cache"}
settings = pytest.mark.parametrize("settings, reason", SETTINGS, ids=str)


@pytest.fixture
def theirs(tmp_path):
    model = random_model("BartForConditionalGeneration", random_config("bart", "", 0))
    model.save_pretrained(tmp_path / "theirs")
    return model


def written(directory):
    return json.loads((directory / "generation_config.json").read_text())


@settings
def test_conversion_drops_what_has_no_effect_and_says_so(settings, reason, theirs, tmp_path):
    edit_json(tmp_path / "theirs" / "generation_config.json", **settings)
    facts = convert(tmp_path / "theirs", tmp_path / "ours")
    unused = settings.keys() - FLAGS if reason else set()
    assert len(facts["notes"]) == len(unused)
    assert all(
        any(f"{name}={settings[name]!r}" in note and reason in note for note in facts["notes"])
        for name in unused
    )
    assert {name: written(tmp_path / "ours").get(name) for name in unused} == dict.fromkeys(unused)
    GenerationConfig.from_pretrained(tmp_path / "ours").validate(strict=True)
    if not reason:
        assert written(tmp_path / "ours").items() >= settings.items()


def test_an_error_about_a_converted_file_names_the_source(theirs, tmp_path):
    edit_json(tmp_path / "theirs" / "generation_config.json", forced_bos_token_id=-1)
    with raises(
        ValueError, seen=(f"{tmp_path}/theirs/generation_config.json", "forced_bos_token_id", -1)
    ):
        export(tmp_path / "theirs", tmp_path / "out")


def test_the_same_settings_in_an_old_config_json(theirs, tmp_path):
    (tmp_path / "theirs" / "generation_config.json").unlink()
    edit_json(tmp_path / "theirs" / "config.json", length_penalty=2.0, top_k=7)
    notes = convert(tmp_path / "theirs", tmp_path / "ours")["notes"]
    assert [note.split()[1] for note in notes] == ["top_k=7", "length_penalty=2.0"]
    assert not written(tmp_path / "ours").keys() & {"length_penalty", "top_k"}


@settings
def test_a_converted_model_generates_the_source_s_tokens(settings, reason, theirs, tmp_path):
    edit_json(tmp_path / "theirs" / "generation_config.json", **settings)
    source = type(theirs).from_pretrained(tmp_path / "theirs").eval()
    ours = getattr(
        vanilla_transformer, convert(tmp_path / "theirs", tmp_path / "ours")["architecture"]
    )
    ours = ours.from_pretrained(tmp_path / "ours").eval()
    given = dict(
        input_ids=make_arguments(theirs)["input_ids"], attention_mask=RIGHT, max_new_tokens=8
    )
    if settings.get("do_sample"):
        given["do_sample"] = False  # the draws of two models differ
    assert ours.generate(**given).tolist() == source.generate(**given).tolist()


def test_a_value_that_is_the_default_is_not_reported(theirs, tmp_path):
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
def test_an_export_of_our_own_checkpoint_generates_the_model_s_tokens(
    settings, tmp_path, caplog, monkeypatch
):
    model = perturbed(
        "VanillaSeq2SeqForConditionalGeneration",
        SIZES | dict(encoder_layers=1, decoder_layers=1, head_dim=8, value_head_dim=8),
    )
    model.save_pretrained(tmp_path / "ours")
    edit_json(tmp_path / "ours" / "generation_config.json", **settings)
    given = dict(input_ids=make_arguments(model)["input_ids"], attention_mask=RIGHT)
    expected = (
        type(model).from_pretrained(tmp_path / "ours").eval().generate(**given, max_new_tokens=8)
    )
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.clear()
    loaded = load_checkpoint(tmp_path / "ours")
    [(name, value)] = {
        name: value for name, value in settings.items() if name != "do_sample"
    }.items()
    assert f"{name}={value!r}" in caplog.text
    assert loaded.generate(**given, max_new_tokens=8).tolist() == expected.tolist()
    export(tmp_path / "ours", tmp_path / "export", target="cpu", cases=3)
    actual = Runtime(tmp_path / "export").generate(
        *(tensor.numpy() for tensor in given.values()), max_new_tokens=8
    )
    assert actual.tolist() == expected.tolist()
