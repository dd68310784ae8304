"""Tests of the checks of an export directory: manifest, files, configs and graphs."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import copy_folder, edit_json, list_file, seal
from messages import raises

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.inference.export_info import (
    SCHEMA_VERSION,
    read_export_info,
    write_manifest,
)

GRAPH = bytes(range(256)) * 8
FACTS = {
    "model_type": "vanilla-encoder",
    "architecture": "VanillaEncoderModel",
    "target": "portable",
    "default_dtype": "fp32",
    "variants": {"fp32": {}},
    "activations": "fp32",
}


@pytest.fixture
def export(tmp_path):
    """Return the smallest export directory that `read_export_info` accepts."""
    directory = tmp_path / "export"
    (directory / "onnx").mkdir(parents=True)
    (directory / "onnx/model.onnx").write_bytes(GRAPH)
    (directory / "config.json").write_text('{"vocab_size": 48}')
    write_manifest(directory, **FACTS, opset=18)
    return directory


def check_rejected(export, error, *words):
    """Check that reading `export` raises `error` with all `words` in its message."""
    with pytest.raises(error) as caught:
        read_export_info(export)
    for word in words:
        assert word in str(caught.value)


def test_written_export_info_is_read(export):
    info = read_export_info(str(export))
    assert (info.directory, info.generation_config) == (export, {})
    assert info.config == {"vocab_size": 48, "model_type": "vanilla-encoder"}
    assert info.manifest["architecture"] == "VanillaEncoderModel"


def test_manifest_lists_size_and_sha256_of_every_other_file(export):
    write_manifest(export, opset=18)  # a second time, when the manifest exists
    manifest = json.loads((export / "manifest.json").read_text())
    assert manifest["schema_version"] == 2
    assert manifest["files"] == {
        "config.json": {
            "bytes": 18,
            "sha256": "ea5c33b4c8717ef7bc3fcaa91f0783d60ede20d433c97dba88f8a0f372f0dc35",
        },
        "onnx/model.onnx": {
            "bytes": 2048,
            "sha256": "10fc3c51a152e90e5b90319b601d92ccf37290ef53c35ff92507687d8a911a08",
        },
    }


def test_generation_config_is_read_if_present(export):
    (export / "generation_config.json").write_text('{"num_beams": 3}')
    write_manifest(export, **FACTS)
    assert read_export_info(export).generation_config == {"num_beams": 3}


def test_model_type_comes_from_manifest(export):
    (export / "config.json").write_text('{"model_type": "bert"}')
    write_manifest(export, **FACTS)
    assert read_export_info(export).config == {"model_type": "vanilla-encoder"}


@pytest.mark.parametrize("lost", [*FACTS, "files"])
def test_manifest_without_required_field_is_rejected(export, lost):
    manifest = json.loads((export / "manifest.json").read_text())
    del manifest[lost]
    (export / "manifest.json").write_text(json.dumps(manifest))
    check_rejected(export, ValueError, f"lacks {lost}")


@pytest.mark.parametrize(
    "facts, seen, expected",
    [
        ({"files": []}, "[]", "dict"),
        ({"files": "onnx/model.onnx"}, "onnx/model.onnx", "dict"),
        ({"files": {"config.json": 18}}, (18, "config.json"), "sha256"),
        ({"files": {"config.json": {}}}, ("{}", "config.json"), "sha256"),
        (
            {"files": {"config.json": {"bytes": "18", "sha256": ""}}},
            "config.json",
            ("bytes", "sha256"),
        ),
        (
            {"files": {"config.json": {"bytes": 18, "sha256": None}}},
            "config.json",
            ("bytes", "sha256"),
        ),
        (
            {"files": {"config.json": {"bytes": True, "sha256": ""}}},
            "config.json",
            ("bytes", "sha256"),
        ),
        ({"files": {"a\0b": {"bytes": 1, "sha256": ""}}}, "a\u0000b", ()),
        ({"architecture": ["VanillaEncoderModel"]}, "architecture", "str"),
        ({"model_type": None}, ("model_type", None), "str"),
        ({"target": {}}, "{}", "str"),
        ({"default_dtype": 1}, ("default_dtype", 1), "str"),
        ({"default_dtype": "int8"}, ("default_dtype", "int8"), ()),
        ({"variants": {"fp32": 5}}, ("variant fp32", 5), "dict"),
        ({"variants": []}, ("variants", "[]"), "dict"),
        ({"activations": ["fp16"]}, ("activations", "fp16"), "str"),
    ],
    ids=str,
)
def test_invalid_manifest_field_error_names_seen_and_expected_value(export, facts, seen, expected):
    edit_json(export / "manifest.json", **facts)
    with raises((ValueError, FileNotFoundError), seen=seen, expected=expected):
        read_export_info(export)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "text, expected",
    [("{", "is not JSON"), ("[1]", "holds [1], expected"), ("[" * 100_000, "is not JSON")],
)
def test_config_that_is_not_json_object_error_names_file(export, name, text, expected):
    (export / name).write_text(text)
    write_manifest(export, **FACTS)
    check_rejected(export, ValueError, name, expected)


@pytest.mark.parametrize("name", ["onnx/model.onnx", "config.json"])
def test_missing_file_error_names_file(export, name):
    (export / name).unlink()
    check_rejected(export, FileNotFoundError, str(export / name), "missing", "export again")


@pytest.mark.parametrize("kept", [0, 1, len(GRAPH) - 1])
def test_truncated_file_error_names_both_sizes(export, kept):
    (export / "onnx/model.onnx").write_bytes(GRAPH[:kept])
    check_rejected(
        export, ValueError, "model.onnx", f"{kept} bytes", "expected 2048", "export again"
    )


@pytest.mark.parametrize("position", [0, 1000, len(GRAPH) - 1])
def test_changed_byte_is_rejected(export, position):
    changed = bytearray(GRAPH)
    changed[position] ^= 1
    (export / "onnx/model.onnx").write_bytes(changed)
    check_rejected(export, ValueError, "model.onnx", "SHA-256", "expected", "export again")


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, None, "1"])
def test_other_schema_version_error_names_both_versions(export, version):
    manifest = json.loads((export / "manifest.json").read_text())
    (export / "manifest.json").write_text(json.dumps({**manifest, "schema_version": version}))
    check_rejected(
        export, ValueError, "manifest.json", f"version {version!r}", f"expected {SCHEMA_VERSION}"
    )


def test_schema_version_error_suggests_update_or_new_export(export):
    manifest = json.loads((export / "manifest.json").read_text())
    for version, remedy in (
        (SCHEMA_VERSION + 1, "update this one"),
        (SCHEMA_VERSION - 1, "export again"),
    ):
        (export / "manifest.json").write_text(json.dumps({**manifest, "schema_version": version}))
        check_rejected(export, ValueError, remedy)


def test_swapped_files_are_rejected(export):
    (export / "onnx/other.onnx").write_bytes(GRAPH[::-1])  # of the same size
    write_manifest(export, **FACTS)
    (export / "onnx/model.onnx").write_bytes(GRAPH[::-1])
    (export / "onnx/other.onnx").write_bytes(GRAPH)
    check_rejected(export, ValueError, "model.onnx", "SHA-256", "export again")


@pytest.mark.parametrize("place", ["../outside.onnx", "onnx/../../outside.onnx", "/outside.onnx"])
def test_file_outside_directory_is_rejected_despite_correct_hash(export, place):
    outside = export.parent / "outside.onnx"
    outside.write_bytes(GRAPH)
    manifest = json.loads((export / "manifest.json").read_text())
    name = str(outside) if place.startswith("/") else place
    manifest["files"][name] = manifest["files"]["onnx/model.onnx"]
    (export / "manifest.json").write_text(json.dumps(manifest))
    check_rejected(export, ValueError, "manifest.json", name, "outside the directory")


def test_symlinks_are_followed_and_their_targets_checked(export):
    blob = export.parent / "blob"
    (export / "onnx/model.onnx").rename(blob)
    (export / "onnx/model.onnx").symlink_to("../../blob")
    read_export_info(export)
    blob.write_bytes(GRAPH[::-1])
    check_rejected(export, ValueError, "model.onnx", "SHA-256")


@pytest.mark.parametrize("text", ["", "{", "schema_version: 1", "[1]", "null"])
def test_manifest_that_is_not_json_object_is_rejected(export, text):
    (export / "manifest.json").write_text(text)
    check_rejected(export, ValueError, "manifest.json")


def test_deeply_nested_manifest_is_rejected(export):
    (export / "manifest.json").write_text("[" * 100_000)
    check_rejected(export, ValueError, "manifest.json", "is not JSON")


def test_read_rejects_unlisted_and_changed_files(export):
    info = read_export_info(export)
    assert (info.read("onnx/model.onnx"), info.read("tokenizer.json")) == (GRAPH, None)
    (export / "tokenizer.json").write_text("{}")
    with raises(ValueError, seen=("manifest.json", "tokenizer.json")):
        info.read("tokenizer.json")
    (export / "onnx/model.onnx").write_bytes(GRAPH[::-1])
    with raises(ValueError, seen=("model.onnx", "SHA-256")):
        info.read("onnx/model.onnx")


def test_manifest_that_is_not_utf8_is_rejected(export):
    (export / "manifest.json").write_bytes(b"\xff\xfe\x00")
    check_rejected(export, ValueError, "manifest.json")


@pytest.mark.parametrize(
    "files",
    [{"x" * 4000: 1}, {f"../{'x' * 4000}": {"bytes": 1, "sha256": ""}}],
    ids=["facts", "outside"],
)
def test_long_file_name_gives_short_error(export, files):
    edit_json(export / "manifest.json", files=files)
    with raises(ValueError, seen="manifest.json") as error:
        read_export_info(export)
    assert len(str(error.value).replace(str(export), "")) < 400


def test_directory_without_manifest_is_rejected(tmp_path):
    check_rejected(
        tmp_path, FileNotFoundError, str(tmp_path), "no manifest.json", "vanilla-transformer export"
    )


def test_missing_directory_is_rejected(tmp_path):
    check_rejected(tmp_path / "nowhere", FileNotFoundError, str(tmp_path / "nowhere"))


# -------------------------------------------------------------------------------- loading an export


def test_non_onnx_graph_is_rejected_despite_correct_hash(exported, tmp_path):
    directory = copy_folder(exported("encoder").directory, tmp_path)
    (directory / "onnx/model.onnx").write_bytes(b"no graph")
    seal(directory)
    with raises(ValueError, seen=("onnxruntime", "model.onnx", "Protobuf parsing failed")):
        Runtime(directory)


def test_graph_rejected_by_onnxruntime_error_has_its_message_and_file(exported, tmp_path):
    directory = copy_folder(exported("encoder").directory, tmp_path)
    (directory / "onnx/model.onnx").write_bytes(onnx.ModelProto(ir_version=8).SerializeToString())
    seal(directory)
    with pytest.raises(Exception) as original:
        onnxruntime.InferenceSession(directory / "onnx/model.onnx")
    with raises(ValueError, seen=("onnxruntime", "model.onnx", str(original.value).strip())):
        Runtime(directory)


@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_graph_that_fails_at_run_time_raises_one_line_error(exported_for, tmp_path, capfd, target):
    """The last operators need more memory than the machine has."""
    directory = copy_folder(exported_for("seq2seq", target)[1], tmp_path)
    [path] = directory.glob("onnx/decoder_model*.onnx")
    graph = onnx.load(path)
    output, rank = graph.graph.output[0].name, len(graph.graph.output[0].type.tensor_type.shape.dim)
    [node] = [node for node in graph.graph.node if output in node.output]
    node.output[list(node.output).index(output)] = "before"
    for values, constant in (([2**40] + [1] * rank, "sizes"), ([0], "axis")):
        graph.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values), constant))
    graph.graph.node.append(onnx.helper.make_node("Expand", ["before", "sizes"], ["huge"]))
    graph.graph.node.append(
        onnx.helper.make_node("ReduceMax", ["huge", "axis"], [output], keepdims=0)
    )
    onnx.save(graph, path)
    seal(directory)
    capfd.readouterr()
    runtime = Runtime(directory)
    with raises(ValueError, seen=("decoder_model_merged.onnx", "allocate memory")) as error:
        runtime.generate([[5, 6]], max_new_tokens=3)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name, value", [("target", "gpu"), ("dtype", "fp16"), ("dtype", "int4")])
def test_unsupported_target_or_dtype_error_names_value(exported, tmp_path, name, value):
    directory = copy_folder(exported("encoder").directory, tmp_path)
    facts = {"default_dtype": value, "variants": {value: {}}} if name == "dtype" else {name: value}
    edit_json(directory / "manifest.json", **facts)
    with raises(ValueError, seen=(name, value), expected=("portable", "cpu", "int8", "int4")):
        Runtime(directory)


@pytest.mark.parametrize(
    "changes, seen, expected",
    [
        (dict(vocab_size="48"), ("vocab_size", 48), 1),
        (dict(vocab_size=None), ("vocab_size", None), ()),
        (dict(hidden_size=[32]), ("hidden_size", 32), ()),
        (dict(head_dim=-1), ("head_dim", -1), 1),
        (dict(id2label=["a"]), ("id2label", "a"), ()),
        (dict(position_embedding_type=3), ("position_embedding_type", 3), ()),
        (dict(max_position_embeddings=2.5), ("max_position_embeddings", 2.5), ()),
        (dict(num_hidden_layers=10**9), ("num_hidden_layers", 1000000000), (1, 10000)),
        (dict(sliding_window="wide"), ("sliding_window", "wide"), ()),
        (dict(eos_token_id=2.5), ("eos_token_id", 2.5), ()),
        (dict(pad_token_id="<pad>"), ("pad_token_id", "<pad>"), ()),
        (dict(vocab_size=49), ("model.onnx", 48), ("config.json", 49)),
        (dict(num_hidden_layers=3), ("model.onnx", "config.json", "past_key_values.2.key"), ()),
        (dict(value_head_dim=11), ("model.onnx", "past_key_values.0.value"), "config.json"),
    ],
    ids=str,
)
def test_invalid_config_field_error_names_field(exported, tmp_path, changes, seen, expected):
    directory = copy_folder(exported("causal").directory, tmp_path)
    edit_json(directory / "config.json", **changes)
    seal(directory)
    with raises(ValueError, seen=seen, expected=expected) as caught:
        Runtime(directory)
    assert not isinstance(caught.value, UsageError) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings, seen, expected",
    [
        (dict(num_beams="4"), ("generation_config.json", 4), ("num_beams", 1)),
        (dict(max_length=[20]), ("generation_config.json", 20), ("max_length", 1)),
        (dict(eos_token_id={"id": 2}), ("generation_config.json", "id", 2), "eos_token_id"),
        (dict(do_sample="yes"), ("generation_config.json", "yes"), ("do_sample", True, False)),
        (
            dict(decoder_start_token_id="<s>"),
            ("generation_config.json", "<s>"),
            "decoder_start_token_id",
        ),
        (dict(forced_eos_token_id=2**70), "generation_config.json", "forced_eos_token_id"),
    ],
    ids=str,
)
def test_invalid_generation_config_is_rejected_on_load(
    exported, tmp_path, settings, seen, expected
):
    directory = copy_folder(exported("causal").directory, tmp_path)
    edit_json(directory / "generation_config.json", **settings)
    seal(directory)
    with raises(ValueError, seen=seen, expected=expected) as caught:
        Runtime(directory)
    assert not isinstance(caught.value, UsageError)


def test_unknown_model_type_error_names_known_types(exported, tmp_path):
    directory = copy_folder(exported("causal").directory, tmp_path)
    edit_json(directory / "manifest.json", model_type="opt")
    with raises(ValueError, seen="opt", expected="vanilla-decoder"):
        Runtime(directory)


def test_graph_missing_from_manifest_is_rejected(exported, tmp_path):
    directory = copy_folder(exported("encoder").directory, tmp_path)
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["files"]["onnx/model.onnx"]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with raises(ValueError, seen=("manifest.json", "onnx/model.onnx")):
        Runtime(directory)


@pytest.mark.parametrize(
    "facts, seen, expected",
    [
        ({"activations": "fp16"}, ("activations", "fp16"), "fp32"),
        (
            {"architecture": "VanillaEncoderForNothing"},
            ("architecture", "VanillaEncoderForNothing"),
            (),
        ),
    ],
)
def test_manifest_with_wrong_activations_or_architecture_is_rejected(
    exported, tmp_path, facts, seen, expected
):
    directory = copy_folder(exported("encoder").directory, tmp_path)
    edit_json(directory / "manifest.json", **facts)
    with raises(ValueError, seen=seen, expected=expected):
        Runtime(directory)


def test_tokenizer_can_be_replaced_but_not_graphs_or_configs(export):
    (export / "tokenizer.json").write_text("{}")
    list_file(export, "tokenizer.json")
    (export / "tokenizer.json").write_text('{"saved": "again"}')
    info = read_export_info(export)
    assert info.read("tokenizer.json") == b'{"saved": "again"}'
    (export / "tokenizer.json").write_text('{"saved": "while it was open"}')
    with pytest.raises(ValueError, match="tokenizer.json was replaced or changed while"):
        info.read("tokenizer.json")
    for name in ("config.json", "onnx/model.onnx"):
        (export / name).write_bytes((export / name).read_bytes() + b" ")
        check_rejected(export, ValueError, name, "bytes, expected")
        (export / name).write_bytes((export / name).read_bytes()[:-1])
