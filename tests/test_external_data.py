"""A graph keeps its tensors in itself and in files that the manifest lists, wherever in the graph they are named."""

import os
import shutil

import numpy as np
import onnx
import pytest
from checkpoints import copy_of, list_file, seal
from onnx import TensorProto, helper

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.runtime.external_data import check_external_data, locations


def external(name, location, data_type=TensorProto.FLOAT):
    """A tensor whose data is at `location`."""
    tensor = TensorProto(name=name, data_type=data_type, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in {"offset": "0", "location": location, "length": "8"}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def sparse(name, location):
    indices = external(f"{name}.indices", f"{location}.indices", TensorProto.INT64)
    return helper.make_sparse_tensor(external(name, location), indices, [9])


def constant(value, **more):
    return helper.make_node("Constant", [], ["made"], value=value, **more)


def graph(*nodes, **fields):
    return helper.make_graph(nodes, "graph", [], [], **fields)


def everywhere():
    """A model that names a place in every part that may hold a tensor, and those places."""
    deep = graph(helper.make_node("If", ["x"], ["y"], then_branch=graph(constant(external("a", "in a subgraph's subgraph")))))
    several = helper.make_node("Several", [], ["z"], tensors=[external("b", "in a list"), external("c", "in a list, second")])
    several.attribute.append(helper.make_attribute("graphs", [graph(initializer=[external("d", "in a list of graphs")])]))
    held = helper.make_node("Held", [], ["s"], sparse_value=sparse("e", "sparse in an attribute"))
    held.attribute.append(helper.make_attribute("more", [sparse("f", "sparse in a list")]))
    body = graph(
        constant(external("g", "in a node")),
        helper.make_node("Loop", ["x"], ["y"], body=deep),
        several,
        held,
        initializer=[external("h", "an initializer"), helper.make_tensor("i", TensorProto.FLOAT, [2], [1, 2])],
        sparse_initializer=[sparse("j", "a sparse initializer")],
    )
    function = helper.make_function("own", "F", [], [], [constant(external("k", "in a function"))], [])
    function.attribute_proto.append(helper.make_attribute("default", external("l", "a default of a function")))
    model = helper.make_model(body, functions=[function])
    model.training_info.add().algorithm.CopyFrom(graph(initializer=[external("m", "in the training's graph")]))
    model.training_info[0].initialization.CopyFrom(graph(initializer=[external("n", "where training begins")]))
    texts = ["in a subgraph's subgraph", "in a list", "in a list, second", "in a list of graphs", "in a node", "an initializer"]
    texts += ["in a function", "a default of a function", "in the training's graph", "where training begins"]
    pairs = ["sparse in an attribute", "sparse in a list", "a sparse initializer"]
    return model, {*texts, *pairs, *(f"{text}.indices" for text in pairs)}


def test_every_place_is_found(tmp_path):
    model, places = everywhere()
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert locations(tmp_path / "model.onnx") == places


def test_data_that_looks_like_a_place_is_none(tmp_path):
    """The bytes of a tensor, of a text and of metadata are not read."""
    inner, _ = everywhere()
    raw = helper.make_tensor("w", TensorProto.UINT8, [inner.ByteSize()], inner.SerializeToString(), raw=True)
    model = helper.make_model(graph(initializer=[raw]), doc_string="location weights")
    model.metadata_props.add(key="location", value="weights")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert locations(tmp_path / "model.onnx") == set()


def test_a_tag_that_protobuf_cuts_to_32_bits_hides_nothing(tmp_path):
    model, places = everywhere()
    tag = bytes([0x80 | 7 << 3 | 2, 0x80, 0x80, 0x80, 0x10])  # field 7, a graph, and bit 32
    (tmp_path / "model.onnx").write_bytes(tag + field(7, model.graph.SerializeToString())[1:])
    assert "an initializer" in locations(tmp_path / "model.onnx") <= places


def field(number, content):
    """A field of a message that has the bytes `content`."""
    length, size = len(content), b""
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + content


def test_a_nesting_deeper_than_python_s_stack_is_read(tmp_path):
    content = graph(initializer=[external("w", "deep")]).SerializeToString()
    for number in (6, 5, 1) * 1500:  # a graph in an attribute of a node
        content = field(number, content)
    (tmp_path / "model.onnx").write_bytes(field(7, content))
    assert locations(tmp_path / "model.onnx") == {"deep"}


def test_a_damaged_graph_is_an_error_of_one_line_and_what_protobuf_reads_is_read(tmp_path):
    """Cut at every third byte, and with a bit of every second one changed."""
    model, places = everywhere()
    content, path, refused = model.SerializeToString(), tmp_path / "model.onnx", 0
    damaged = [content[:length] for length in range(0, len(content), 3)]
    damaged += [
        content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :] for place in range(0, len(content), 2)
    ]
    for each in damaged:
        path.write_bytes(each)
        try:
            found = locations(path)
        except (ValueError, IndexError):
            with pytest.raises(ValueError, match="model.onnx is no ONNX graph, or a damaged one") as caught:
                check_external_data(tmp_path, "model.onnx", {})
            assert "\n" not in str(caught.value)
            refused += 1
            continue
        try:
            read = onnx.ModelProto.FromString(each)
        except Exception:
            continue  # protobuf is stricter, of texts for one
        assert named_by_protobuf(read) <= found
    assert refused > len(content) / 6


def named_by_protobuf(message):
    """As `locations`, by protobuf's own reflection."""
    found = set()
    if isinstance(message, TensorProto):
        places = [entry.value for entry in message.external_data if entry.key == "location"]
        found |= {place if isinstance(place, str) else place.decode(errors="replace") for place in places}  # bytes: no UTF-8
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in [value] if hasattr(value, "ListFields") else value:
                found |= named_by_protobuf(each)
    return found


# ------------------------------------------------------------------------------------------------------- loading an export


def moved(directory, location, change=None):
    """Moves the largest weight of the graph to `location`, which is written, and seals the export again."""
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


@pytest.mark.parametrize("place", ["../weights", "../../weights", "absolute", "unlisted", "./unlisted", "../onnx/unlisted"])
def test_weights_outside_the_manifest_are_refused_even_if_all_else_is_right(exported, tmp_path, place):
    directory = copy_of(exported("encoder").directory, tmp_path)
    location = str(tmp_path / "weights") if place == "absolute" else place
    moved(directory, location)
    with pytest.raises(ValueError, match="model.onnx keeps external data in .*, which manifest.json does not list") as caught:
        Runtime(directory)
    assert repr(location) in str(caught.value)


def test_a_subgraph_may_not_name_another_file_either(exported, tmp_path):
    def hide(graph_of_model):
        node = helper.make_node("Constant", [], ["nobody reads this"], value=external("hidden", "../../secret"))
        branches = dict(then_branch=graph(node), else_branch=graph(node))
        graph_of_model.node.append(helper.make_node("If", ["attention_mask"], ["nor this"], **branches))

    directory = copy_of(exported("encoder").directory, tmp_path)
    (tmp_path / "secret").write_bytes(b"12345678")
    moved(directory, "inside", hide)
    list_file(directory, "onnx/inside")
    with pytest.raises(ValueError, match="external data in '../../secret', which manifest.json does not list"):
        Runtime(directory)


def test_weights_that_the_manifest_lists_are_read(exported, tmp_path):
    directory = copy_of(exported("encoder").directory, tmp_path)
    moved(directory, "inside")
    list_file(directory, "onnx/inside")
    ids = np.array([[5, 6, 7]])
    np.testing.assert_array_equal(Runtime(directory).encode(ids), Runtime(exported("encoder").directory).encode(ids))


def test_an_export_in_the_hub_s_cache_is_read_through_its_links(exported_for, tmp_path):
    """Every file of a snapshot is a link to a blob that is named after its content; weights beside the graphs too."""
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
    with pytest.raises(ValueError, match="has 7 bytes, expected"):
        Runtime(snapshot)
