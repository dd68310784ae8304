"""Tests of external data: a graph reads only files in its folder that the manifest lists."""

import os
import shutil

import numpy as np
import onnx
import pytest
from checkpoints import add_to_output, copy_folder, list_file, seal
from messages import raises
from onnx import TensorProto, helper

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.inference.export_info import ExportInfo
from vanilla_transformer_export.inference.session import LoadedExport
from vanilla_transformer_export.specs.graph_spec import GraphSpec, TensorSpec


def make_external_tensor(name, location, size=2):
    """Return a tensor whose data is in the file `location`."""
    tensor = TensorProto(
        name=name, data_type=TensorProto.FLOAT, dims=[size], data_location=TensorProto.EXTERNAL
    )
    for key, value in {"offset": "0", "location": location, "length": str(4 * size)}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def move_weight(directory, location, change=None):
    """Move the largest weight of the graph to the file `location`, and seal the export again."""
    path = directory / "onnx/model.onnx"
    model = onnx.load(path)
    weight = max(model.graph.initializer, key=lambda weight: len(weight.raw_data))
    (path.parent / location).write_bytes(weight.raw_data)
    facts = {"location": location, "offset": "0", "length": str(len(weight.raw_data))}
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in facts.items():
        weight.external_data.add(key=key, value=value)
    if change:
        change(model.graph)
    path.write_bytes(model.SerializeToString())
    seal(directory)


@pytest.mark.parametrize(
    "place", ["../weights", "../../weights", "absolute", "link", "folder/weights"]
)
def test_weights_outside_graph_folder_are_rejected(exported, tmp_path, place):
    """Such weights are rejected by onnxruntime, even if the manifest lists them."""
    directory = copy_folder(exported("encoder").directory, tmp_path)
    if place in ("link", "folder/weights"):
        (tmp_path / "weights").touch()
        name = place.split("/")[0]
        (directory / "onnx" / name).symlink_to(tmp_path / "weights" if name == "link" else tmp_path)
    move_weight(directory, str(tmp_path / "weights") if place == "absolute" else place)
    if place in ("../weights", "link"):
        list_file(directory, "weights" if place == "../weights" else "onnx/link")
    elif place == "folder/weights":
        list_file(directory, "onnx/folder/weights")
    with raises(ValueError, seen=("model.onnx", "External data path validation")):
        Runtime(directory)


@pytest.mark.parametrize("place", ["unlisted", "./unlisted", "../onnx/unlisted", "folder/unlisted"])
def test_weights_missing_from_manifest_are_rejected(exported, tmp_path, place):
    directory = copy_folder(exported("encoder").directory, tmp_path)
    (directory / "onnx/folder").mkdir()
    move_weight(directory, place)
    name = "onnx/folder/unlisted" if "folder" in place else "onnx/unlisted"
    with raises(ValueError, seen=(name, "manifest.json")):
        Runtime(directory)


def test_subgraph_weights_outside_export_are_rejected(exported, tmp_path):
    def hide(graph_of_model):
        node = helper.make_node(
            "Constant", [], ["made"], value=make_external_tensor("hidden", "../../secret", size=1)
        )
        output = helper.make_tensor_value_info("made", TensorProto.FLOAT, [1])
        branches = dict.fromkeys(
            ("then_branch", "else_branch"), helper.make_graph([node], "branch", [], [output])
        )
        graph_of_model.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
        graph_of_model.node.append(helper.make_node("If", ["yes"], ["hidden"], **branches))
        add_to_output(graph_of_model, "hidden")

    directory = copy_folder(exported("encoder").directory, tmp_path)
    (tmp_path / "secret").write_bytes(b"12345678")
    move_weight(directory, "inside", hide)
    list_file(directory, "onnx/inside")
    with raises(ValueError, seen=("model.onnx", "points outside the directory")):
        Runtime(directory)


def test_graph_in_memory_reads_weights_of_its_folder_only(tmp_path, monkeypatch):
    """Graphs that are opened on demand have no path, so that locations would be relative to the
    working directory."""
    (tmp_path / "onnx").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work/weights").write_bytes(np.array([1, 2], np.float32).tobytes())
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    indices = helper.make_tensor("indices", TensorProto.INT64, [2], [0, 1])
    weights = helper.make_sparse_tensor(make_external_tensor("w", "weights"), indices, [2])
    add = helper.make_node("Add", ["x", "w"], ["y"])
    graph = helper.make_graph([add], "graph", sides[:1], sides[1:], sparse_initializer=[weights])
    content = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    ).SerializeToString()
    spec = GraphSpec(
        "onnx/model.onnx", *((TensorSpec(name, "float32", (2,)),) for name in ("x", "y"))
    )
    info = ExportInfo(tmp_path, {}, {}, {}, {}, {}, specs={"sum": spec})
    loaded = LoadedExport(info, 1, lambda role: {}, contents={"sum": content})
    with raises(ValueError, seen="model.onnx"):
        loaded.make_session("sum")
    (tmp_path / "work/weights").rename(tmp_path / "onnx/weights")
    [result] = loaded.make_session("sum").run(["y"], {"x": np.zeros(2, np.float32)})
    assert result.tolist() == [1, 2]


def test_weights_listed_in_manifest_are_read(exported, tmp_path):
    directory = copy_folder(exported("encoder").directory, tmp_path)
    move_weight(directory, "inside")
    list_file(directory, "onnx/inside")
    ids = np.array([[5, 6, 7]])
    np.testing.assert_array_equal(
        Runtime(directory).encode(ids), Runtime(exported("encoder").directory).encode(ids)
    )


def test_export_in_hub_cache_is_read_through_symlinks(exported_for, tmp_path):
    """Every file of a snapshot is a link to a blob named after its content, external weights
    included."""
    _, directory = exported_for("seq2seq", "cpu")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/0123abcd"
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in directory.rglob("*") if path.is_file())):
        link = snapshot / path.relative_to(directory)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    assert (snapshot / "onnx/model.onnx_data").is_symlink()
    ids = np.array([[5, 6, 7]])
    expected = Runtime(directory).generate(ids, max_new_tokens=5)
    np.testing.assert_array_equal(Runtime(snapshot).generate(ids, max_new_tokens=5), expected)
    (snapshot / "config.json").resolve().write_bytes(b"changed")
    with raises(ValueError, seen=7):
        Runtime(snapshot)
