"""Tests of the cuda target's caches, and of errors where CUDA cannot run."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from command_line import main
from messages import raises
from targets import exports_for, generators, prompts

from vanilla_transformer_export import Options, Runtime
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.inference import devices
from vanilla_transformer_export.inference.rows import GenerationRequest

exported = exports_for("cuda")


# --------------------------------------------------------------------------------------- the caches


def addresses(buffers):
    return {name: bound.data_ptr() for name, bound in buffers.states.items()}


@generators
def test_buffers_are_reused_by_batch_of_similar_size(exported, name):
    runtime = Runtime(exported(name)[1], device="cpu")
    ids, mask = prompts(name)
    first = runtime.generate(ids, mask, max_new_tokens=5)
    [buffers] = runtime.model.factory.pool.free
    places, graphs = addresses(buffers), dict(buffers.steps)
    second = runtime.generate(ids[::-1], mask[::-1], max_new_tokens=7)
    assert (
        list(runtime.model.factory.pool.free) == [buffers]
        and addresses(buffers) == places
        and buffers.steps == graphs
    )
    third = runtime.generate(ids, mask, max_new_tokens=5)
    assert np.array_equal(first, third) and not np.array_equal(first, second)
    runtime.generate(ids[:2], mask[:2], max_new_tokens=5)
    assert len(runtime.model.factory.pool.free) == 2


def test_step_of_full_caches_raises(exported):
    runtime = Runtime(exported("causal")[1], device="cpu")
    ids = np.full((1, 2), 5)
    decoder = runtime.model.factory.open(GenerationRequest(Options(1), ids, np.ones_like(ids)))
    decoder.prefill(ids, np.ones_like(ids))
    decoder.used = decoder.slots - 2
    decoder.step(ids[:, :1])
    with raises(UsageError, seen=decoder.slots + 1, expected=decoder.slots):
        decoder.step(ids[:, :1])


@generators
def test_concurrent_batches_have_separate_buffers(exported, name):
    runtime = Runtime(exported(name)[1], device="cpu")
    batches = [prompts(name, seed) for seed in (0, 1)]
    expected = [
        list(runtime.stream(*batch, max_new_tokens=6, eos_token_id=[])) for batch in batches
    ]
    streams = [runtime.stream(*batch, max_new_tokens=6, eos_token_id=[]) for batch in batches]
    actual = list(zip(*streams, strict=True))
    assert all(
        np.array_equal(step[row], expected[row][number])
        for number, step in enumerate(actual)
        for row in (0, 1)
    )


def test_beam_step_writes_one_slot_per_beam_and_moves_none(exported):
    runtime = Runtime(exported("seq2seq")[1], device="cpu")
    ids = np.full((4, 1), 1)
    request = GenerationRequest(
        Options(max_new_tokens=8, num_beams=3), ids, np.ones_like(ids), prompts("seq2seq")
    )
    decoder = runtime.model.factory.open(request)
    decoder.prefill(ids, np.ones_like(ids))
    decoder.select(np.arange(4).repeat(3))
    before = {
        name: bound.numpy().copy()
        for name, bound in decoder.buffers.states.items()
        if name.startswith("past")
    }
    decoder.select(np.arange(12)[::-1].reshape(4, 3)[::-1].ravel())
    decoder.step(np.full((12, 1), 5))
    for name, states in before.items():
        changed = np.flatnonzero(
            np.any(decoder.buffers.states[name].numpy() != states, axis=(0, 2))
        )
        assert changed.tolist() == ([1, 2, 3] if ".decoder." in name else [])


def test_scores_of_a_search_stay_after_the_next_one(exported):
    """The values of onnxruntime on the CPU share their memory with numpy's arrays."""
    runtime = Runtime(exported("seq2seq")[1], device="cpu")
    ids, mask = prompts("seq2seq")
    settings = dict(num_beams=3, max_new_tokens=6)
    _, scores = runtime.generate_with_scores(ids, mask, **settings)
    before = scores.copy()
    runtime.generate_with_scores(ids[:, ::-1].copy(), mask, **settings)
    np.testing.assert_array_equal(scores, before)


# ------------------------------------------------------------------------------------------- errors


SITE = Path(onnxruntime.__file__).parents[1]
GPU_BUILD = ["CUDAExecutionProvider", "CPUExecutionProvider"]
H200 = devices.Gpu("NVIDIA H200", "580.65.06", "143771 MiB", "9.0")
V100 = devices.Gpu("Tesla V100-SXM2-16GB", "580.65.06", "16384 MiB", "7.0")
T4 = devices.Gpu("Tesla T4", "580.65.06", "15360 MiB", "7.5")
USED = dict(providers=GPU_BUILD, gpus=[H200], missing=())


@pytest.mark.parametrize(
    "found, running, seen",
    [
        (
            dict(providers=["CPUExecutionProvider"]),
            None,
            ("CUDA", str(SITE), "CPUExecutionProvider", "pip install onnxruntime-gpu"),
        ),
        (dict(gpus=[]), None, ("nvidia-smi", "580", "install the driver")),
        (
            dict(gpus=[H200._replace(driver="550.54.15")]),
            None,
            ("NVIDIA H200", "550.54.15", "580", "update the driver"),
        ),
        (
            dict(gpus=[V100]),
            None,
            ("Tesla V100-SXM2-16GB", "7.0", "7.5", "use another GPU, or run on the CPU"),
        ),
        (dict(gpus=[T4]), GPU_BUILD, None),
        *(
            (
                dict(missing=(library,)),
                None,
                (library, "pip install 'onnxruntime-gpu[cuda,cudnn]'"),
            )
            for library in devices.LIBRARIES
        ),
        (
            dict(missing=("libcuda.so.1",)),
            None,
            ("libcuda.so.1", "nvidia-smi", "LD_LIBRARY_PATH", "compute,utility"),
        ),
        (
            dict(missing=("libcudnn.so.9",)),
            None,
            ("libcudnn.so.9", "only when", "pip install 'onnxruntime-gpu[cuda,cudnn]'"),
        ),
        (dict(), ["CPUExecutionProvider"], "CPUExecutionProvider"),
        (dict(), GPU_BUILD, None),
    ],
)
def test_error_without_cuda_names_cause_and_remedy(monkeypatch, found, running, seen):
    state = USED | found
    monkeypatch.setattr(devices, "providers", lambda: state["providers"])
    monkeypatch.setattr(devices, "load", lambda name: None if name in state["missing"] else name)
    calls = []
    monkeypatch.setattr(devices, "gpus", lambda: calls.append("nvidia-smi") or state["gpus"])

    def require_cuda():
        devices.require("cuda")
        devices.require_running(devices.CUDA, running)

    if seen is None:
        require_cuda()
    else:
        with raises(OSError, seen=seen) as raised:
            require_cuda()
        message = str(raised.value)
        assert "\n" not in message and "doctor" not in message
        others = {*devices.LIBRARIES} - {*state["missing"]}
        assert not any(other in message for other in others)
    assert calls == ["nvidia-smi"]


def test_bf16_error_names_gpu_and_compute_capability(monkeypatch):
    devices.check_bfloat16(H200)
    with raises(OSError, seen=("Tesla T4", "7.5"), expected=("8.0", "fp16", "fp32")):
        devices.check_bfloat16(T4)
    for name, value in (("providers", GPU_BUILD), ("gpus", [T4]), ("load", "here")):
        monkeypatch.setattr(devices, name, lambda *args, value=value: value)
    devices.require("cuda", "fp16")
    with raises(OSError, seen=("Tesla T4", "7.5"), expected=("8.0", "fp16", "fp32")):
        devices.require("cuda", "bf16")


def test_gpus_are_read_from_nvidia_smi(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.65.06, 143771 MiB, 9.0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert devices.gpus() == [H200]
    program.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert devices.gpus() == []


def test_runtime_never_falls_back_to_cpu(exported, monkeypatch):
    monkeypatch.setattr(devices, "providers", lambda: ["CPUExecutionProvider"])
    with raises(OSError, seen="CUDA"):
        Runtime(exported("causal")[1])
    with raises(ValueError, seen=("device", "tpu", "cuda"), expected=("cpu", "cuda")):
        Runtime(exported("causal")[1], device="tpu")
    with raises(ValueError, seen=("device", "tensorrt", "cuda"), expected="cpu"):
        Runtime(exported("causal")[1], device="tensorrt")


def test_doctor_json_is_only_output(monkeypatch, capsys):
    """onnxruntime prints the libraries that it cannot preload."""
    printing = lambda: print("Failed to load libcublasLt.so.13")  # noqa: E731
    monkeypatch.setattr(onnxruntime, "preload_dlls", printing, raising=False)
    monkeypatch.setattr(devices, "providers", lambda: GPU_BUILD)
    monkeypatch.setattr(devices, "gpus", lambda: [])
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["providers"] == GPU_BUILD


def test_doctor_reports_targets_that_run(monkeypatch, capsys):
    monkeypatch.setattr(devices, "gpus", lambda: [])
    main(["doctor", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["packages"]["onnxruntime"] == onnxruntime.__version__ and result["cuda_problem"]
    assert result["providers"] == onnxruntime.get_available_providers()
    main(["doctor"])
    printed = capsys.readouterr().out
    assert "nvidia-smi" in result["cuda_problem"] and "onnxruntime-gpu" not in printed
    assert f"target cuda does not run: {result['cuda_problem']}" in printed
    assert "target portable runs on the CPU, with" in printed
    assert f"TensorRT does not run: {result['tensorrt_problem']}" in printed
    monkeypatch.setattr(devices, "providers", list)
    main(["doctor"])
    assert "no target runs: pip install" in capsys.readouterr().out
