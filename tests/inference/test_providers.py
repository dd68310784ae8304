"""Tests of execution providers: CUDA, TensorRT and their fallbacks."""

import json
import re
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import copy_folder, edit_json
from messages import raises
from written import write

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.engine.inputs import check_options, generation_inputs
from vanilla_transformer_export.engine.model import open_export
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.inference import devices
from vanilla_transformer_export.inference.session import Session, engine_options


@pytest.mark.parametrize(
    "device, engine_cache", [("cuda", None), ("tensorrt", None), ("tensorrt", "engines")]
)
def test_providers_are_requested_in_order_and_each_must_run(
    exported, monkeypatch, tmp_path, device, engine_cache
):
    """The encoder runs on TensorRT, with CUDA for the rest. The decoder runs on CUDA.

    A spy replaces onnxruntime.
    """
    directory, requested = exported("seq2seq").directory, {}
    running = [devices.CUDA, "CPUExecutionProvider"]

    class Session:
        def __init__(self, path, options, providers, disabled_optimizers, enable_fallback):
            assert not enable_fallback  # a failing provider is not replaced silently
            assert not disabled_optimizers  # GPUs have fast kernels for all fusions
            requested[path.rpartition("/")[2]] = providers

        def get_providers(self):
            return running

    monkeypatch.setattr(
        "vanilla_transformer_export.inference.session.check_graph", lambda session, spec, path: None
    )
    monkeypatch.setattr(devices, "facts", lambda: {"cuda_problem": None, "tensorrt_problem": None})
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    settings = dict(device=device, engine_cache=engine_cache and tmp_path / engine_cache)
    before = []
    if device == "tensorrt":
        with raises(OSError, expected="TensorrtExecutionProvider"):
            Runtime(directory, **settings)
        before = [devices.TENSORRT]
        running = [*before, *running]
    Runtime(directory, **settings)
    names = {file: [name for name, _ in providers] for file, providers in requested.items()}
    on_cuda = [devices.CUDA, "CPUExecutionProvider"]
    assert names == {"encoder_model.onnx": before + on_cuda, "decoder_model_merged.onnx": on_cuda}
    options = requested["decoder_model_merged.onnx"][0][1]
    assert options == {"enable_cuda_graph": "0", "use_tf32": "0"}
    if device == "tensorrt":
        engines = requested["encoder_model.onnx"][0][1]
        assert engines.keys() == (
            {"trt_engine_cache_enable", "trt_engine_cache_path"} if engine_cache else set()
        )
        assert engines.get("trt_engine_cache_path", "").startswith(
            str(tmp_path / "engines") if engine_cache else ""
        )


def test_engine_cache_path_depends_on_weights(exported, tmp_path):
    infos = [open_export(exported(name).directory) for name in ("encoder", "encoder", "masked-lm")]
    first, again, other = (
        engine_options(info, tmp_path)["trt_engine_cache_path"] for info in infos
    )
    assert first == again != other


def test_tensorrt_is_rejected_if_unsupported_or_unavailable(exported, monkeypatch, tmp_path):
    with raises(ValueError, seen=("tensorrt", "VanillaDecoderForCausalLM", "portable")):
        Runtime(exported("causal").directory, device="tensorrt")
    directory = exported("encoder").directory
    integers = copy_folder(directory, tmp_path)
    [facts] = json.loads((integers / "manifest.json").read_text())["variants"].values()
    edit_json(integers / "manifest.json", default_dtype="int8", variants={"int8": facts})
    with raises(ValueError, seen="int8", expected=("cpu", "cuda")):
        Runtime(integers, device="tensorrt")
    with raises(OSError, seen="CUDA"):
        Runtime(directory, device="tensorrt")
    with raises(
        ValueError, seen=("engine_cache", "device", "cpu"), expected=("device", "tensorrt")
    ):
        Runtime(directory, engine_cache="engines")
    with raises(ValueError, seen="onnx/engines"):
        Runtime(directory, device="tensorrt", engine_cache=directory / "onnx/engines")
    monkeypatch.setattr(devices, "providers", lambda: [devices.CUDA, "CPUExecutionProvider"])
    gpu = devices.Gpu("NVIDIA H200", "580.65.06", "143771 MiB", "9.0")
    monkeypatch.setattr(devices, "gpus", lambda: [gpu])
    monkeypatch.setattr(devices, "load", lambda name: name)
    with raises(OSError, seen=("TensorRT", "providers", "CUDA")):
        Runtime(directory, device="tensorrt")


def test_call_of_generate_is_checked_without_loading_graphs(exported):
    directory = exported("seq2seq").directory
    full_runtime, info = Runtime(directory, threads=1), open_export(directory)
    ids, options = np.array([[5, 6, 7]]), {"max_new_tokens": 3}
    [expected] = full_runtime.inputs(ids, None, None, options)
    [actual] = generation_inputs(info, ids, None, None, options)
    assert actual.options == expected.options
    assert (actual.prompt, actual.source) == (expected.prompt, expected.source)
    for wrong in ({"max_new_tokens": 0}, {"nope": 1}):
        with pytest.raises(ValueError) as error:
            full_runtime.inputs(ids, None, None, wrong)
        with pytest.raises(type(error.value), match=f"^{re.escape(str(error.value))}$"):
            generation_inputs(info, ids, None, None, wrong)


@pytest.mark.parametrize("kind", ["seq2seq", "causal"])
def test_options_are_checked_once_for_prompts_of_all_lengths(exported, kind):
    info = open_export(exported(kind).directory)
    assert check_options(info, {}).for_prompt(1).max_new_tokens == 20
    checked = check_options(info, {"max_length": 9, "min_length": 6})
    assert check_options(info, checked) is checked
    for length in (1, 4, 8):
        final = checked.for_prompt(length)
        expected = (9 - length, max(0, 6 - length), None, None)
        found = (final.max_new_tokens, final.min_new_tokens, final.max_length, final.min_length)
        assert found == expected
    with pytest.raises(UsageError, match="max_length must be more than 9, .* got 9"):
        checked.for_prompt(9)
    limited = check_options(info, {"max_length": 9, "min_length": 6, "max_new_tokens": 30})
    assert limited.for_prompt(40).max_new_tokens == 30
    positions = info.config["max_position_embeddings"]
    assert check_options(info, {}).for_prompt(positions - 3).max_new_tokens == 3


def test_onnxruntime_is_imported_only_when_graphs_are_loaded(exported):
    code = (
        "import sys; from vanilla_transformer_export.engine.model import OnnxModel, open_export\n"
        "info = open_export(sys.argv[1])\nmodel = OnnxModel(info, threads=1)\n"
        "print('onnxruntime' in sys.modules)\nmodel.session('encoder')\n"
        "print('onnxruntime' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, exported("encoder").directory], capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_cpu_session_does_not_fuse_skip_layer_norm(exported_for, tmp_path):
    """The fused operator of onnxruntime takes 5 times as long."""
    info = open_export(exported_for("seq2seq", "cpu")[1])
    path = info.directory / info.specs["step"].file
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    Session(str(path), options, [("CPUExecutionProvider", {})], path)
    graph = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph
    operators = {node.op_type for node in graph.node}
    assert "LayerNormalization" in operators
    assert not operators & {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}


def test_cpu_session_does_not_fuse_bias_and_gelu(tmp_path):
    """The fused operator of onnxruntime is slower than `Gelu`."""
    weights = {"map.weight": np.ones((4, 3), np.float32), "map.bias": np.ones(4, np.float32)}
    graph = write(
        lambda g, x: [g.target.dialect.activated_linear(g, x, "map", "gelu")],
        weights,
        {"x": np.ones((2, 3), np.float32)},
    )
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    Session(graph.SerializeToString(), options, [("CPUExecutionProvider", {})], tmp_path)
    operators = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert "Gelu" in operators and "BiasGelu" not in operators
