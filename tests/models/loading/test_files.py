"""Tests of checkpoint files: every command rejects damaged files in one line."""

import json
import struct

import pytest
import torch
from checkpoint_verbs import VERBS, verbs
from checkpoints import CHECKPOINTS, build, edit_json, edit_tensors
from command_line import read_error
from messages import raises

from vanilla_transformer.conversion import plan_conversion
from vanilla_transformer_export import load_checkpoint

INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00001.safetensors"


def assert_rejected(checkpoint, words, commands=VERBS):
    """Check that each command fails with one line that has all `words`, and writes nothing."""
    before = sorted(checkpoint.parent.rglob("*"))
    for verb in commands:
        line = read_error(*verbs(checkpoint, checkpoint.parent / "out")[verb])
        assert [word for word in words if word not in line] == [], line
    assert sorted(checkpoint.parent.rglob("*")) == before


# ------------------------------------------------------------------------------------------ weights


def edit_header(directory, change):
    """Replace the header of the weights by the result of `change`, valid or not."""
    data = (directory / "model.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.dumps(change(json.loads(data[8:end]))).encode()
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + data[end:]
    )


def first_name(tensors):
    return next(name for name in tensors if name != "__metadata__")


Q_PROJ = "model.decoder.layers.1.self_attn.q_proj.weight"
WEIGHT_VERBS = ["average", "attention", "export", "evaluate"]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop(Q_PROJ), ["1 are missing", Q_PROJ.removeprefix("model.")]),
        (
            lambda t: t[Q_PROJ].fill_(torch.nan),
            [Q_PROJ, "1024 of 1024 values that are NaN or infinite"],
        ),
        (
            lambda t: t.update({Q_PROJ: torch.ones(3, 32)}),
            ["of another shape", "(3, 32) for (32, 32)"],
        ),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.int64)}), ["not floating point", Q_PROJ]),
        (lambda t: t.update(extra=torch.ones(2)), ["1 are unexpected: extra"]),
        (
            lambda t: t.update({name: torch.ones(()) for name in t}),
            ["hidden_size is 32", "expected at most 0"],
        ),
    ],
    ids=["missing", "NaN", "shape", "integers", "unexpected", "no axes"],
)
def test_invalid_weights_are_rejected(checkpoint, change, words):
    edit_tensors(checkpoint, change)
    assert_rejected(checkpoint, words, WEIGHT_VERBS)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:4],
        lambda data: data[:-1],
        lambda data: struct.pack("<Q", 2**63) + data[8:],
        lambda data: struct.pack("<Q", 10**8 - 1) + data[8:],
        lambda data: b"junk" * 99,
    ],
    ids=[
        "8 bytes are missing",
        "the end is missing",
        "a header of 2**63 bytes",
        "a header longer than the file",
        "junk",
    ],
)
def test_damaged_safetensors_file_is_rejected(checkpoint, change):
    path = checkpoint / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    assert_rejected(
        checkpoint,
        [str(path), "is not a complete safetensors file", f"({path.stat().st_size} bytes)"],
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda header: [],
        lambda header: 5,
        lambda header: header | {first_name(header): {**header[first_name(header)], "shape": "x"}},
        lambda header: header | {first_name(header): {**header[first_name(header)], "shape": [-1]}},
        lambda header: (
            header
            | {first_name(header): {**header[first_name(header)], "data_offsets": [0, 10**15]}}
        ),
        lambda header: header | {first_name(header): {**header[first_name(header)], "dtype": "Q8"}},
    ],
    ids=["a list", "a number", "shape x", "shape -1", "offsets behind the end", "unknown type"],
)
def test_invalid_safetensors_header_is_rejected(checkpoint, change):
    edit_header(checkpoint, change)
    assert_rejected(checkpoint, ["model.safetensors is not a complete safetensors file"])


def test_unsupported_tensor_dtype_is_rejected(checkpoint):
    edit_tensors(checkpoint, lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.float8_e4m3fn)}))
    assert_rejected(checkpoint, [Q_PROJ, "is of type F8_E4M3, expected one of ['F64', 'F32',"])


@pytest.mark.parametrize(
    "content, words",
    [
        ("[]", [INDEX, "holds [], expected a JSON object"]),
        ("{", [INDEX, "is not JSON"]),
        ("[" * 100_000, [INDEX, "is not JSON: RecursionError"]),
        ({}, ["the weight_map None, expected an object"]),
        ({"weight_map": []}, ["the weight_map [], expected"]),
        ({"weight_map": {"a": 5}}, ["the weight_map {'a': 5}, expected"]),
        ({"weight_map": {"a": f"../copy/{SHARD}"}}, ["expected .safetensors files beside it"]),
        (
            {"weight_map": {"a": "/etc/passwd"}},
            ["['/etc/passwd'], expected .safetensors files beside it"],
        ),
        ({"weight_map": {"a": ".."}}, ["['..'], expected .safetensors files beside it"]),
        (
            {"weight_map": {"a": "config.json"}},
            ["['config.json'], expected .safetensors files beside it"],
        ),
        (
            {"weight_map": {"a": "gone.safetensors"}},
            [f"lacks gone.safetensors, which {INDEX} names"],
        ),
        ({"weight_map": {"a": SHARD}, "metadata": 5}, ["the metadata 5, expected a JSON object"]),
    ],
    ids=lambda value: str(value)[:40] if not isinstance(value, list) else "",
)
def test_invalid_shard_index_is_rejected(checkpoint, content, words):
    (checkpoint / "model.safetensors").rename(checkpoint / SHARD)
    (checkpoint / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))
    assert_rejected(checkpoint, words)


def test_sharded_checkpoint_loads(checkpoint):
    expected = load_checkpoint(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    expected.save_pretrained(checkpoint, max_shard_size=4000)
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 2
    actual = load_checkpoint(checkpoint).state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.state_dict().items())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_saved_model_loads_with_equal_parameters(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert type(loaded) is type(model) and not loaded.training
    for (expected_name, expected), (actual_name, actual) in zip(
        model.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert (expected_name, expected.dtype) == (actual_name, actual.dtype) and torch.equal(
            expected, actual
        )


def test_tied_matrix_may_be_stored_twice(tmp_path):
    build("causal").save_pretrained(tmp_path)
    edit_tensors(
        tmp_path,
        lambda t: t.update({"lm_head.weight": t["model.embeddings.embed_tokens.weight"].clone()}),
    )
    model = load_checkpoint(tmp_path)
    assert model.lm_head.weight is model.model.embeddings.embed_tokens.weight


def test_tied_matrix_stored_under_other_name_only_raises(tmp_path):
    """Transformers would initialize the matrix at random."""
    build("causal").save_pretrained(tmp_path)
    edit_tensors(
        tmp_path,
        lambda t: t.update({"lm_head.weight": t.pop("model.embeddings.embed_tokens.weight")}),
    )
    with raises(ValueError, seen=(1, "embeddings.embed_tokens.weight")):
        load_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", ["is not JSON"]),
        (b"{", ["is not JSON"]),
        (b'{"model_type": "\xe9"}', ["is not JSON", "utf-8"]),
        (b"[" * 100_000, ["is not JSON: RecursionError"]),
        (b"[]", ["holds [], expected a JSON object"]),
        (b"5", ["holds 5, expected a JSON object"]),
        (b'"x"', ["holds 'x', expected a JSON object"]),
        (b"{}", ["the model_type None, expected a name"]),
        (b'{"model_type": [5]}', ["the model_type [5], expected a name"]),
        (b'{"model_type": "nope"}', ["has model_type nope"]),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, bytes) else "",
)
def test_invalid_config_json_is_rejected(checkpoint, content, words):
    (checkpoint / "config.json").write_bytes(content)
    assert_rejected(checkpoint, words)
    line = read_error("info", checkpoint)
    assert [word for word in words if word not in line] == [], line


FIELDS = [
    (dict(hidden_size="x"), "hidden_size"),
    (dict(hidden_size=-1), "hidden_size must be at least 1, got -1"),
    (dict(hidden_size=10**12), "hidden_size must be at most 268435456"),
    (dict(vocab_size=10**12), "vocab_size must be at most 268435456"),
    (dict(architectures="x"), "the architectures 'x', expected a list of names"),
    (dict(architectures=[5]), "the architectures [5], expected a list of names"),
    (dict(architectures=[]), "and architecture none, expected one of VanillaSeq2SeqModel"),
    (
        dict(architectures=["VanillaPreTrainedModel"]),
        "and architecture VanillaPreTrainedModel, expected one of",
    ),
    (
        dict(architectures=["VanillaEncoderModel"]),
        "and architecture VanillaEncoderModel, expected one of VanillaSeq2SeqModel",
    ),
    (dict(id2label=5), "id2label 5, expected a JSON object"),
    (dict(id2label={"x": "a"}), "'x'"),
    (dict(num_labels=10**12), "num_labels 1000000000000, expected at most"),
    (dict(num_labels="x"), "num_labels 'x', expected"),
    (dict(dtype="nope"), "nope"),
    (dict(quantization_config={}), "quantization_config, expected weights in floating point"),
    (dict(is_encoder_decoder=False), "is_encoder_decoder False, expected True"),
    (dict(return_dict=False), "return_dict False, expected True"),
    (dict(output_hidden_states="x"), "output_hidden_states 'x', expected False"),
    *[
        (dict(_attn_implementation=value), f"_attn_implementation {value}, expected a name")
        for value in (True, 5, [1])
    ],
    (dict(decoder="x"), "the nested configs decoder"),
    (dict(to_dict=5), "the key to_dict, an attribute of the config class: expected only fields"),
    (dict(attribute_map={}), "the key attribute_map, an attribute of the config class"),
]


@pytest.mark.parametrize("fields, word", FIELDS, ids=[str(fields) for fields, _ in FIELDS])
def test_invalid_config_field_is_rejected(checkpoint, fields, word):
    edit_json(checkpoint / "config.json", **fields)
    for arguments in (
        ["info", checkpoint],
        verbs(checkpoint, checkpoint.parent / "out")["average"],
    ):
        line = read_error(*arguments)
        assert word in line and str(checkpoint) in line


@pytest.mark.parametrize("field", ["encoder_layers", "decoder_layers"])
def test_config_with_more_layers_than_weights_is_rejected(checkpoint, field):
    """Layers are counted before the model is built, which 10**9 layers would make impossible."""
    edit_json(checkpoint / "config.json", **{field: 10**9})
    assert_rejected(
        checkpoint,
        [f"{field} is 1000000000 in the config of {checkpoint}, expected at most 2"],
    )


def test_foreign_config_with_more_layers_than_weights_is_rejected(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=16, n_head=2, n_layer=1, vocab_size=20, bos_token_id=1, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", n_layer=10**9)
    with raises(ValueError, seen=("num_hidden_layers", 1000000000), expected=1):
        plan_conversion(tmp_path)


# --------------------------------------------------------------------------- tokenizers, generation


TOKENIZER_VERBS = ["attention", "evaluate", "convert"]


@pytest.mark.parametrize(
    "file, content, word",
    [
        ("tokenizer.json", "{", "is not JSON"),
        ("tokenizer.json", "[]", "holds [], expected a JSON object"),
        ("tokenizer.json", '{"model": 5}', "KeyError"),
        ("tokenizer_config.json", "[]", "holds [], expected a JSON object"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}', "AttributeError"),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "TokenizersBackend", "model_max_length": "x"}',
            "model_max_length is 'x'",
        ),
        ("generation_config.json", "[]", "holds [], expected a JSON object"),
        ("generation_config.json", '"x"', "holds 'x', expected a JSON object"),
    ],
)
def test_damaged_tokenizer_or_generation_config_is_rejected(checkpoint, file, content, word):
    (checkpoint / file).write_text(content)
    assert_rejected(checkpoint, [str(checkpoint), word], TOKENIZER_VERBS)


@pytest.mark.parametrize(
    "content, seen, expected",
    [
        (dict(num_beams="x"), ("num_beams", "x"), (0, 2)),
        (dict(max_length=10**30), ("max_length", 1000000000000000000000000000000), ()),
        (dict(top_k=[5]), ("top_k", 5), ()),
        (dict(temperature="hot"), ("temperature", "hot"), ()),
        (dict(output_hidden_states="x"), ("output_hidden_states", "x"), ()),
        (dict(eos_token_id=10**30), ("eos_token_id",), (0, 2147483647)),
        (dict(pad_token_id=48), ("pad_token_id", 48), (0, 47)),
        (dict(eos_token_id=[2, "x"]), ("eos_token_id", 2, "x"), ()),
        (dict(decoder_start_token_id=[1]), ("decoder_start_token_id", 1), ()),
        (dict(penalty_alpha=0.5), ("penalty_alpha", 0.5), ()),
    ],
    ids=str,
)
def test_invalid_generation_config_field_raises(checkpoint, content, seen, expected):
    edit_json(checkpoint / "generation_config.json", **content)
    with raises(ValueError, seen=("generation_config.json", *seen), expected=expected):
        load_checkpoint(checkpoint)


def test_tokenizer_regex_beyond_backtracking_limit_is_rejected(checkpoint):
    """The regex panics in Rust when a text is tokenized. A PanicException is no Exception."""
    edit_json(
        checkpoint / "tokenizer.json",
        normalizer=None,
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "(a+)+$"},
            "behavior": "Isolated",
            "invert": False,
        },
    )
    arguments = verbs(checkpoint, checkpoint.parent / "out")["attention"]
    line = read_error(*arguments[:2], "a" * 40 + "b", *arguments[3:])
    assert "PanicException" in line and str(checkpoint) in line


def test_checkpoint_without_tokenizer_is_rejected(tmp_path):
    build("seq2seq").save_pretrained(tmp_path / "copy")
    for verb in ("attention", "evaluate"):
        assert_rejected(
            tmp_path / "copy", ["has no tokenizer, expected one of tokenizer.json"], [verb]
        )
