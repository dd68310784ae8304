"""Tests of `export --triton`, which writes a model of a Triton model repository.

The configuration is parsed with Triton's protobuf message, and requests are run as Triton does.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from checkpoints import default_graphs
from command_line import main
from google.protobuf import text_format
from messages import raises

from vanilla_transformer_export import export
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.exporting.triton import (
    config_text,
    instance_kind,
    write_triton_model,
)
from vanilla_transformer_export.specs.graph_spec import GraphSpec, TensorSpec
from vanilla_transformer_export.specs.sequences import sequence_specs
from vanilla_transformer_export.targets.registry import get_target

TYPES = {"TYPE_INT64": onnx.TensorProto.INT64, "TYPE_FP32": onnx.TensorProto.FLOAT}


def model_config_pb2():
    """Import the messages of Triton's client from their file.

    Their package imports grpc's, which needs another version of protobuf.
    """
    [folder] = importlib.util.find_spec("tritonclient").submodule_search_locations
    spec = importlib.util.spec_from_file_location(
        "model_config_pb2", Path(folder) / "grpc/model_config_pb2.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MESSAGES = model_config_pb2()


def read_config(directory):
    return text_format.Parse((directory / "config.pbtxt").read_text(), MESSAGES.ModelConfig())


def list_sizes(value):
    """Return the sizes of a tensor of the graph without the batch, -1 where they are free."""
    first, *rest = value.type.tensor_type.shape.dim
    assert first.dim_param == "batch_size"
    return [size.dim_value or -1 for size in rest]


def check_config(directory, graph):
    """Check that the configuration has the types and shapes of the graph, and return it."""
    config = read_config(directory)
    assert (config.backend, config.max_batch_size > 1, config.HasField("dynamic_batching")) == (
        "onnxruntime",
        True,
        True,
    )
    for tensors, values in ((config.input, graph.input), (config.output, graph.output)):
        result = [
            (tensor.name, TYPES[MESSAGES.DataType.Name(tensor.data_type)], list(tensor.dims))
            for tensor in tensors
        ]
        assert result == [
            (value.name, value.type.tensor_type.elem_type, list_sizes(value)) for value in values
        ]
    return config


@pytest.fixture(scope="module")
def repository(exported, tmp_path_factory):
    """The folder of an encoder export and of a Triton model repository, both written by the export
    command."""
    root = tmp_path_factory.mktemp("triton")
    checkpoint = str(exported("pretraining").checkpoint)
    main(["export", checkpoint, str(root / "export"), "--triton", str(root / "repository/reader")])
    return root


def test_configuration_matches_graph(repository):
    folder = repository / "repository/reader"
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*")) == [
        "1/model.onnx",
        "config.pbtxt",
    ]
    assert (folder / "1/model.onnx").read_bytes() == (
        repository / "export/onnx/model.onnx"
    ).read_bytes()
    config = check_config(folder, onnx.load(folder / "1/model.onnx").graph)
    assert [tensor.name for tensor in config.input] == [
        "input_ids",
        "attention_mask",
        "token_type_ids",
    ]
    assert [list(tensor.dims) for tensor in config.output] == [[-1, 48], [2]]
    # the defaults: a GPU if there is one, and the name of the folder
    assert not config.instance_group and not config.name


def test_batch_of_padded_requests_matches_torch(repository, exported):
    folder = repository / "repository/reader"
    session = onnxruntime.InferenceSession(folder / "1/model.onnx")
    model = exported("pretraining").model
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 48, length) for length in (5, 16, 9)]
    requests = []
    for row in rows:
        ids = np.zeros((1, -(-len(row) // 16) * 16), np.int64)
        mask = np.zeros_like(ids)
        ids[0, : len(row)], mask[0, : len(row)] = row, 1
        requests.append(
            {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        )
    names = [tensor.name for tensor in read_config(folder).output]
    together = {
        name: np.concatenate([request[name] for request in requests]) for name in requests[0]
    }
    outputs = dict(zip(names, session.run(names, together)))
    for place, row in enumerate(rows):
        with torch.no_grad():
            expected = model(input_ids=torch.from_numpy(row[None]))
        np.testing.assert_allclose(
            outputs["prediction_logits"][place, : len(row)],
            expected.prediction_logits[0],
            atol=1e-5,
        )
        np.testing.assert_allclose(
            outputs["seq_relationship_logits"][place],
            expected.seq_relationship_logits[0],
            atol=1e-5,
        )


def test_force_replaces_folder_only_if_all_files_are_ours(
    repository, exported, tmp_path, monkeypatch
):
    folder, checkpoint = tmp_path / "reader", str(exported("pretraining").checkpoint)

    def run(*flags):
        main(["export", checkpoint, str(tmp_path / "export"), "--triton", str(folder), *flags])

    def fails(*args, **settings):
        raise ValueError("planned")

    # the export fails after the checks of the folder
    monkeypatch.setattr("vanilla_transformer_export.exporting.export.plan_graphs", fails)
    for name in ("config.pbtxt", "1/model.onnx"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((repository / "repository/reader" / name).read_bytes())
    with raises(SystemExit, seen="reader"):
        run()
    with raises(SystemExit, seen="planned"):
        run("--force")
    (folder / "1/other").touch()
    with raises(SystemExit, seen="1/other"):
        run("--force")
    (folder / "1/other").unlink()
    (folder / "config.pbtxt").write_text("max_batch_size: 8\n")
    with raises(SystemExit, seen=(1, "config.pbtxt")):
        run("--force")
    assert sorted(path.name for path in folder.rglob("*")) == ["1", "config.pbtxt", "model.onnx"]


def test_unsupported_model_or_folder_raises_before_files_are_written(exported, tmp_path):
    with raises(ValueError, seen="VanillaDecoderForCausalLM"):
        export(exported("causal").checkpoint, tmp_path / "export", triton=tmp_path / "model")
    for triton in ("export", "export/model", ""):
        with raises(UsageError, seen="export"):
            export(exported("encoder").checkpoint, tmp_path / "export", triton=tmp_path / triton)
    assert list(tmp_path.iterdir()) == []


def test_encoder_decoder_generates_in_one_graph(exported, tmp_path):
    """Requests of one shape run in one batch, each with its own max_new_tokens. Results are padded
    to the longest."""
    settings = ["--generate", "greedy", "--triton", str(tmp_path / "repository/translator")]
    main(["export", str(exported("seq2seq").checkpoint), str(tmp_path / "export"), *settings])
    folder = tmp_path / "repository/translator"
    config = check_config(folder, onnx.load(folder / "1/model.onnx").graph)
    assert [(tensor.name, list(tensor.dims)) for tensor in config.input][2:] == [
        ("max_new_tokens", [1])
    ]
    assert [(tensor.name, list(tensor.dims)) for tensor in config.output] == [("sequences", [-1])]
    session = onnxruntime.InferenceSession(folder / "1/model.onnx")
    ids, steps = np.random.default_rng(0).integers(3, 48, (3, 16)), np.array([[3], [9], [6]])
    [together] = session.run(
        None, {"input_ids": ids, "attention_mask": np.ones_like(ids), "max_new_tokens": steps}
    )
    for row, (source, count) in enumerate(zip(ids, steps)):
        generation = {
            "attention_mask": torch.ones((1, 16), dtype=torch.long),
            "max_new_tokens": int(count[0]),
        }
        expected = (
            exported("seq2seq")
            .model.generate(torch.from_numpy(source[None]), **generation)[0]
            .tolist()
        )
        assert together[row].tolist() == expected + [0] * (together.shape[1] - len(expected))


def test_decoder_generates_in_one_graph(exported, tmp_path):
    """Requests of one shape run in one batch, and padding on either side gives the same tokens."""
    export(
        exported("causal").checkpoint,
        tmp_path / "export",
        cases=1,
        generate="greedy",
        triton=tmp_path / "model",
    )
    config = check_config(tmp_path / "model", onnx.load(tmp_path / "model/1/model.onnx").graph)
    assert [(tensor.name, list(tensor.dims)) for tensor in config.input][2:] == [
        ("max_new_tokens", [1])
    ]
    session = onnxruntime.InferenceSession(tmp_path / "model/1/model.onnx")
    prompt = np.random.default_rng(0).integers(3, 48, 5)
    ids, mask = np.zeros((2, 16), np.int64), np.zeros((2, 16), np.int64)
    for row, place in enumerate((slice(0, 5), slice(11, 16))):
        ids[row, place], mask[row, place] = prompt, 1
    feeds = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": np.full((2, 1), 6)}
    [actual] = session.run(None, feeds)
    expected = (
        exported("causal")
        .model.generate(torch.from_numpy(prompt[None]), max_new_tokens=6)[0]
        .tolist()
    )
    assert actual.tolist() == [[0] * 11 + expected] * 2


def test_external_weights_are_copied_beside_graph(exported, tmp_path):
    """Triton then expects a folder model.onnx in place of the file."""
    (tmp_path / "export/onnx").mkdir(parents=True)
    graph = onnx.load(exported("encoder").directory / "onnx/model.onnx")
    place = {"location": "model.onnx_data", "save_as_external_data": True}  # as for the cpu target
    onnx.save(graph, tmp_path / "export/onnx/model.onnx", **place)
    spec = sequence_specs(
        json.loads((exported("encoder").directory / "config.json").read_text()),
        "VanillaEncoderModel",
    )
    (tmp_path / "model").mkdir()
    write_triton_model(spec["encoder"], tmp_path / "export", tmp_path / "model", "KIND_CPU")
    assert sorted(path.name for path in (tmp_path / "model/1/model.onnx").iterdir()) == [
        "model.onnx",
        "model.onnx_data",
    ]
    graph = onnx.load(tmp_path / "model/1/model.onnx/model.onnx").graph
    config = check_config(tmp_path / "model", graph)
    assert [group.kind for group in config.instance_group] == [MESSAGES.ModelInstanceGroup.KIND_CPU]
    feeds = {"input_ids": np.array([[5, 6, 7]]), "attention_mask": np.ones((1, 3), np.int64)}
    paths = (
        tmp_path / "model/1/model.onnx/model.onnx",
        exported("encoder").directory / "onnx/model.onnx",
    )
    actual, expected = (onnxruntime.InferenceSession(path).run(None, feeds)[0] for path in paths)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "target, kind", [("portable", None), ("cpu", "KIND_CPU"), ("cuda", "KIND_GPU")]
)
def test_instance_kind_matches_target(target, kind):
    assert instance_kind(get_target(target), ("encoder",), "fp32") == kind
    assert kind is None or MESSAGES.ModelInstanceGroup.Kind.Value(kind)


@pytest.mark.parametrize(
    "tensor, seen, expected",
    [
        (TensorSpec("x", "float32", ("source_length", 4)), (), "batch_size"),
        (TensorSpec("x", "float32", ("batch_size",)), (), "batch_size"),
        (TensorSpec("x", "float16", ("batch_size", 4)), "float16", "int64"),
    ],
)
def test_tensors_that_cannot_be_batched_are_rejected(tensor, seen, expected):
    with raises(ValueError, seen=seen, expected=expected):
        config_text(GraphSpec("onnx/model.onnx", (tensor,), ()))


TARGETS = [("portable", "int8"), ("cpu", "fp32"), ("cpu", "int8")]
KINDS = [
    (name, *target) for name in ("encoder", "masked-lm", "classification") for target in TARGETS
]
KINDS += [("answers", "portable", "int8")]  # the cpu target has no graph with its attention window


@pytest.mark.slow
@pytest.mark.parametrize("name, target, dtype", KINDS)
def test_every_kind_of_graph_runs(exported, tmp_path, name, target, dtype):
    original = exported(name)
    manifest = export(
        original.checkpoint,
        tmp_path / "export",
        target=target,
        dtype=dtype,
        cases=1,
        triton=tmp_path / "model",
    )
    path = tmp_path / "model/1/model.onnx"
    path = path / "model.onnx" if path.is_dir() else path
    config = check_config(tmp_path / "model", onnx.load(path, load_external_data=False).graph)
    assert bool(config.instance_group) == (target == "cpu")
    assert (
        path.read_bytes()
        == (tmp_path / "export" / default_graphs(manifest)["encoder"]).read_bytes()
    )
    ids = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    [actual] = onnxruntime.InferenceSession(path).run([config.output[0].name], feeds)
    if dtype == "fp32":
        with torch.no_grad():
            expected = original.model(input_ids=torch.from_numpy(ids))[0].numpy()
        np.testing.assert_allclose(actual, expected, atol=1e-4)
