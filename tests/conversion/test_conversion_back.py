"""Tests of conversion to other families: outputs match, and a round trip keeps every tensor."""

import functools
import json
import os
import random
import re

import pytest
import torch
import transformers
from families import (
    BACK,
    LLAMAS,
    RIGHT,
    SEEDS,
    T5,
    assert_exact,
    cases,
    compute_outputs,
    every_class_once,
    make_arguments,
    random_config,
    random_model,
)
from messages import raises
from safetensors.torch import load_file
from torch import nn
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding

import vanilla_transformer
from vanilla_transformer.conversion import FAMILIES, convert
from vanilla_transformer.conversion.fields import READ_BY

# Fields of the config of each family, and of those like it, besides sizes, activations, biases and
# tying.
AFTER_PADDING = dict(
    position_ids_from="ids", scale_embedding=False, embedding_norm=True, pad_token_id=1
)
FIXED = {
    "bert": dict(position_embedding_type="learned", scale_embedding=False, embedding_norm=True),
    "roberta": dict(position_embedding_type="learned", **AFTER_PADDING),
    "mpnet": dict(position_embedding_type="learned_relative", **AFTER_PADDING),
    "gpt2": dict(
        position_embedding_type="learned",
        scale_embedding=False,
        norm_first=True,
        lm_head_bias=False,
    ),
    "opt": dict(
        position_embedding_type="learned", position_ids_from="mask", scale_embedding=False,
        norm_first=True, lm_head_bias=False, embedding_dropout=0.0,
    ),
    "bart": dict(position_embedding_type="learned", embedding_norm=True),
    "mbart": dict(
        position_embedding_type="learned",
        embedding_norm=True,
        norm_first=True,
        wrap_last_token=True,
    ),
    "marian": dict(),
    "m2m_100": dict(
        position_embedding_type="learned", position_ids_from="ids", norm_first=True,
        lm_head_bias=False, pad_token_id=1,
    ),
    "pegasus": dict(norm_first=True),
    "vit": dict(),
}  # fmt: skip
FIXED["t5"] = dict(
    position_embedding_type="relative", relative_attention_num_buckets=8,
    relative_attention_max_distance=6, gated=True, norm_type="rms_norm", norm_first=True,
    linear_bias=False, lm_head_bias=False, scale_embedding=False, head_dim=16,
    hidden_act="gelu_new",
)  # fmt: skip
ROTARY = dict(
    position_embedding_type="rotary", gated=True, norm_type="rms_norm", norm_first=True,
    linear_bias=False, lm_head_bias=False, scale_embedding=False, head_dim=6, dropout=0.0,
    embedding_dropout=0.0, max_position_embeddings=64,
)  # fmt: skip
FIXED["llama"] = FIXED["mistral"] = FIXED["eurobert"] = ROTARY
FIXED["qwen2"] = ROTARY | dict(attention_bias=True, head_dim=None)
FIXED["qwen3"] = ROTARY | dict(use_qk_norm=True)
FIXED["gemma3_text"] = ROTARY | dict(use_qk_norm=True, sandwich_norm=True, scale_embedding=True)
ROTARY_BERT = dict(
    position_embedding_type="rotary", gated=True, scale_embedding=False, embedding_norm=True,
    rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 77.0},
)  # fmt: skip
FIXED["nomic_bert"] = ROTARY_BERT | dict(linear_bias=False, tie_word_embeddings=True)
FIXED["gte"] = ROTARY_BERT | dict(activation_dropout=0.1)
FIXED["albert"] = FIXED["bert"] | dict(embedding_size=5)
FIXED["deberta-v2"] = dict(
    position_embedding_type="disentangled", scale_embedding=False, embedding_norm=True,
    relative_attention_num_buckets=8, relative_attention_max_distance=6,
)  # fmt: skip
FIXED["modernbert"] = dict(
    position_embedding_type="rotary", gated=True, scale_embedding=False, embedding_norm=True,
    norm_first=True, skip_first_prenorm=True, dropout=0.0, sliding_window=2, pooler_act=None,
    hidden_size=20, num_attention_heads=5, num_hidden_layers=3,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={
        "full_attention": {"rope_theta": 300.0, "rope_type": "linear", "factor": 2.0},
        "sliding_attention": {"rope_theta": 77.0},
    },
    classifier_act="silu", classifier_pooling="mean", linear_bias=False, type_vocab_size=0,
)  # fmt: skip
FIXED |= {name: FIXED[family.like] for name, family in FAMILIES.items() if family.like}
TEXT_FIELDS = ("vocab_size", "max_position_embeddings", "tie_word_embeddings")
# Number of rows of the position table that no token reads.
UNREAD_ROWS = {
    "bart": 2,
    "mbart": 2,
    "opt": 1,
    "roberta": 1,
    "mpnet": 1,
}
OURS = {family: names.values() for family, names in BACK.items()}


def our_model(family, architecture, seed, dtype=torch.float32, **changes):
    """Return a random model of ours that `family` can represent."""
    rng = random.Random(f"{family} {architecture} {seed}")
    heads = rng.choice([1, 3, 5])
    activation = rng.choice(["relu", "gelu", "silu"])
    fields = dict(
        vocab_size=rng.randint(30, 60), hidden_size=heads * rng.choice([4, 6]),
        num_attention_heads=heads, intermediate_size=rng.randint(10, 30), hidden_act=activation,
        max_position_embeddings=rng.randint(24, 40), tie_word_embeddings=seed % 2 == 0,
        num_labels=2 if architecture.endswith(("QuestionAnswering", "PreTraining")) else 3,
    )  # fmt: skip
    if "Seq2Seq" in architecture:
        fields |= dict(
            encoder_layers=rng.randint(1, 3),
            decoder_layers=rng.randint(1, 3),
            scale_embedding=rng.random() < 0.5,
        )
        fields |= dict(lm_head_bias=rng.random() < 0.5)
    else:
        fields |= dict(num_hidden_layers=rng.randint(1, 3))
    if family in LLAMAS:
        rope = dict(rope_theta=rng.choice([500.0, 1e6]), rope_type="linear", factor=2.0)
        fields |= dict(num_attention_heads=2 * heads, num_key_value_heads=heads)
        fields |= dict(rope_parameters=rope, hidden_size=heads * rng.choice([4, 8]))
    if family == "opt":
        fields |= dict(embedding_size=[7, None][seed % 2])
    if family in ("bert", "albert", "nomic_bert", "deberta-v2"):
        fields |= dict(
            pooler_act="tanh", lm_transform_act=activation, type_vocab_size=rng.choice([0, 2])
        )
    elif family == "eurobert":
        is_classifier = architecture == "VanillaEncoderForSequenceClassification"
        fields |= dict(pooler_act="gelu" if is_classifier else None, classifier_dropout=0.0)
    elif FAMILIES[family].variant == "encoder" and family not in LLAMAS:
        types = 0 if family == "mpnet" else rng.choice([0, 2])
        fields |= dict(pooler_act="tanh", lm_transform_act="gelu", type_vocab_size=types)
    if architecture == "VanillaEncoderModel" and family in ("deberta-v2", "nomic_bert", "gte"):
        fields |= dict(pooler_act=None)
    if family == "vit":
        fields = {name: value for name, value in fields.items() if name not in TEXT_FIELDS}
        fields |= dict(
            image_size=rng.choice([13, [8, 15]]),
            patch_size=rng.choice([4, [4, 5]]),
            num_channels=rng.choice([1, 3]),
        )
        fields |= dict(
            pooler_act=rng.choice(["tanh", "relu"])
            if architecture == "VanillaVisionModel"
            else None
        )
    model_class = getattr(vanilla_transformer, architecture)
    fixed = dict(FIXED[family])
    if family not in ("gpt2", "opt", *LLAMAS) and architecture == "VanillaDecoderForCausalLM":
        fixed |= dict(add_cross_attention=True, lm_head_bias=False)
        fixed.pop("wrap_last_token", None)
    config = model_class.config_class(**fields | fixed | changes)
    transformers.set_seed(0)
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.weight += 1
        # these families have one embedding matrix for encoder and decoder
        if family in T5 and "Seq2Seq" in architecture:
            model.get_decoder().embeddings.embed_tokens.weight.copy_(
                model.get_encoder().embeddings.embed_tokens.weight
            )
        for name, parameter in model.named_parameters():
            if family == "gte" and name.endswith(("gate_proj.bias", "up_proj.bias")):
                parameter.zero_()
            if family == "albert" and "layers." in name:  # all layers have the weights of one
                first = re.sub(r"layers\.\d+", "layers.0", name)
                parameter.copy_(model.get_parameter(first))
            if family == "qwen2" and name.endswith("o_proj.bias"):
                parameter.zero_()
            if (
                family == "m2m_100"
                and config.position_ids_from == "ids"
                and "embed_positions" in name
            ):
                parameter.copy_(fairseq_table(config))
    return model


def fairseq_table(config):
    """Return the position table that transformers computes, from the row of padding on."""
    rows = config.pad_token_id + 1 + config.max_position_embeddings
    table = M2M100SinusoidalPositionalEmbedding.get_embedding(
        rows, config.hidden_size, config.pad_token_id
    )
    return table[config.pad_token_id :]


def converted_back(model, family, tmp_path):
    model.save_pretrained(tmp_path / "ours")
    result = convert(tmp_path / "ours", tmp_path / "theirs", to=family)
    return getattr(transformers, result["architecture"]).from_pretrained(tmp_path / "theirs").eval()


@every_class_once(OURS)
def test_checkpoint_converted_back_gives_same_outputs(family, architecture, dtype, seed, tmp_path):
    ours = our_model(family, architecture, seed, dtype)
    theirs = converted_back(ours, family, tmp_path)
    assert theirs.dtype == dtype
    inputs = make_arguments(ours)
    got, expected = compute_outputs(theirs, inputs), compute_outputs(ours, inputs)
    if family in ("marian", "pegasus") and architecture == "VanillaSeq2SeqModel":
        got["last_hidden_state"] = got["last_hidden_state"].unflatten(-1, (2, -1)).mT.flatten(-2)
    assert got.keys() == expected.keys() and got
    for name in got:
        assert_exact(got[name], expected[name], dtype, family)


@pytest.mark.parametrize(
    "family", ["gpt2", "opt", "qwen3", "bart", "mbart", "marian", "m2m_100", "pegasus", "t5"]
)
def test_model_converted_back_generates_same_tokens(family, tmp_path):
    architecture = HEAD[family]
    ours = our_model(family, architecture, 0, eos_token_id=2)
    ours.generation_config.update(
        max_new_tokens=12,
        do_sample=False,
        no_repeat_ngram_size=1,
        min_new_tokens=6,
        pad_token_id=0,
    )
    theirs = converted_back(ours, family, tmp_path)
    inputs = dict(input_ids=make_arguments(ours)["input_ids"], attention_mask=RIGHT)
    if family in ("gpt2", "opt", "qwen3"):
        inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    for beams in (1, 4):
        expected = ours.generate(**inputs, num_beams=beams)
        assert len(expected.unique()) > 4, "a model that repeats itself proves little"
        assert theirs.generate(**inputs, num_beams=beams).tolist() == expected.tolist()


def read_tensors(path, architecture):
    """Return {name: tensor} of a checkpoint, by the names in its file.

    NomicBERT and GTE have two kinds of names in files; theirs are those in the class
    `architecture`.
    """
    if architecture.startswith(("NomicBert", "Gte")):
        return getattr(transformers, architecture).from_pretrained(path).state_dict()
    return load_file(path / "model.safetensors")


@SEEDS
@pytest.mark.parametrize("family, architecture", cases(BACK))
def test_round_trip_keeps_every_tensor(family, architecture, seed, tmp_path):
    config = random_config(family, architecture, seed)
    plain = dict(
        scale_decoder_outputs=True,  # as in T5 with a tied head
        qkv_bias=True,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        share_encoder_decoder_embeddings=True,
        query_pre_attn_scalar=getattr(config, "head_dim", None),
        norm_bias=True,
        classifier_bias=True,
    )
    config.update({name: value for name, value in plain.items() if hasattr(config, name)})
    if FAMILIES[family].variant == "seq2seq":
        config.update({"classifier_dropout": 0.0})
    random_model(architecture, config).save_pretrained(tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to=family)
    there, back = (read_tensors(tmp_path / name, architecture) for name in ("there", "back"))
    unread = {"model.shared.weight", "shared.weight", "cls.predictions.bias", "lm_head.bias"}
    unread.add("predictions.bias")  # of ALBERT
    unread = set() if getattr(config, "tie_word_embeddings", True) else unread
    unsaved = (
        {name for name in back if "embed_positions" in name}
        if architecture == "MarianMTModel"
        else set()
    )
    assert there.keys() == back.keys() - unsaved
    for name in there.keys() - unread:
        offset = (
            UNREAD_ROWS.get(FAMILIES[family].like or family, 0)
            if "embed_positions" in name or "position_embeddings" in name
            else 0
        )
        # the scale is not a power of 2
        is_scaled = family == "t5" and name == "decoder.final_layer_norm.weight"
        is_scaled |= family == "deberta-v2" and "query_proj" in name
        if is_scaled or (family == "gemma3_text" and "norm" in name):
            torch.testing.assert_close(there[name], back[name], rtol=1e-6, atol=0)
        else:
            assert torch.equal(there[name][offset:], back[name][offset:]), name


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
HEAD = {
    "modernbert": "VanillaEncoderForMaskedLM",
    "nomic_bert": "VanillaEncoderForMaskedLM",
    "gte": "VanillaEncoderForMaskedLM",
    "albert": "VanillaEncoderForMaskedLM",
    "deberta-v2": "VanillaEncoderForMaskedLM",
    "bert": "VanillaEncoderForPreTraining",
    "xlm-roberta": "VanillaEncoderForMaskedLM",
    "mpnet": "VanillaEncoderForMaskedLM",
    "gpt2": "VanillaDecoderForCausalLM",
    "opt": "VanillaDecoderForCausalLM",
    "llama": "VanillaDecoderForCausalLM",
    "qwen2": "VanillaDecoderForCausalLM",
    "qwen3": "VanillaDecoderForCausalLM",
    "mistral": "VanillaDecoderForCausalLM",
    "eurobert": "VanillaEncoderForSequenceClassification",
    "gemma3_text": "VanillaEncoderModel",
    "bart": "VanillaSeq2SeqForConditionalGeneration",
    "mbart": "VanillaSeq2SeqForConditionalGeneration",
    "marian": "VanillaSeq2SeqForConditionalGeneration",
    "m2m_100": "VanillaSeq2SeqForConditionalGeneration",
    "pegasus": "VanillaSeq2SeqForConditionalGeneration",
    "t5": "VanillaSeq2SeqForConditionalGeneration",
    "vit": "VanillaVisionForImageClassification",
}


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
