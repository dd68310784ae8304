"""Encoders as on the Hub: the config.json of popular checkpoints, the names of their tensors."""

import json
import re

import pytest
import torch
import transformers
from checkpoints import edit_json
from families import random_model
from hub_encoders import HUB_ENCODERS
from messages import raises
from safetensors.torch import load_file, save_file

import vanilla_transformer
from vanilla_transformer.conversion import convert
from vanilla_transformer.conversion.converter import as_class, get_converter
from vanilla_transformer.conversion.plan_parts import read_known_config, vanilla_config
from vanilla_transformer.source import Source

NAMES = pytest.mark.parametrize("name", HUB_ENCODERS)
SMALL = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 4, "vocab_size": 64}
SMALL |= {"num_attention_heads": 3}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
}
GPT2_NAMES |= {"num_attention_heads": "n_head"}


def write_config(directory, content):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(content))
    return read_known_config(Source.open(directory))


def narrow(content):
    """Return `content` with the sizes of `SMALL`, and windows and ranges that 60 tokens pass."""
    sizes = {name: value for name, value in SMALL.items() if name in content}
    gpt2 = {new: SMALL[name] for name, new in GPT2_NAMES.items() if new in content}
    special = {name: value for name, value in TOKENS.items() if content.get(name) is not None}
    special |= {name: 3 for name in ("cls_token_id", "sep_token_id") if name in content}
    short = {"local_attention": 8, "position_buckets": 8, "embedding_size": 7}
    short |= {"pooler_hidden_size": 24}
    short |= {"max_position_embeddings": 700} if content["model_type"] == "albert" else {}
    changed = {name: value for name, value in short.items() if name in content}
    return content | sizes | gpt2 | special | changed


def reference_config(name, content):
    """Return the config of transformers' class with the meaning of the Hub's `content`."""
    if content["model_type"] == "nomic_bert":
        rope = {"rope_type": "default", "rope_theta": 1000.0}
        return transformers.NomicBertConfig(**SMALL, rope_parameters=rope, type_vocab_size=2)
    if content["model_type"] in ("new", "gte"):
        kept = {key: content[key] for key in ("type_vocab_size", "pad_token_id")}
        head_dim = SMALL["hidden_size"] // SMALL["num_attention_heads"]
        scaling = content["rope_scaling"] or {"factor": 1.0}
        factor = scaling["factor"]
        rope = {
            "rope_type": "linear",
            "rope_theta": content["rope_theta"] * factor,
            "factor": factor ** (2 / head_dim),
        }
        return transformers.GteConfig(**SMALL, **kept, rope_parameters=rope, num_labels=1)
    config_class = transformers.CONFIG_MAPPING[content["model_type"]]
    return config_class.from_dict(dict(content))


def save_as_on_hub(name, directory):
    """Save a random checkpoint with the names of tensors and fields of `name` on the Hub, narrow,
    and return transformers' model."""
    encoder = HUB_ENCODERS[name]
    content = narrow(encoder.content)
    model = random_model(encoder.architecture, reference_config(name, content))
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    prefix = f"^{re.escape(model.base_model_prefix)}\\."
    renamed = {re.sub(prefix, encoder.prefix, key): value for key, value in tensors.items()}
    save_file(renamed, directory / "model.safetensors", {"format": "pt"})
    write_config(directory, content)
    return model


@NAMES
def test_config_on_hub_gives_fields_and_published_size(name, tmp_path):
    encoder = HUB_ENCODERS[name]
    theirs = write_config(tmp_path / "hub", encoder.content)
    converter = get_converter(theirs.model_type)
    theirs = as_class(theirs, encoder.architecture)
    model_class = getattr(vanilla_transformer, converter.ARCHITECTURES[encoder.architecture])
    config = vanilla_config(theirs, converter, (), model_class.config_class)
    for field, value in encoder.expected.items():
        assert getattr(config, field) == value
    with torch.device("meta"):
        model = model_class(config)
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert abs(count - encoder.millions) <= 0.02 * encoder.millions


@NAMES
def test_checkpoint_as_on_hub_gives_same_outputs(name, tmp_path):
    theirs = save_as_on_hub(name, tmp_path / "hub")
    result = convert(tmp_path / "hub", tmp_path / "ours")
    ours = getattr(vanilla_transformer, result["architecture"]).from_pretrained(tmp_path / "ours")
    for length, side in ((60, "right"), (60, "left"), (600, "right" if len(name) % 2 else "left")):
        assert_same_outputs(theirs, ours, length, side)


def assert_same_outputs(theirs, ours, length, side):
    transformers.set_seed(1)
    mask = (torch.arange(length) < torch.tensor([[length], [length // 2], [3]])).long()
    mask = mask if side == "right" else mask.flip(1)
    ids = torch.randint(4, SMALL["vocab_size"], mask.shape) * mask
    ids += (1 - mask) * (theirs.config.pad_token_id or 0)
    with torch.no_grad():
        expected, got = (m.eval()(ids, attention_mask=mask)[0] for m in (theirs, ours))
    if expected.shape[:2] == mask.shape:
        expected, got = expected[mask.bool()], got[mask.bool()]
    elif side == "left":  # the first token is padding
        expected, got = expected[:1], got[:1]
    error = (got - expected).abs().max()
    assert error <= 1e-5 * max(1, expected.abs().max()), (length, side)


MODERNBERT, NOMIC = "answerdotai/ModernBERT-base", "nomic-ai/nomic-embed-text-v1"
GTE, GTE_LARGE = "Alibaba-NLP/gte-base-en-v1.5", "Alibaba-NLP/gte-large-en-v1.5"
DEBERTA, ALBERT = "microsoft/deberta-v3-base", "albert/albert-base-v2"


@pytest.mark.parametrize(
    "name, changes, seen, expected",
    [
        (MODERNBERT, {"local_attention": 7}, "local_attention=7", "even"),
        (NOMIC, {"rotary_scaling_factor": 2}, "rotary_scaling_factor=2", "None"),
        (NOMIC, {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction=0.5", "1.0"),
        (NOMIC, {"prenorm": True}, "prenorm=True", "False"),
        (NOMIC, {"activation_function": "gelu"}, "gelu", "swiglu"),
        (GTE, {"logn_attention_scale": True}, "logn_attention_scale", "False"),
        (GTE, {"pack_qkv": False}, "pack_qkv=False", "True"),
        (
            GTE_LARGE,
            {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}, "mixed_b=0.5", "None",
        ),
        (DEBERTA, {"conv_kernel_size": 3}, "conv_kernel_size=3", "None"),
        (DEBERTA, {"position_buckets": -1}, "position_buckets=-1", "at least 1"),
        (DEBERTA, {"position_buckets": 3}, "got 3", "must be at least 4"),
        (DEBERTA, {"pos_att_type": "c2p"}, "c2p", "p2c"),
        (ALBERT, {"num_hidden_groups": 2}, "num_hidden_groups=2", "1"),
        (ALBERT, {"embedding_size": 24}, "embedding_size=24", "another width"),
    ],
)  # fmt: skip
def test_field_that_changes_architecture_is_rejected(name, changes, seen, expected, tmp_path):
    save_as_on_hub(name, tmp_path / "hub")
    content = json.loads((tmp_path / "hub" / "config.json").read_text()) | changes
    (tmp_path / "hub" / "config.json").write_text(json.dumps(content))
    with raises(ValueError, seen=seen, expected=expected):
        convert(tmp_path / "hub", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@NAMES
def test_tensor_of_changed_architecture_is_rejected(name, tmp_path):
    save_as_on_hub(name, tmp_path / "hub")
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    layer = next(key for key in tensors if re.search(r"layers?\.\d|albert_layers\.0", key))
    extra = f"{layer.rpartition('.')[0]}.gate_of_experts.weight"
    save_file({**tensors, extra: torch.ones(2)}, tmp_path / "hub" / "model.safetensors")
    with raises(ValueError, seen="gate_of_experts"):
        convert(tmp_path / "hub", tmp_path / "ours")


def test_layers_that_differ_do_not_become_albert(tmp_path):
    save_as_on_hub(ALBERT, tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "ours")
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    tensors["model.layers.2.feed_forward.up_proj.bias"] += 1e-3
    save_file(tensors, tmp_path / "ours" / "model.safetensors", {"format": "pt"})
    with raises(ValueError, seen="4 tensors", expected="equal"):
        convert(tmp_path / "ours", tmp_path / "back", to="albert")
    assert not (tmp_path / "back").exists()


def test_decoder_with_windows_that_reads_both_sides_is_rejected(tmp_path):
    """Its window would be of the last tokens; that of an encoder is of tokens on both sides."""
    config = transformers.Qwen2Config(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        use_sliding_window=True, sliding_window=4, max_window_layers=1,
    )  # fmt: skip
    transformers.Qwen2Model(config).save_pretrained(tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "decoder")
    edit_json(tmp_path / "there" / "config.json", is_causal=False)
    with raises(ValueError, seen=("sliding_window", 4), expected=None):
        convert(tmp_path / "there", tmp_path / "encoder")
