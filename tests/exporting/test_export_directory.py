"""Tests of the export directory: its files and manifest, and what is rejected before writing."""

import json
import re
import shutil

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from checkpoints import CHECKPOINTS, EOS, PAD, WIDTH, default_graphs, default_parity, edit_json
from messages import raises
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers.utils import logging

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaEncoderConfig,
    VanillaEncoderModel,
)
from vanilla_transformer_export import Runtime, export, load_checkpoint
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.exporting import export as exporting
from vanilla_transformer_export.graphs import saving
from vanilla_transformer_export.proof import verify
from vanilla_transformer_export.proof.compare import TOLERANCES, Report


def test_manifest_describes_export(exported):
    manifest = json.loads((exported("seq2seq").directory / "manifest.json").read_text())
    assert manifest["model_type"] == "vanilla-seq2seq"
    assert manifest["architecture"] == "VanillaSeq2SeqForConditionalGeneration"
    assert default_graphs(manifest) == {
        "encoder": "onnx/encoder_model.onnx",
        "decoder": "onnx/decoder_model_merged.onnx",
    }
    assert (manifest["target"], manifest["default_dtype"]) == ("portable", "fp32")
    assert (
        manifest["opset"]
        == onnx.load(exported("seq2seq").directory / "onnx/encoder_model.onnx")
        .opset_import[0]
        .version
    )
    assert default_parity(manifest)["cases"] == 3
    assert default_parity(manifest)["failures"] == 0
    assert 0 < default_parity(manifest)["max_error"] < TOLERANCES["fp32"].max_error
    assert manifest["versions"]["torch"] == torch.__version__
    assert "checkpoint" not in json.dumps(manifest)  # no path of this machine


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_exported_config_keeps_fields_and_has_no_auto_map(exported, name):
    config = json.loads((exported(name).directory / "config.json").read_text())
    assert "auto_map" not in config
    saved = json.loads((exported(name).checkpoint / "config.json").read_text())
    kept = saved.keys() - {"auto_map", "model_type"}  # the model type is one that clients know
    assert {field: config[field] for field in kept} == {field: saved[field] for field in kept}
    assert (exported(name).directory / "generation_config.json").exists() == exported(
        name
    ).model.can_generate()


@pytest.fixture
def quick(exported, monkeypatch):
    """Replace the comparison with torch, which some tests do not need, and return `monkeypatch`."""
    exported("encoder")  # shared by all tests, so made before the replacement
    monkeypatch.setattr(verify, "prove", lambda *_: Report(cases=1))
    return monkeypatch


@pytest.fixture
def checkpoint(exported, tmp_path):
    """A copy of the encoder checkpoint that tests may damage."""
    return shutil.copytree(exported("encoder").checkpoint, tmp_path / "checkpoint")


def test_tokenizer_is_copied_to_export(quick, checkpoint, tmp_path):
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text('{"b": 2}')
    manifest = export(checkpoint, tmp_path / "out")
    copy = tmp_path / "out/tokenizer.json"
    assert copy.read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert set(manifest["files"]) == {
        "config.json",
        "onnx/model.onnx",
        "reference.npz",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"added_tokens": 5}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "target_tokenizer.json"])
def test_error_names_damaged_tokenizer_and_no_files_are_written(
    quick, checkpoint, tmp_path, name, content
):
    (checkpoint / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(checkpoint / name))):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_error_names_damaged_tokenizer_config(quick, checkpoint, tmp_path):
    path = checkpoint / "tokenizer_config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        export(checkpoint, tmp_path / "out")


@pytest.mark.parametrize(
    "name, value", [("eos_token_id", []), ("bad_words_ids", 5), ("suppress_tokens", "x")]
)
def test_error_names_invalid_generation_setting_and_its_file(
    exported, quick, tmp_path, name, value
):
    checkpoint = shutil.copytree(exported("causal").checkpoint, tmp_path / "checkpoint")
    path = checkpoint / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with raises(ValueError, seen=(path, name, value)):
        export(checkpoint, tmp_path / "out")


def test_export_leaves_out_prompt_lookup_with_a_note(exported, quick, tmp_path):
    checkpoint = shutil.copytree(exported("causal").checkpoint, tmp_path / "checkpoint")
    edit_json(checkpoint / "generation_config.json", prompt_lookup_num_tokens=7)
    with pytest.warns(UserWarning, match="prompt_lookup_num_tokens=7 is left out"):
        export(checkpoint, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert "prompt_lookup_num_tokens" not in settings


def test_existing_directory_is_replaced_only_with_force(quick, checkpoint, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    with raises(FileExistsError, seen="out", expected="--force"):
        export(checkpoint, out)
    assert [path.name for path in out.iterdir()] == ["mine"]
    with raises(FileExistsError, seen=("out", "mine")):
        export(checkpoint, out, force=True)
    (out / "mine").unlink()
    for force in (False, True):
        export(checkpoint, out, force=force)
        assert sorted(path.name for path in out.iterdir()) == [
            "README.md",
            "config.json",
            "manifest.json",
            "onnx",
            "reference.npz",
        ]


@pytest.mark.parametrize("force", [False, True])
def test_export_that_differs_from_torch_leaves_nothing_behind(quick, checkpoint, tmp_path, force):
    quick.setattr(verify, "prove", lambda *_: Report(problems=["case 0: error 7e-01"]))
    if force:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/config.json").write_text('{"model_type": "vanilla-encoder"}')
    with raises(ValueError, seen=(0, "7e-01")):
        export(checkpoint, tmp_path / "out", force=force)
    assert sorted(path.name for path in tmp_path.iterdir()) == (
        ["checkpoint", "out"] if force else ["checkpoint"]
    )
    if force:
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_interrupted_export_leaves_nothing_behind(quick, checkpoint, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    quick.setattr(exporting, "write_graphs", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, tmp_path / "deep/out")
    assert not (tmp_path / "deep").exists()


def assert_rejected(checkpoint, tmp_path, error, *words):
    """Check that export raises `error` with all of `words`, and writes nothing."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error) as caught:
        export(checkpoint, tmp_path / "out")
    for word in words:
        assert word in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_error_names_missing_checkpoint_directory(tmp_path):
    assert_rejected(
        tmp_path / "nowhere",
        tmp_path,
        FileNotFoundError,
        str(tmp_path / "nowhere"),
        "does not exist",
    )


@pytest.mark.parametrize("place", ["nowhere", "checkpoints/nowhere", "./nowhere"])
def test_error_names_misspelt_relative_path(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    assert_rejected(place, tmp_path, OSError, "nowhere")


def test_checkpoint_without_config_is_rejected(checkpoint, tmp_path):
    (checkpoint / "config.json").unlink()
    assert_rejected(checkpoint, tmp_path, FileNotFoundError, str(checkpoint), "no config.json")


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_config_that_is_not_a_json_object_is_rejected(checkpoint, tmp_path, text):
    (checkpoint / "config.json").write_text(text)
    assert_rejected(checkpoint, tmp_path, (ValueError, OSError), "config.json")


def test_error_for_missing_weights_lists_existing_files(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert_rejected(
        checkpoint, tmp_path, FileNotFoundError, "model.safetensors", "pytorch_model.bin"
    )


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_truncated_weights_are_rejected(checkpoint, tmp_path, kept):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert_rejected(checkpoint, tmp_path, ValueError, str(path), f"{path.stat().st_size} bytes")


def test_error_names_missing_weight(checkpoint, tmp_path):
    weights = load_file(checkpoint / "model.safetensors")
    del weights["layers.1.self_attn.v_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    assert_rejected(
        checkpoint,
        tmp_path,
        ValueError,
        "VanillaEncoderModel",
        "missing",
        "layers.1.self_attn.v_proj.weight",
    )


def test_error_names_unexpected_weight(checkpoint, tmp_path):
    weights = load_file(checkpoint / "model.safetensors")
    weights["layers.7.extra"] = torch.zeros(2)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    assert_rejected(
        checkpoint, tmp_path, ValueError, "VanillaEncoderModel", "unexpected", "layers.7.extra"
    )


def test_error_names_mismatched_weight_with_both_shapes(checkpoint, tmp_path):
    name = "layers.0.feed_forward.up_proj.weight"
    weights = load_file(checkpoint / "model.safetensors")
    weights[name] = torch.zeros(41, 32)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    assert_rejected(checkpoint, tmp_path, ValueError, name, "41, 32", "40, 32")


@pytest.mark.parametrize("value, count", [(float("nan"), 1), (float("inf"), 3), (-float("inf"), 2)])
def test_error_counts_nonfinite_values_of_weight(checkpoint, tmp_path, value, count):
    name = "layers.0.feed_forward.up_proj.weight"
    weights = load_file(checkpoint / "model.safetensors")
    weights[name][:count, 5] = value
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    assert_rejected(
        checkpoint,
        tmp_path,
        ValueError,
        name,
        f"{count} of {40 * WIDTH} values that are NaN or infinite",
    )


@pytest.mark.parametrize(
    "target, dtype", [("portable", "int4"), ("portable", "fp16"), ("cpu", "fp16"), ("gpu", "fp32")]
)
def test_unknown_target_or_dtype_is_rejected_with_supported_ones(
    checkpoint, tmp_path, target, dtype
):
    with raises(ValueError, expected=("portable", "fp32", "int8", "cpu", "int4")):
        export(checkpoint, tmp_path / "out", target=target, dtype=dtype)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("shortlist", 5, "token ids"),
        ("calibrate", 5, "path"),
        ("keep", 3, "path"),
        ("triton", 3, "path"),
        ("config", ["model_type"], "dict"),
        ("leave_out", "cls.*", "list"),
        ("variant", 16, "name"),
        ("force", "no", "True or False"),
    ],
)
def test_option_of_wrong_type_is_rejected_with_expected_type(option, value, expected, tmp_path):
    with raises(UsageError, seen=(option, repr(value)), expected=expected):
        export(tmp_path / "checkpoint", tmp_path / "out", **{option: value})


@pytest.mark.slow
def test_weights_beyond_protobuf_limit_are_stored_externally(
    exported, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(saving, "PROTOBUF_LIMIT", 10_000)  # in place of 2 GB, which take minutes
    manifest = export(checkpoint, tmp_path / "out", cases=3)
    assert {"onnx/model.onnx", "onnx/model.onnx_data"} < set(manifest["files"])
    weights = onnx.load(
        tmp_path / "out/onnx/model.onnx", load_external_data=False
    ).graph.initializer
    places = {
        entry.value
        for weight in weights
        for entry in weight.external_data
        if entry.key == "location"
    }
    assert places == {"model.onnx_data"}
    assert default_parity(manifest)["failures"] == 0
    ids = np.array([[5, 6, 7]])
    expected = Runtime(exported("encoder").directory).encode(ids)
    np.testing.assert_array_equal(Runtime(tmp_path / "out").encode(ids), expected)
    data = tmp_path / "out/onnx/model.onnx_data"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    with raises(ValueError, seen=("model.onnx_data", "SHA-256")):
        Runtime(tmp_path / "out")


def test_external_data_is_written_only_beyond_protobuf_limit(tmp_path, monkeypatch):
    # two tables of 12 numbers each
    for limit, files in ((96, {"model.onnx"}), (95, {"model.onnx", "model.onnx_data"})):
        monkeypatch.setattr(saving, "PROTOBUF_LIMIT", limit)
        monkeypatch.setattr(saving, "MIN_EXTERNAL", 1)
        directory = tmp_path / str(limit)
        directory.mkdir()
        saving.save_graph(two_tables(), directory / "model.onnx")
        assert {path.name for path in directory.iterdir()} == files
        onnx.checker.check_model(directory / "model.onnx", full_check=True)
        result = onnxruntime.InferenceSession(directory / "model.onnx").run(
            None, {"ids": np.array([3, 0])}
        )[0]
        np.testing.assert_array_equal(result, TABLE[[3, 0]] @ (TABLE.T + 1))


TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)


def two_tables():
    """Return a model of a lookup and a projection, with a matrix each."""
    graph = onnx.parser.parse_graph(
        "g (int64[n] ids) => (float[n, 4] y) { x = Gather(table, ids) y = MatMul(x, head) }"
    )
    graph.initializer.extend(
        [numpy_helper.from_array(TABLE, "table"), numpy_helper.from_array(TABLE.T + 1, "head")]
    )
    return ir.from_proto(
        onnx.helper.make_model(
            graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10
        )
    )


def test_error_names_unknown_model_type(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    del config["auto_map"]
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    assert_rejected(checkpoint, tmp_path, ValueError, "unheard-of")


def test_half_precision_weights_are_loaded_in_float32_and_evaluation_mode(tmp_path):
    config = VanillaEncoderConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=1,
        dropout=0.5,
    )
    VanillaEncoderModel(config).half().save_pretrained(tmp_path / "half")
    model = load_checkpoint(tmp_path / "half")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())


def test_constants_match_special_tokens_of_test_checkpoints(exported):
    config = exported("seq2seq").model.config
    assert (config.pad_token_id, config.eos_token_id) == (PAD, EOS)


def test_decoder_with_cross_attention_is_rejected(tmp_path):
    small = dict(
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=1,
        vocab_size=20,
    )
    VanillaDecoderForCausalLM(
        VanillaDecoderConfig(**small, add_cross_attention=True)
    ).save_pretrained(tmp_path / "checkpoint")
    assert_rejected(tmp_path / "checkpoint", tmp_path, ValueError, "add_cross_attention=True")


def test_export_shows_no_progress_bar_of_transformers(exported, tmp_path, capsys):
    checkpoint = exported("causal").checkpoint
    logging.enable_progress_bar()
    capsys.readouterr()
    export(checkpoint, tmp_path / "out", cases=1)
    assert capsys.readouterr().err == ""
    assert logging.is_progress_bar_enabled()
