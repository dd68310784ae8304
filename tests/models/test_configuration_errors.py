"""Tests of errors and warnings of configs."""

import logging

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from messages import raises
from models import CONFIGS, every_config
from transformers import AutoConfig

from vanilla_transformer import VanillaDecoderConfig, VanillaEncoderConfig, VanillaSeq2SeqConfig

# ------------------------------------------------------------------------------------------- errors


ERRORS = {
    "heads do not divide the width": (
        dict(d_model=30, h=4),
        ["hidden_size=30", "num_attention_heads=4", "multiple"],
    ),
    "odd width": (dict(d_model=15, h=3), ["even hidden_size", "15"]),
    "odd embeddings": (dict(embedding_size=7, embedding_norm=True), ["even embedding_size", "7"]),
    "position type": (
        dict(position_embedding_type="rope"),
        ["sinusoidal", "learned", "rotary", "relative", "none", "rope"],
    ),
    "odd heads with rotary positions": (
        dict(position_embedding_type="rotary", d_k=5),
        ["rotary", "even head_dim", "got 5"],
    ),
    "odd equal shares with rotary positions": (
        dict(position_embedding_type="rotary", d_model=20, h=4),
        ["rotary", "even head_dim", "got 5"],
    ),
    "buckets odd": (
        dict(relative_attention_num_buckets=7),
        ["relative_attention_num_buckets", "even and at least 4", "got 7"],
    ),
    "buckets few": (
        dict(relative_attention_num_buckets=2),
        ["relative_attention_num_buckets", "even and at least 4", "got 2"],
    ),
    "distance within the buckets": (
        dict(relative_attention_num_buckets=40, relative_attention_max_distance=20),
        [
            "relative_attention_max_distance",
            "above half of relative_attention_num_buckets, 20",
            "got 20",
        ],
    ),
    **{
        f"angles with {parameters}": (
            dict(position_embedding_type="rotary", rope_parameters=parameters),
            seen,
        )
        for parameters, seen in [
            ({"rope_theta": 0}, ["rope_theta", "above 0", "got 0"]),
            ({"rope_theta": -1.0}, ["rope_theta", "above 0", "got -1.0"]),
            ({"rope_theta": float("inf")}, ["rope_theta", "above 0", "got inf"]),
            ({"rope_theta": "far"}, ["rope_theta", "above 0", "got 'far'"]),
            ({"rope_type": "linear"}, ["factor", "above 0", "got None"]),
            ({"rope_type": "linear", "factor": 0.0}, ["factor", "above 0", "got 0.0"]),
            ({"rope_type": "yarn", "factor": 2.0}, ["rope_type", "default or linear", "'yarn'"]),
            ({"rope_type": "longrope"}, ["rope_type", "default or linear", "'longrope'"]),
            ({"partial_rotary_factor": 0.5}, ["rope_theta", "factor", "partial_rotary_factor"]),
            ({"sliding_attention": {"rope_theta": 50}}, ["rope_type", "full_attention", "None"]),
        ]
    },
    "key heads that do not divide": (
        dict(num_key_value_heads=3),
        ["num_key_value_heads", "divide num_attention_heads, 8", "got 3"],
    ),
    "norm of outputs in post-norm": (
        dict(sandwich_norm=True),
        ["sandwich_norm=True", "norm_first=True", "norm_first=False"],
    ),
    "no first norm in post-norm": (
        dict(skip_first_prenorm=True),
        ["skip_first_prenorm=True", "norm_first=True", "norm_first=False"],
    ),
    "an epsilon that is no number": (
        dict(layer_norm_eps=float("nan")),
        ["layer_norm_eps", "finite", "got nan"],
    ),
    "an epsilon below 0": (dict(layer_norm_eps=-1.0), ["layer_norm_eps", "at least 0", "got -1.0"]),
    "an infinite deviation": (
        dict(initializer_range=float("inf")),
        ["initializer_range", "finite", "got inf"],
    ),
    "heads as wide as no matrix": (
        dict(num_attention_heads=2**20, head_dim=2**10),
        ["num_attention_heads=1048576", "head_dim=1024", "at most 268435456"],
    ),
    "unknown activation": (dict(hidden_act="gelou"), ["hidden_act", "gelu, ", "relu", "'gelou'"]),
    "special token as text": (dict(pad_token_id="3"), ["pad_token_id", "int", "'3'"]),
}
for name in [
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim",
    "value_head_dim", "max_position_embeddings", "sliding_window", "embedding_size",
    "num_key_value_heads",
]:  # fmt: skip
    ERRORS |= {
        f"{name} {value}": ({name: value}, [name, "at least 1", str(value)]) for value in (0, -4)
    }
for name in [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "max_position_embeddings",
    "embedding_size",
]:
    ERRORS[f"{name} 10**12"] = ({name: 10**12}, [name, "at most 268435456", str(10**12)])
for name in [
    "embedding_dropout",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "classifier_dropout",
]:
    ERRORS |= {
        f"{name} {value}": ({name: value}, [name, "[0, 1)", str(value)]) for value in (-0.1, 1.0)
    }
for name in ["pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id"]:
    ERRORS |= {
        f"{name} {value}": ({name: value}, [name, str(value), "0 to 36999"])
        for value in (-1, 37_000)
    }
ERRORS["one of two eos_token_id"] = (
    dict(eos_token_id=[2, 40_000]),
    ["eos_token_id", "40000", "0 to 36999"],
)


@pytest.mark.parametrize("given, said", ERRORS.values(), ids=list(ERRORS))
@every_config
def test_invalid_value_error_names_value_and_expected_values(config_class, given, said):
    # Transformers checks the types of fields and raises an error that is no ValueError.
    kind = Exception if "position_embedding_type" in given or "3" in given.values() else ValueError
    with pytest.raises(kind) as error:
        config_class(**given)
    assert [part for part in said if part not in str(error.value)] == []


@pytest.mark.parametrize("config_class", [VanillaDecoderConfig, VanillaSeq2SeqConfig])
def test_sliding_window_of_one_is_for_encoders_only(config_class):
    with raises(ValueError, seen=("sliding_window", 1), expected=2):
        config_class(sliding_window=1)
    assert config_class(sliding_window=2).sliding_window == 2
    assert VanillaEncoderConfig(sliding_window=1).sliding_window == 1


STACKS = [VanillaEncoderConfig, VanillaDecoderConfig]


@pytest.mark.parametrize(
    "types, window, seen, expected",
    [
        (["full_attention"] * 5, None, 5, 6),
        (["chunked_attention"] * 6, 4, "chunked_attention", "sliding_attention"),
        (["sliding_attention"] * 6, None, "sliding_attention", "sliding_window"),
    ],
)
@pytest.mark.parametrize("config_class", STACKS)
def test_invalid_layer_types_raise(config_class, types, window, seen, expected):
    with raises(ValueError, seen=("layer_types", seen), expected=expected):
        config_class(layer_types=types, sliding_window=window)


@pytest.mark.parametrize("config_class", STACKS)
def test_layer_types_follow_changed_window_and_depth(config_class):
    config = config_class(num_hidden_layers=3)
    assert config.types_of_layers(3) == ["full_attention"] * 3
    assert config_class.from_dict(config.to_dict(), sliding_window=4, num_hidden_layers=2)
    config.sliding_window = 4
    assert config.types_of_layers(2) == ["sliding_attention"] * 2


def test_rotary_angles_of_each_layer_type():
    config = VanillaEncoderConfig(
        position_embedding_type="rotary",
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 7.0},
            "sliding_attention": {"rope_theta": 50},
        },
    )
    assert config.rope("full_attention") == (7.0, 2.5)
    assert config.rope("sliding_attention") == (50, 1.0)
    again = VanillaEncoderConfig.from_dict(config.to_dict())
    assert again.rope_parameters == config.rope_parameters


@every_config
def test_base_of_angles_in_older_files_is_read(config_class):
    config = config_class.from_dict({"position_embedding_type": "rotary", "rope_theta": 77.0})
    assert config.rope("full_attention") == (77.0, 1.0)
    assert config_class(position_embedding_type="rotary").rope("full_attention") == (10_000, 1.0)


@pytest.mark.parametrize("config_class", [VanillaDecoderConfig, VanillaSeq2SeqConfig])
def test_disentangled_positions_are_for_encoders_only(config_class):
    with raises(ValueError, seen=config_class.model_type, expected="encoder"):
        config_class(position_embedding_type="disentangled")


@pytest.mark.parametrize("given", [dict(use_qk_norm=True), dict(num_key_value_heads=2)])
def test_disentangled_positions_refuse_other_heads(given):
    [seen] = [f"{name}={value}" for name, value in given.items()]
    with raises(ValueError, seen=seen, expected=8):
        VanillaEncoderConfig(position_embedding_type="disentangled", **given)


def test_disentangled_buckets_reach_their_last_distance():
    given = dict(position_embedding_type="disentangled", relative_attention_num_buckets=9)
    with raises(ValueError, seen=5, expected=5):
        VanillaEncoderConfig(**given, relative_attention_max_distance=5)
    VanillaEncoderConfig(**given, relative_attention_max_distance=6)


ACTIVATIONS = ["pooler_act", "lm_transform_act", "token_transform_act", "classifier_act"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_unknown_encoder_activation_raises(name):
    with raises(ValueError, seen=(name, "tahn")):
        VanillaEncoderConfig(**{name: "tahn"})


def test_negative_type_vocab_size_raises():
    with raises(ValueError, seen=("type_vocab_size", -1), expected=0):
        VanillaEncoderConfig(type_vocab_size=-1)


@pytest.mark.parametrize(
    "config_class, given",
    [
        *[(c, {n: "yes"}) for c in CONFIGS for n in ("final_norm", "attention_bias")],
        *[
            (c, {n: 1.5})
            for c in CONFIGS
            for n in ("sliding_window", "relative_attention_num_buckets")
        ],
        *[
            (c, {n: "far"})
            for c in CONFIGS
            for n in ("rope_parameters", "relative_attention_max_distance")
        ],
        *[(c, {n: v}) for c in CONFIGS for n in ("d_model", "d_ff", "h") for v in ("x", 1.5, None)],
        *[(c, dict(N=1.5)) for c in CONFIGS],
        (VanillaEncoderConfig, dict(type_vocab_size="two")),
        (VanillaEncoderConfig, dict(pooler_act=True)),
        (VanillaEncoderConfig, dict(classifier_pooling="max")),
        (VanillaDecoderConfig, dict(add_cross_attention="no")),
        (VanillaSeq2SeqConfig, dict(share_encoder_decoder_embeddings=None)),
    ],
    ids=lambda x: getattr(x, "model_type", None) or "-".join(f"{n}={v}" for n, v in x.items()),
)
def test_wrong_type_error_names_field(config_class, given):
    (name,) = given
    field = (
        "encoder_layers"
        if config_class is VanillaSeq2SeqConfig and name == "N"
        else config_class.attribute_map.get(name, name)
    )
    with raises(StrictDataclassError, seen=field):
        config_class(**given)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "config_class, name",
    [
        (VanillaEncoderConfig, "num_hidden_layers"),
        (VanillaDecoderConfig, "num_hidden_layers"),
        (VanillaSeq2SeqConfig, "encoder_layers"),
        (VanillaSeq2SeqConfig, "decoder_layers"),
    ],
)
def test_stack_without_layers_raises(config_class, name, value):
    with raises(ValueError, seen=(name, value), expected=1):
        config_class(**{name: value})


@pytest.mark.parametrize("value", [-1, 50])
def test_start_token_outside_vocabulary_raises(value):
    with raises(ValueError, seen=("decoder_start_token_id", value), expected=(0, 49)):
        VanillaSeq2SeqConfig(vocab_size=50, decoder_start_token_id=value)


def test_unknown_preset_error_lists_presets():
    with raises(ValueError, seen="huge", expected=("base", "big", "tiny")):
        VanillaSeq2SeqConfig.preset("huge")


def test_invalid_value_set_later_is_not_saved(tmp_path):
    config = VanillaEncoderConfig()
    config.dropout = 2.0
    with raises(Exception, seen="2.0", expected=(0, 1)):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


# ----------------------------------------------------------------------------------------- warnings


@pytest.mark.parametrize(
    "misspelt, field",
    [
        ("hiden_size", "hidden_size"),
        ("embeding_size", "embedding_size"),
        ("num_attention_head", "num_attention_heads"),
        ("layer_norm_epsilon", "layer_norm_eps"),
        ("d_modell", "d_model"),
        ("tie_words_embeddings", "tie_word_embeddings"),
        ("activation_droput", "activation_dropout"),
        ("position_embeding_type", "position_embedding_type"),
        ("slidding_window", "sliding_window"),
        ("final_norms", "final_norm"),
        ("linear_biases", "linear_bias"),
        ("rope_parameter", "rope_parameters"),
        ("relative_attention_buckets", "relative_attention_num_buckets"),
        ("relative_attention_max_distances", "relative_attention_max_distance"),
    ],
)
@every_config
def test_misspelt_field_warns_and_names_field(config_class, misspelt, field, caplog):
    with caplog.at_level(logging.WARNING):
        config = config_class(**{misspelt: 16})
    assert len(caplog.messages) == 1
    assert repr(misspelt) in caplog.messages[0] and repr(field) in caplog.messages[0]
    assert config_class.__name__ in caplog.messages[0]
    assert getattr(config, misspelt) == 16, "kept, as everywhere in transformers"


@pytest.mark.parametrize(
    "config_class, misspelt, field",
    [
        (VanillaEncoderConfig, "type_vocabulary_size", "type_vocab_size"),
        (VanillaEncoderConfig, "pooler_acts", "pooler_act"),
        (VanillaEncoderConfig, "lm_transforms_act", "lm_transform_act"),
        (VanillaEncoderConfig, "token_transforms_act", "token_transform_act"),
        (VanillaDecoderConfig, "add_crossattention", "add_cross_attention"),
        (
            VanillaSeq2SeqConfig,
            "share_encoder_decoder_embedding",
            "share_encoder_decoder_embeddings",
        ),
        (VanillaSeq2SeqConfig, "decoder_start_token", "decoder_start_token_id"),
    ],
)
def test_misspelt_field_of_one_variant_warns_and_names_field(config_class, misspelt, field, caplog):
    with caplog.at_level(logging.WARNING):
        config_class(**{misspelt: 1})
    assert (
        len(caplog.messages) == 1
        and repr(misspelt) in caplog.messages[0]
        and repr(field) in caplog.messages[0]
    )


@every_config
def test_unrelated_name_is_kept_without_warning(config_class, caplog):
    with caplog.at_level(logging.WARNING):
        assert config_class(training_corpus="multi30k").training_corpus == "multi30k"
    assert caplog.messages == []


@every_config
def test_valid_names_do_not_warn(config_class, caplog, tmp_path):
    with caplog.at_level(logging.WARNING):
        config = config_class(
            d_model=16,
            d_ff=20,
            h=2,
            d_k=3,
            d_v=4,
            num_labels=3,
            output_attentions=True,
            dtype="float32",
        )
        config_class(num_hidden_layers=2).save_pretrained(tmp_path)
        AutoConfig.from_pretrained(tmp_path, attn_implementation="eager")
    assert (config.num_labels, config.output_attentions, config.dtype) == (3, True, torch.float32)
    assert caplog.messages == []
