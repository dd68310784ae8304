"""Tests of the check of inputs, which needs only the graph's specs, whatever the graph reads."""

import numpy as np
import onnx
import onnxruntime
import pytest
from messages import raises

from vanilla_transformer_export.inference.inputs import check_inputs, run_by_length
from vanilla_transformer_export.inference.session import Session, check_graph
from vanilla_transformer_export.specs.graph_spec import GraphSpec, TensorSpec

# A graph that no model here has: pictures in, the mean of each channel out.
PICTURES = TensorSpec("pixel_values", "float32", ("batch_size", 3, "height", "width"))
SPEC = GraphSpec(
    "onnx/model.onnx",
    (PICTURES, TensorSpec("kind", "int64", ("batch_size",), (0, 4), default=0)),
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


def test_a_graph_that_takes_pictures_needs_no_method_of_its_own(session):
    check_graph(session.inner, SPEC, session.path)
    pictures = np.random.default_rng(0).random((4, 3, 8, 7))
    feeds = check_inputs(SPEC.inputs, {"pixel_values": pictures}, "Pictures")
    assert feeds["pixel_values"].dtype == np.float32 and feeds["kind"].tolist() == [0, 0, 0, 0]
    # there is no mask, so no rows to group
    result = run_by_length(session, SPEC, feeds, max_tokens=1)
    np.testing.assert_allclose(result["means"], pictures.mean(axis=(2, 3)), atol=1e-6)
    kinds = np.array([0, 4, 1, 2], np.int8)
    feeds = check_inputs(SPEC.inputs, {"pixel_values": pictures, "kind": kinds}, "Pictures")
    result = run_by_length(session, SPEC, feeds, max_tokens=1)
    np.testing.assert_allclose(
        result["means"], pictures.mean(axis=(2, 3)) + kinds[:, None], atol=1e-6
    )


PICTURE = np.zeros((2, 3, 4, 4), np.float32)


@pytest.mark.parametrize(
    "given, seen, expected",
    [
        ({}, ("Pictures", "pixel_values"), ()),
        ({"pixel_values": PICTURE, "mask": PICTURE}, ("Pictures", "mask"), "pixel_values"),
        ({"pixel_values": PICTURE[0]}, ("pixel_values", 3, 4), ("batch_size", 3)),
        ({"pixel_values": PICTURE[:0]}, (0, 3, 4), 1),
        ({"pixel_values": PICTURE.astype(bool)}, ("pixel_values", "bool"), ()),
        ({"pixel_values": PICTURE[:, :2]}, ("pixel_values", 2), ("batch_size", 3)),
        ({"pixel_values": np.where(PICTURE == 0, np.nan, 0)}, ("pixel_values", "nan"), ()),
        ({"pixel_values": PICTURE, "kind": np.zeros(3, int)}, 3, ("kind", 2)),
        ({"pixel_values": PICTURE, "kind": np.array([0, 5])}, (0, 5), ("kind", 0, 4)),
        ({"pixel_values": PICTURE, "kind": np.array([0.5, 1])}, "float64", "kind"),
    ],
)
def test_what_does_not_fit_the_specs_is_refused_with_what_was_found_and_expected(
    given, seen, expected
):
    with raises(ValueError, seen=seen, expected=expected):
        check_inputs(SPEC.inputs, given, "Pictures")
