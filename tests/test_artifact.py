"""An export directory is whole or refused, and directories appear whole or not at all."""

import json

import onnx
import pytest
from checkpoints import copy_of, edit_json, seal

from vanilla_transformer_export.artifact import SCHEMA_VERSION, read_artifact, write_manifest
from vanilla_transformer_export.runtime import Runtime

GRAPH = bytes(range(256)) * 8


@pytest.fixture
def export(tmp_path):
    """What `read_artifact` takes for an export."""
    directory = tmp_path / "export"
    (directory / "onnx").mkdir(parents=True)
    (directory / "onnx/model.onnx").write_bytes(GRAPH)
    (directory / "config.json").write_text('{"vocab_size": 48}')
    write_manifest(directory, model_type="vanilla-encoder", architecture="VanillaEncoderModel", opset=18)
    return directory


def refused(export, error, *words):
    with pytest.raises(error) as caught:
        read_artifact(export)
    for word in words:
        assert word in str(caught.value)


def test_what_was_written_is_read(export):
    artifact = read_artifact(str(export))
    assert (artifact.directory, artifact.generation_config) == (export, {})
    assert artifact.config == {"vocab_size": 48, "model_type": "vanilla-encoder"}
    assert artifact.manifest["architecture"] == "VanillaEncoderModel"


def test_the_manifest_lists_every_other_file_with_its_size_and_sha256(export):
    write_manifest(export, opset=18)  # a second time, with the manifest there already
    manifest = json.loads((export / "manifest.json").read_text())
    assert manifest["schema_version"] == 1
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


def test_the_generation_config_is_read_where_there_is_one(export):
    (export / "generation_config.json").write_text('{"num_beams": 3}')
    write_manifest(export, model_type="vanilla-decoder", architecture="VanillaDecoderForCausalLM")
    assert read_artifact(export).generation_config == {"num_beams": 3}


def test_the_model_type_is_the_manifest_s(export):
    (export / "config.json").write_text('{"model_type": "bert"}')
    write_manifest(export, model_type="vanilla-encoder", architecture="VanillaEncoderModel")
    assert read_artifact(export).config == {"model_type": "vanilla-encoder"}


@pytest.mark.parametrize("lost", ["architecture", "files", "model_type"])
def test_a_manifest_that_lacks_a_fact_is_refused(export, lost):
    manifest = json.loads((export / "manifest.json").read_text())
    del manifest[lost]
    (export / "manifest.json").write_text(json.dumps(manifest))
    refused(export, ValueError, f"lacks {lost}")


@pytest.mark.parametrize("name", ["onnx/model.onnx", "config.json"])
def test_a_missing_file_is_named(export, name):
    (export / name).unlink()
    refused(export, FileNotFoundError, str(export / name), "missing", "export again")


@pytest.mark.parametrize("kept", [0, 1, len(GRAPH) - 1])
def test_a_truncated_file_is_named_with_both_sizes(export, kept):
    (export / "onnx/model.onnx").write_bytes(GRAPH[:kept])
    refused(export, ValueError, "model.onnx", f"{kept} bytes", "expected 2048", "export again")


@pytest.mark.parametrize("position", [0, 1000, len(GRAPH) - 1])
def test_a_changed_byte_is_found(export, position):
    changed = bytearray(GRAPH)
    changed[position] ^= 1
    (export / "onnx/model.onnx").write_bytes(changed)
    refused(export, ValueError, "model.onnx", "SHA-256", "expected", "export again")


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, None, "1"])
def test_another_schema_is_refused_with_both_versions(export, version):
    manifest = json.loads((export / "manifest.json").read_text())
    (export / "manifest.json").write_text(json.dumps({**manifest, "schema_version": version}))
    refused(export, ValueError, "manifest.json", f"version {version}", f"expected {SCHEMA_VERSION}")


def test_a_newer_schema_asks_for_a_newer_version_and_an_older_one_for_another_export(export):
    manifest = json.loads((export / "manifest.json").read_text())
    for version, remedy in ((SCHEMA_VERSION + 1, "update this one"), (SCHEMA_VERSION - 1, "export again")):
        (export / "manifest.json").write_text(json.dumps({**manifest, "schema_version": version}))
        refused(export, ValueError, remedy)


def test_two_files_that_were_swapped_are_found(export):
    (export / "onnx/other.onnx").write_bytes(GRAPH[::-1])  # of the same size
    write_manifest(export, model_type="vanilla-encoder", architecture="VanillaEncoderModel")
    (export / "onnx/model.onnx").write_bytes(GRAPH[::-1])
    (export / "onnx/other.onnx").write_bytes(GRAPH)
    refused(export, ValueError, "model.onnx", "SHA-256", "export again")


@pytest.mark.parametrize("place", ["../outside.onnx", "onnx/../../outside.onnx", "/outside.onnx"])
def test_a_file_outside_the_directory_is_refused_even_if_its_hash_is_right(export, place):
    outside = export.parent / "outside.onnx"
    outside.write_bytes(GRAPH)
    manifest = json.loads((export / "manifest.json").read_text())
    name = str(outside) if place.startswith("/") else place
    manifest["files"][name] = manifest["files"]["onnx/model.onnx"]
    (export / "manifest.json").write_text(json.dumps(manifest))
    refused(export, ValueError, "manifest.json", name, "outside the directory")


def test_links_are_followed_as_in_the_hub_s_cache_and_what_they_lead_to_is_checked(export):
    blob = export.parent / "blob"
    (export / "onnx/model.onnx").rename(blob)
    (export / "onnx/model.onnx").symlink_to("../../blob")
    read_artifact(export)
    blob.write_bytes(GRAPH[::-1])
    refused(export, ValueError, "model.onnx", "SHA-256")


@pytest.mark.parametrize("text", ["", "{", "schema_version: 1", "[1]", "null"])
def test_a_manifest_that_is_not_a_json_object_is_refused(export, text):
    (export / "manifest.json").write_text(text)
    refused(export, ValueError, "manifest.json")


def test_a_manifest_that_is_not_text_is_refused(export):
    (export / "manifest.json").write_bytes(b"\xff\xfe\x00")
    refused(export, ValueError, "manifest.json")


def test_a_directory_without_a_manifest_is_refused(tmp_path):
    refused(tmp_path, FileNotFoundError, str(tmp_path), "no manifest.json", "vanilla-transformer export")


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    refused(tmp_path / "nowhere", FileNotFoundError, str(tmp_path / "nowhere"))


# ------------------------------------------------------------------------------------------------------- loading an export


def outside_weights(graph, directory, location):
    """Moves the largest weight to `location`, relative to the graph's file or absolute."""
    weight = max(graph.initializer, key=lambda weight: len(weight.raw_data))
    (directory / location).write_bytes(weight.raw_data)
    facts = {"location": location, "offset": "0", "length": str(len(weight.raw_data))}
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in facts.items():
        weight.external_data.add(key=key, value=value)


@pytest.mark.parametrize("place", ["../weights", "../../weights", "absolute"])
def test_weights_outside_the_directory_of_the_graph_are_refused(exported, tmp_path, place):
    """Even where every hash is right; the file is there and holds the right weights."""
    directory = copy_of(exported("encoder").directory, tmp_path)
    path = directory / "onnx/model.onnx"
    model = onnx.load(path)
    outside_weights(model.graph, path.parent, str(tmp_path / "weights") if place == "absolute" else place)
    path.write_bytes(model.SerializeToString())
    seal(directory)
    with pytest.raises(ValueError, match="onnxruntime .* cannot load .*model.onnx: .*[Ee]xternal data"):
        Runtime(directory)


def test_a_graph_that_is_not_onnx_is_refused_by_name_even_if_its_hash_is_right(exported, tmp_path):
    directory = copy_of(exported("encoder").directory, tmp_path)
    (directory / "onnx/model.onnx").write_bytes(b"no graph")
    seal(directory)
    with pytest.raises(ValueError, match="onnxruntime .* cannot load .*model.onnx"):
        Runtime(directory)


@pytest.mark.parametrize("facts", [{"target": "gpu"}, {"dtype": "fp16"}, {"dtype": "int4"}])
def test_a_target_or_precision_that_this_build_cannot_run_is_refused_by_name(exported, tmp_path, facts):
    directory = copy_of(exported("encoder").directory, tmp_path)
    edit_json(directory / "manifest.json", **facts)
    name, value = next(iter(facts.items()))
    expected = "expected one of: portable with fp32, int8; cpu with fp32, int8, int4"
    with pytest.raises(ValueError, match=f"{name} '{value}'.*{expected}"):
        Runtime(directory)


def test_a_graph_the_manifest_does_not_list_is_refused(exported, tmp_path):
    directory = copy_of(exported("encoder").directory, tmp_path)
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["files"]["onnx/model.onnx"]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="manifest.json lists no onnx/model.onnx"):
        Runtime(directory)
