"""Tests of input checks, which need only the specs of a graph."""

import numpy as np
import onnx
import onnxruntime
import pytest
from messages import raises

from vanilla_transformer_export.inference.inputs import check_inputs, run_by_length
from vanilla_transformer_export.inference.session import Session, check_graph
from vanilla_transformer_export.specs.graph_spec import GraphSpec, TensorSpec

# A graph that no model here has: images in, the mean of each channel out.
PIXEL_VALUES = TensorSpec("pixel_values", "float32", ("batch_size", 3, "height", "width"))
SPEC = GraphSpec(
    "onnx/model.onnx",
    (PIXEL_VALUES, TensorSpec("kind", "int64", ("batch_size",), (0, 4), default=0)),
    (TensorSpec("means", "float32", ("batch_size", 3)),),
    {"height": 5, "width": 6},
)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "model.onnx"
    values = [
        onnx.helper.make_tensor_value_info(
            "pixel_values", onnx.TensorProto.FLOAT, ["batch_size", 3, "height", "width"]
        ),
        onnx.helper.make_tensor_value_info("kind", onnx.TensorProto.INT64, ["batch_size"]),
    ]
    means = onnx.helper.make_tensor_value_info("means", onnx.TensorProto.FLOAT, ["batch_size", 3])
    nodes = [
        onnx.helper.make_node("ReduceMean", ["pixel_values", "axes"], ["summed"], keepdims=0),
        onnx.helper.make_node("Cast", ["kind"], ["kinds"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Unsqueeze", ["kinds", "one"], ["column"]),
        onnx.helper.make_node("Add", ["summed", "column"], ["means"]),
    ]
    constants = [
        onnx.numpy_helper.from_array(np.array([2, 3]), "axes"),
        onnx.numpy_helper.from_array(np.array([1]), "one"),
    ]
    graph = onnx.helper.make_graph(nodes, "pictures", values, [means], constants)
    onnx.save(
        onnx.helper.make_model(
            graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10
        ),
        path,
    )
    return Session(str(path), onnxruntime.SessionOptions(), [("CPUExecutionProvider", {})], path)


def test_image_graph_runs_with_generic_input_checks(session):
    check_graph(session.inner, SPEC, session.path)
    images = np.random.default_rng(0).random((4, 3, 8, 7))
    feeds = check_inputs(SPEC.inputs, {"pixel_values": images}, "Pictures")
    assert feeds["pixel_values"].dtype == np.float32 and feeds["kind"].tolist() == [0, 0, 0, 0]
    # there is no mask, so rows are not grouped by length
    result = run_by_length(session.run, SPEC, feeds, max_tokens=1)
    np.testing.assert_allclose(result["means"], images.mean(axis=(2, 3)), atol=1e-6)
    kinds = np.array([0, 4, 1, 2], np.int8)
    feeds = check_inputs(SPEC.inputs, {"pixel_values": images, "kind": kinds}, "Pictures")
    result = run_by_length(session.run, SPEC, feeds, max_tokens=1)
    np.testing.assert_allclose(
        result["means"], images.mean(axis=(2, 3)) + kinds[:, None], atol=1e-6
    )


IMAGES = np.zeros((2, 3, 4, 4), np.float32)


@pytest.mark.parametrize(
    "given, seen, expected",
    [
        ({}, ("Pictures", "pixel_values"), ()),
        ({"pixel_values": IMAGES, "mask": IMAGES}, ("Pictures", "mask"), "pixel_values"),
        ({"pixel_values": IMAGES[0]}, ("pixel_values", 3, 4), ("batch_size", 3)),
        ({"pixel_values": IMAGES[:0]}, (0, 3, 4), 1),
        ({"pixel_values": IMAGES.astype(bool)}, ("pixel_values", "bool"), ()),
        ({"pixel_values": IMAGES[:, :2]}, ("pixel_values", 2), ("batch_size", 3)),
        ({"pixel_values": np.where(IMAGES == 0, np.nan, 0)}, ("pixel_values", "nan"), ()),
        ({"pixel_values": IMAGES, "kind": np.zeros(3, int)}, 3, ("kind", 2)),
        ({"pixel_values": IMAGES, "kind": np.array([0, 5])}, (0, 5), ("kind", 0, 4)),
        ({"pixel_values": IMAGES, "kind": np.array([0.5, 1])}, "float64", "kind"),
    ],
)
def test_inputs_that_do_not_match_specs_are_rejected(given, seen, expected):
    with raises(ValueError, seen=seen, expected=expected):
        check_inputs(SPEC.inputs, given, "Pictures")
