"""Tests of configurations: the paper's Table 3, names, defaults and files."""

import json
from dataclasses import fields

import pytest
import torch
from messages import raises
from models import every_config
from transformers import AutoConfig, PreTrainedConfig

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaEncoderConfig,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
)

# Table 3: row, preset, changed fields, parameters in millions. The paper rounds its figures and
# does not give the exact sizes of its two vocabularies. With 37,000 tokens the counts agree within
# 2.5 million, or 6 million for hidden_size 1024.
TABLE_3 = [
    ("base", "base", {}, 65),
    ("A, h 1", "base", dict(h=1), 65),
    ("A, h 4", "base", dict(h=4), 65),
    ("A, h 16", "base", dict(h=16), 65),
    ("A, h 32", "base", dict(h=32), 65),
    ("B, d_k 16", "base", dict(d_k=16, d_v=64), 58),
    ("B, d_k 32", "base", dict(d_k=32, d_v=64), 60),
    ("C, N 2", "base", dict(encoder_layers=2, decoder_layers=2), 36),
    ("C, N 4", "base", dict(encoder_layers=4, decoder_layers=4), 50),
    ("C, N 8", "base", dict(encoder_layers=8, decoder_layers=8), 80),
    ("C, d_model 256", "base", dict(d_model=256, d_k=32, d_v=32), 28),
    ("C, d_model 1024", "base", dict(d_model=1024, d_k=128, d_v=128), 168),
    ("C, d_ff 1024", "base", dict(d_ff=1024), 53),
    ("C, d_ff 4096", "base", dict(d_ff=4096), 90),
    ("E, learned positions", "base", dict(position_embedding_type="learned"), 65),
    ("big", "big", {}, 213),
]


@pytest.mark.parametrize(
    "preset, changes, millions", [row[1:] for row in TABLE_3], ids=[row[0] for row in TABLE_3]
)
def test_parameter_counts_match_table_3(preset, changes, millions):
    config = VanillaSeq2SeqConfig.preset(preset, vocab_size=37_000, **changes)
    with torch.device("meta"):
        model = VanillaSeq2SeqForConditionalGeneration(config)
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert abs(count - millions) <= (6 if config.hidden_size == 1024 else 2.5)


COMMON_DEFAULTS = dict(
    max_position_embeddings=512, position_ids_from="place", rope_parameters=None,
    relative_attention_num_buckets=32, relative_attention_max_distance=128, sliding_window=None,
    scale_embedding=True, embedding_norm=False, norm_first=False, final_norm=False,
    norm_type="layer_norm", layer_norm_eps=1e-5, gated=False, linear_bias=True,
    attention_bias=True, num_key_value_heads=8, use_qk_norm=False, sandwich_norm=False,
    skip_first_prenorm=False, initializer_range=0.02, lm_head_bias=True, activation_dropout=0.0,
    classifier_dropout=0.1,
    tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2, sep_token_id=None,
)  # fmt: skip
DEFAULTS = {
    VanillaEncoderConfig: dict(
        type_vocab_size=0,
        pooler_act=None,
        lm_transform_act=None,
        token_transform_act=None,
        classifier_pooling="cls",
        classifier_act=None,
        layer_types=None,
    ),
    VanillaDecoderConfig: dict(layer_types=None, use_cache=True, add_cross_attention=False),
    VanillaSeq2SeqConfig: dict(
        use_cache=True,
        decoder_start_token_id=1,
        wrap_last_token=False,
        share_encoder_decoder_embeddings=True,
    ),
}


@every_config
def test_features_newer_than_paper_are_off_by_default(config_class):
    config, expected = config_class(), COMMON_DEFAULTS | DEFAULTS[config_class]
    assert {name: getattr(config, name) for name in expected} == expected


@every_config
def test_every_field_has_tested_default(config_class):
    """A new field fails here until its default is listed above. Effects are tested elsewhere."""
    paper = {
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim",
        "value_head_dim", "hidden_act", "embedding_size", "position_embedding_type",
        "embedding_dropout", "dropout", "attention_dropout",
    }  # fmt: skip
    depth = (
        {"encoder_layers", "decoder_layers"}
        if config_class is VanillaSeq2SeqConfig
        else {"num_hidden_layers"}
    )
    names = {field.name for field in fields(config_class)} - {
        field.name for field in fields(PreTrainedConfig)
    }
    assert (
        names - {"auto_map"}
        <= paper | depth | COMMON_DEFAULTS.keys() | DEFAULTS[config_class].keys()
    )


@every_config
def test_embedding_size_defaults_to_hidden_size(config_class):
    assert config_class(d_model=24, h=3).embedding_size == 24
    assert config_class(d_model=24, h=3, embedding_size=7).embedding_size == 7


@pytest.mark.parametrize("norm_first", [False, True])
@every_config
def test_final_norm_defaults_to_norm_first(config_class, norm_first):
    assert config_class(norm_first=norm_first).final_norm is norm_first
    assert (
        config_class(norm_first=norm_first, final_norm=not norm_first).final_norm is not norm_first
    )


@pytest.mark.parametrize("linear_bias", [False, True])
@every_config
def test_attention_bias_defaults_to_linear_bias(config_class, linear_bias):
    assert config_class(linear_bias=linear_bias).attention_bias is linear_bias
    other = config_class(linear_bias=linear_bias, attention_bias=not linear_bias)
    assert other.attention_bias is not linear_bias


@every_config
def test_defaults_match_base_model(config_class):
    config = config_class()
    depth = (
        ("encoder_layers", "decoder_layers")
        if config.is_encoder_decoder
        else ("num_hidden_layers",)
    )
    assert [getattr(config, name) for name in depth] == [6] * len(depth)
    assert (config.hidden_size, config.intermediate_size, config.num_attention_heads) == (
        512,
        2048,
        8,
    )
    assert (config.embedding_dropout, config.dropout, config.attention_dropout) == (0.1, 0.1, 0.0)
    assert (config.hidden_act, config.position_embedding_type, config.norm_first) == (
        "relu",
        "sinusoidal",
        False,
    )


def test_presets_match_papers():
    big = VanillaSeq2SeqConfig.preset("big")
    assert (big.d_model, big.d_ff, big.h, big.dropout, big.embedding_dropout) == (
        1024,
        4096,
        16,
        0.3,
        0.3,
    )
    tiny = VanillaSeq2SeqConfig.preset("tiny")
    assert (tiny.d_model, tiny.d_ff, tiny.h, tiny.encoder_layers, tiny.decoder_layers) == (
        128,
        256,
        4,
        4,
        4,
    )
    assert VanillaSeq2SeqConfig.preset("base").to_dict() == VanillaSeq2SeqConfig().to_dict()
    assert VanillaSeq2SeqConfig.preset("tiny", dropout=0.2, vocab_size=50).dropout == 0.2


SYMBOLS = dict(
    d_model="hidden_size",
    d_ff="intermediate_size",
    h="num_attention_heads",
    d_k="head_dim",
    d_v="value_head_dim",
)


@pytest.mark.parametrize("symbol, field", SYMBOLS.items(), ids=list(SYMBOLS))
@every_config
def test_paper_symbols_are_aliases_of_fields(config_class, symbol, field):
    config = config_class(**{symbol: 64})
    assert getattr(config, field) == getattr(config, symbol) == 64
    setattr(config, symbol, 32)
    assert getattr(config, field) == 32
    assert symbol not in config.to_dict() and config.to_dict()[field] == 32


@pytest.mark.parametrize(
    "config_class", [VanillaEncoderConfig, VanillaDecoderConfig], ids=lambda c: c.model_type
)
def test_n_is_alias_of_num_hidden_layers(config_class):
    assert config_class(N=3).num_hidden_layers == config_class(N=3).N == 3


def test_num_hidden_layers_of_seq2seq_config():
    config = VanillaSeq2SeqConfig(encoder_layers=3, decoder_layers=2)
    assert config.num_hidden_layers == 3
    assert config.get_text_config(decoder=True).num_hidden_layers == 2


def depths(config):
    return config.encoder_layers, config.decoder_layers


@pytest.mark.parametrize("name", ["N", "num_hidden_layers"])
def test_single_depth_sets_both_stacks_of_seq2seq_config(name, tmp_path):
    assert depths(VanillaSeq2SeqConfig(**{name: 1})) == (1, 1)
    assert depths(VanillaSeq2SeqConfig(**{name: 2}, encoder_layers=2, decoder_layers=2)) == (2, 2)
    assert depths(VanillaSeq2SeqConfig.preset("tiny", **{name: 3})) == (3, 3)
    VanillaSeq2SeqConfig(**{name: 1}).save_pretrained(tmp_path)
    assert name not in json.loads((tmp_path / "config.json").read_text())
    assert depths(AutoConfig.from_pretrained(tmp_path)) == (1, 1)


@pytest.mark.parametrize(
    "given",
    [
        dict(N=1, encoder_layers=6),
        dict(num_hidden_layers=1, decoder_layers=2),
        dict(N=1, num_hidden_layers=2),
    ],
    ids=str,
)
def test_conflicting_depths_raise_and_error_names_both(given):
    with raises(ValueError, seen=tuple(f"{name}={value}" for name, value in given.items())):
        VanillaSeq2SeqConfig(**given)


def test_old_config_file_with_n_keeps_its_depths(tmp_path):
    saved = VanillaSeq2SeqConfig(encoder_layers=3, decoder_layers=2).to_dict() | {"N": 1}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert depths(AutoConfig.from_pretrained(tmp_path)) == (3, 2)


@pytest.mark.parametrize(
    "given, d_k, d_v",
    [
        ({}, 64, 64),
        (dict(h=4), 128, 128),
        (dict(d_k=16), 16, 16),
        (dict(d_v=20), 64, 20),
        (dict(h=7, d_k=5, d_v=3), 5, 3),
    ],
    ids=str,
)
def test_head_dims_default_to_hidden_size_divided_by_heads(given, d_k, d_v):
    config = VanillaEncoderConfig(**given)
    assert (config.head_dim, config.value_head_dim) == (d_k, d_v)


NON_DEFAULTS = {
    VanillaEncoderConfig: dict(
        type_vocab_size=2,
        pooler_act="tanh",
        lm_transform_act="gelu",
        token_transform_act="gelu",
        classifier_pooling="mean",
    ),
    VanillaDecoderConfig: dict(use_cache=False, add_cross_attention=True),
    VanillaSeq2SeqConfig: dict(
        use_cache=False, decoder_start_token_id=7, share_encoder_decoder_embeddings=False
    ),
}


@pytest.mark.parametrize(
    "positions", ["sinusoidal", "learned", "rotary", "relative", "learned_relative", "none"]
)
@every_config
def test_fields_newer_than_paper_round_trip(config_class, positions, tmp_path):
    changes = dict(
        position_embedding_type=positions, relative_attention_num_buckets=16,
        rope_parameters={"rope_type": "linear", "rope_theta": 500, "factor": 2.5},
        num_key_value_heads=1, use_qk_norm=True, norm_first=True, sandwich_norm=True,
        skip_first_prenorm=True,
        sliding_window=4, relative_attention_max_distance=20, final_norm=True, linear_bias=True,
        attention_bias=False, norm_type="rms_norm", gated=True, embedding_size=10,
    )  # fmt: skip
    changes |= NON_DEFAULTS[config_class]
    config_class(vocab_size=50, d_model=24, h=3, **changes).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {name: saved[name] for name in changes} == changes
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in changes} == changes


@pytest.mark.parametrize("norm_first", [False, True])
def test_non_default_final_norm_round_trips(norm_first, tmp_path):
    VanillaEncoderConfig(norm_first=norm_first, final_norm=not norm_first).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).final_norm is not norm_first


@every_config
def test_saved_config_round_trips(config_class, tmp_path):
    config = config_class(
        vocab_size=50, d_model=24, d_ff=40, h=3, d_k=5, d_v=7, hidden_act="gelu",
        position_embedding_type="learned", max_position_embeddings=33, scale_embedding=False,
        embedding_norm=True, norm_first=True, layer_norm_eps=1e-6, lm_head_bias=False,
        embedding_dropout=0.2, dropout=0.3, attention_dropout=0.4, activation_dropout=0.05,
        classifier_dropout=0.0, tie_word_embeddings=False, pad_token_id=3, bos_token_id=None,
        eos_token_id=[4, 5], sep_token_id=6, num_labels=3, something_of_the_users="kept",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is config_class
    added_fields = {
        "transformers_version": loaded.transformers_version,
        "_name_or_path": str(tmp_path),
    }
    assert loaded.to_dict() == config.to_dict() | added_fields
    assert (loaded.h, loaded.d_k, loaded.d_v, loaded.num_labels, loaded.something_of_the_users) == (
        3,
        5,
        7,
        3,
        "kept",
    )


@every_config
def test_saved_config_has_default_auto_map(config_class, tmp_path):
    config_class().save_pretrained(tmp_path)
    auto_map = AutoConfig.from_pretrained(tmp_path).auto_map
    assert auto_map == config_class.default_auto_map
    assert {"AutoConfig", "AutoModel"} < set(auto_map)
