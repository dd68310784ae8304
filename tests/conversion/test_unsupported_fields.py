"""Tests of fields of our configs that a family cannot represent."""

import functools
import json
import os

import pytest
import torch
from families import assert_exact, compute_outputs, make_arguments
from messages import raises
from models_of_families import FIXED, HEAD, converted_back, our_model

import vanilla_transformer
from vanilla_transformer.conversion import convert
from vanilla_transformer.conversion.fields import READ_BY

WRONG = {
    "modernbert": dict(
        position_embedding_type="learned", position_ids_from="mask", scale_embedding=True,
        embedding_norm=False, skip_first_prenorm=False, sandwich_norm=True, final_norm=False,
        norm_type="rms_norm", gated=False, head_dim=2, value_head_dim=3, num_key_value_heads=1,
        use_qk_norm=True, type_vocab_size=2, dropout=0.1, embedding_size=7, lm_transform_act=None,
    ),
    "nomic_bert": dict(
        position_embedding_type="learned", scale_embedding=True, embedding_norm=False,
        norm_first=True, norm_type="rms_norm", final_norm=True, gated=False, sliding_window=4,
        num_key_value_heads=1, use_qk_norm=True, embedding_dropout=0.3, linear_bias=True,
        attention_bias=True,
        activation_dropout=0.2, lm_head_bias=False, embedding_size=7,
    ),
    "gte": dict(
        head_dim=2, linear_bias=False, attention_bias=False, activation_dropout=0.2,
        lm_transform_act="relu", position_ids_from="mask",
    ),
    "albert": dict(position_embedding_type="relative", lm_transform_act=None, gated=True),
    "deberta-v2": dict(
        position_embedding_type="learned", lm_head_bias=False, norm_first=True, sliding_window=4,
        gated=True,
    ),
    "bert": dict(
        attention_bias=False,
        position_embedding_type="sinusoidal", scale_embedding=True, embedding_norm=False,
        norm_first=True, final_norm=True, linear_bias=False, sliding_window=4,
        activation_dropout=0.2, embedding_dropout=0.3, head_dim=2, value_head_dim=3,
        pooler_act="relu", lm_transform_act=None, lm_head_bias=False, embedding_size=7,
        num_key_value_heads=1, use_qk_norm=True,
    ),
    "xlm-roberta": dict(
        position_embedding_type="sinusoidal", position_ids_from="place", scale_embedding=True,
        embedding_norm=False, norm_first=True, lm_transform_act="relu", lm_head_bias=False,
    ),
    "mpnet": dict(
        position_embedding_type="relative", position_ids_from="place", pad_token_id=0,
        relative_attention_num_buckets=8, relative_attention_max_distance=64, type_vocab_size=2,
        lm_transform_act="relu",
    ),
    "gpt2": dict(
        attention_bias=False,
        position_embedding_type="rotary", scale_embedding=True, embedding_norm=True,
        norm_first=False, final_norm=False, linear_bias=False, sliding_window=4,
        activation_dropout=0.2, lm_head_bias=True, head_dim=2, add_cross_attention=True,
        embedding_size=7, sandwich_norm=True, skip_first_prenorm=True,
    ),
    "opt": dict(
        attention_bias=False,
        position_embedding_type="rotary", position_ids_from="place", scale_embedding=True,
        embedding_norm=True, layer_norm_eps=1e-6, sliding_window=4, activation_dropout=0.2,
        embedding_dropout=0.3, lm_head_bias=True, head_dim=2, add_cross_attention=True,
    ),
    "mbart": dict(
        position_embedding_type="none", embedding_norm=False, norm_first=False, final_norm=False,
        wrap_last_token=False,
    ),
    "llama": dict(
        position_embedding_type="learned", position_ids_from="mask", scale_embedding=True,
        embedding_norm=True, norm_first=False, skip_first_prenorm=True, final_norm=False,
        norm_type="layer_norm", gated=False, lm_head_bias=True, embedding_size=7, dropout=0.1,
        embedding_dropout=0.3, activation_dropout=0.2, use_qk_norm=True, sandwich_norm=True,
        sliding_window=4, add_cross_attention=True, value_head_dim=3,
    ),
    "qwen2": dict(use_qk_norm=True, linear_bias=True, attention_bias=False, head_dim=2),
    "qwen3": dict(use_qk_norm=False, linear_bias=True),
    "mistral": dict(use_qk_norm=True, linear_bias=True, attention_bias=True),
    "eurobert": dict(
        use_qk_norm=True, linear_bias=True, sliding_window=4, type_vocab_size=2,
        classifier_dropout=0.1, pooler_act="tanh", classifier_act="gelu",
    ),
    "gemma3_text": dict(
        use_qk_norm=False, sandwich_norm=False, scale_embedding=False, linear_bias=True,
        type_vocab_size=2, pooler_act="tanh",
    ),
    "bart": dict(
        attention_bias=False,
        embedding_size=7, wrap_last_token=True, position_embedding_type="none",
        embedding_norm=False, norm_first=True, final_norm=True, linear_bias=False, sliding_window=4,
        embedding_dropout=0.3, layer_norm_eps=1e-6, share_encoder_decoder_embeddings=False,
        value_head_dim=3,
    ),
    "marian": dict(
        attention_bias=False,
        position_embedding_type="learned", embedding_norm=True, norm_first=True, linear_bias=False,
        layer_norm_eps=1e-6, wrap_last_token=True, embedding_size=7,
    ),
    "m2m_100": dict(
        position_embedding_type="sinusoidal", position_ids_from="place", embedding_norm=True,
        norm_first=False, final_norm=False, linear_bias=False, lm_head_bias=True,
        wrap_last_token=True, layer_norm_eps=1e-6,
    ),
    "pegasus": dict(
        position_embedding_type="learned", embedding_norm=True, norm_first=False, final_norm=False
    ),
    "t5": dict(
        attention_bias=True,
        position_embedding_type="none", norm_type="layer_norm", norm_first=False, final_norm=False,
        embedding_norm=True, scale_embedding=True, linear_bias=True, lm_head_bias=True,
        sliding_window=4, wrap_last_token=True, hidden_act="gelu",
        share_encoder_decoder_embeddings=False, value_head_dim=3, embedding_size=7,
    ),
    "vit": dict(
        attention_bias=False,
        num_first_tokens=2, norm_type="rms_norm", norm_first=False, final_norm=False, gated=True,
        linear_bias=False, interpolate_pos_encoding=True, activation_dropout=0.2,
        embedding_dropout=0.3, head_dim=2, value_head_dim=3,
    ),
}  # fmt: skip
# fields of classifiers
OF_CLASSIFIERS = {
    "modernbert": dict(pooler_act="tanh", classifier_act=None),
    "nomic_bert": dict(
        token_transform_act="gelu", classifier_act="gelu", classifier_pooling="mean",
        pooler_act="relu",
    ),
    "albert": dict(classifier_act="gelu"),
    "deberta-v2": dict(classifier_act="gelu", pooler_act=None),
    "bert": dict(
        token_transform_act="gelu", classifier_act="gelu", classifier_pooling="mean",
        pooler_act=None,
    ),
    "mpnet": dict(classifier_dropout=0.3),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A family and a class of ours -> a checkpoint, saved once. Fields are rejected before its
    weights are read."""

    @functools.cache
    def save(family, architecture):
        directory = tmp_path_factory.mktemp(architecture)
        our_model(family, architecture, 0).save_pretrained(directory)
        return directory

    return save


def write_config(source, directory, **changes):
    """Write a checkpoint with the weights of `source`, and its config with `changes`."""
    directory.mkdir()
    os.link(source / "model.safetensors", directory / "model.safetensors")
    content = json.loads((source / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "family, field", [(family, field) for family, fields in WRONG.items() for field in fields]
)
def test_unsupported_field_raises_before_files_are_written(family, field, saved, tmp_path):
    wrong = WRONG[family][field]
    pre_norm = (
        dict(final_norm=FIXED[family].get("norm_first", family == "vit"))
        if field == "norm_first"
        else {}
    )
    if field == "head_dim":
        wrong = 20
    write_config(saved(family, HEAD[family]), tmp_path / "ours", **pre_norm, **{field: wrong})
    with raises(ValueError, seen=(field, wrong)):
        convert(tmp_path / "ours", tmp_path / "theirs", to=family)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    "family, field",
    [(family, field) for family, fields in OF_CLASSIFIERS.items() for field in fields],
)
def test_unsupported_field_of_a_classifier_raises(family, field, saved, tmp_path):
    wrong = OF_CLASSIFIERS[family][field]
    kind = "Token" if field == "token_transform_act" else "Sequence"
    name = f"VanillaEncoderFor{kind}Classification"
    write_config(saved(family, name), tmp_path / "ours", **{field: wrong})
    with raises(ValueError, seen=(field, wrong)):
        convert(tmp_path / "ours", tmp_path / "theirs", to=family)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    "family, architecture, fields",
    [
        ("bert", "VanillaEncoderForPreTraining", dict(classifier_pooling="mean")),
        ("nomic_bert", "VanillaEncoderForMaskedLM", dict(classifier_act="gelu", pooler_act=None)),
        ("gpt2", "VanillaDecoderModel", dict(lm_head_bias=True, rope_parameters={"a": 1})),
        ("t5", "VanillaSeq2SeqModel", dict(max_position_embeddings=9, position_ids_from="mask")),
        ("opt", "VanillaDecoderForSequenceClassification", dict(classifier_dropout=0.3)),
    ],
)
def test_field_that_a_class_does_not_read_may_have_any_value(
    family, architecture, fields, tmp_path
):
    ours = our_model(family, architecture, 0, **fields)
    theirs = converted_back(ours, family, tmp_path)
    inputs = make_arguments(ours)
    got, expected = compute_outputs(theirs, inputs), compute_outputs(ours, inputs)
    assert got and got.keys() == expected.keys()
    for name in got:
        assert_exact(got[name], expected[name], torch.float32, family)


OTHER_VALUES = {
    "pooler_act": "tanh", "lm_transform_act": "gelu", "lm_head_bias": False,
    "token_transform_act": "gelu", "classifier_act": "gelu", "classifier_pooling": "mean",
    "classifier_dropout": 0.7,
}  # fmt: skip
OUR_CLASSES = [
    name
    for config in (
        vanilla_transformer.VanillaEncoderConfig,
        vanilla_transformer.VanillaDecoderConfig,
        vanilla_transformer.VanillaSeq2SeqConfig,
        vanilla_transformer.VanillaVisionConfig,
    )
    for name in config.auto_classes().values()
]


@pytest.mark.parametrize("name", OUR_CLASSES)
@pytest.mark.parametrize("field", READ_BY)
def test_table_of_fields_of_heads_names_the_classes_that_read_them(field, name):
    model_class = getattr(vanilla_transformer, name)
    if field not in model_class.config_class.field_names():
        return
    # pooling of the mean shows where there would be a pooler
    others = dict(pooler_act="tanh") if field == "classifier_pooling" else {}
    changed = layout(model_class, **others, **{field: OTHER_VALUES[field]})
    assert (changed != layout(model_class, **others)) == name.endswith(READ_BY[field])


@functools.cache
def layout(model_class, **fields):
    """Return the modules of a `model_class` with the config `fields`, as text."""
    sizes = dict(hidden_size=8, num_attention_heads=2, intermediate_size=8)
    sizes |= dict(image_size=16) if "Vision" in model_class.__name__ else dict(vocab_size=9)
    with torch.device("meta"):
        return str(model_class(model_class.config_class(**sizes, **fields)))


def test_bias_that_qwen2_lacks_raises_before_files_are_written(tmp_path):
    model = our_model("qwen2", "VanillaDecoderForCausalLM", 0)
    model.model.layers[0].self_attn.o_proj.bias.data += 1
    model.save_pretrained(tmp_path / "ours")
    with raises(ValueError, seen="layers.0.self_attn.o_proj.bias"):
        convert(tmp_path / "ours", tmp_path / "theirs", to="qwen2")
    assert not (tmp_path / "theirs").exists()


def test_base_for_each_kind_of_layer_cannot_become_llama(tmp_path):
    rope = {name: {"rope_theta": 500.0} for name in ("full_attention", "sliding_attention")}
    model = our_model("llama", "VanillaDecoderModel", 0, rope_parameters=rope)
    model.save_pretrained(tmp_path / "ours")
    with raises(ValueError, seen=("rope_parameters", "sliding_attention")):
        convert(tmp_path / "ours", tmp_path / "theirs", to="llama")


def test_window_in_some_layers_cannot_become_mistral(tmp_path):
    kinds = ["full_attention", "sliding_attention"]
    fields = dict(num_hidden_layers=2, layer_types=kinds, sliding_window=4)
    our_model("mistral", "VanillaDecoderModel", 0, **fields).save_pretrained(tmp_path / "ours")
    with raises(ValueError, seen=("layer_types", "full_attention")):
        convert(tmp_path / "ours", tmp_path / "theirs", to="mistral")


def test_other_variant_and_unknown_family_are_rejected(tmp_path):
    our_model("gpt2", "VanillaDecoderModel", 0).save_pretrained(tmp_path / "ours")
    with raises(ValueError, seen=("architectures", "VanillaDecoderModel")):
        convert(tmp_path / "ours", tmp_path / "theirs", to="bert")
    with raises(ValueError, seen="nothing", expected=("bert", "m2m_100")):
        convert(tmp_path / "ours", tmp_path / "theirs", to="nothing")
