"""Tests of supported versions of onnxruntime and other packages, and of errors for old versions."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch_free
from checkpoints import HEADS, KEY_WIDTH, START, VALUE_WIDTH, WIDTH
from command_line import main
from messages import check_message, raises
from onnx.reference import ReferenceEvaluator
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from targets import build

from vanilla_transformer_export import export
from vanilla_transformer_export.inference import devices

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["seq2seq", "seq2seq-untied", "seq2seq-rotary"])
def test_portable_step_after_source_projection_is_valid_onnx(exported, name):
    """The second step reuses the projected source.

    The evaluator of onnx rejects a shape with both 0 and -1.
    """
    path = exported(name).directory / "onnx/decoder_model_merged.onnx"
    by_onnx, by_onnxruntime = (
        ReferenceEvaluator(onnx.load(path)),
        onnxruntime.InferenceSession(path),
    )
    names = [output.name for output in by_onnxruntime.get_outputs()]
    hidden = np.random.default_rng(0).standard_normal((2, 3, WIDTH)).astype(np.float32)
    feeds = {"encoder_hidden_states": hidden, "encoder_attention_mask": np.ones((2, 3), np.int64)}
    feeds |= {"input_ids": np.full((2, 1), START)}
    for tensor in by_onnxruntime.get_inputs()[3:]:
        width = KEY_WIDTH if tensor.name.endswith("key") else VALUE_WIDTH
        feeds[tensor.name] = np.zeros((2, HEADS, 0, width), np.float32)
    for _ in range(2):
        actual, expected = by_onnx.run(None, feeds), by_onnxruntime.run(None, feeds)
        for got, reference in zip(actual, expected, strict=True):
            np.testing.assert_allclose(got, reference, atol=1e-5)
        feeds |= {
            name.replace("present", "past_key_values"): states
            for name, states in zip(names[1:], expected[1:])
        }


def run_python(*command, **settings):
    """Return the exit status and the error output of Python in a fresh process."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, **settings)
    return done.returncode, done.stderr.strip()


def test_older_onnxruntime_is_rejected_before_export_is_opened():
    code = (
        "import onnxruntime; onnxruntime.__version__ = '1.29.1'; "
        "from vanilla_transformer_export.cli.main import main; "
    )
    code += "main(['generate', 'nowhere', 'A dog.'])"
    status, message = run_python("-c", code)
    assert status == 1 and message.startswith("vanilla-transformer: ")
    install = "pip install 'onnxruntime>=1.30'"
    check_message(message, seen="onnxruntime 1.29.1", expected=("1.30", install))


@pytest.mark.parametrize("found", ["1.30.0", "1.31.1", "1.32.0.dev20261101001", "2.0.0"])
def test_supported_onnxruntime_versions_are_accepted(found, monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", found)
    devices.require_onnxruntime()


def test_doctor_reports_outdated_onnxruntime(monkeypatch, capsys):
    monkeypatch.setattr(onnxruntime, "__version__", "1.9.0")
    monkeypatch.setattr(devices, "gpus", lambda: [])
    monkeypatch.setattr(devices, "installed_versions", lambda: {"onnxruntime-gpu": "1.9.0"})
    monkeypatch.setattr(devices, "imported_onnxruntime", lambda: {"onnxruntime-gpu": None})
    main(["doctor"])
    printed = capsys.readouterr().out
    assert "onnxruntime-gpu 1.9.0" in printed and "'onnxruntime-gpu>=1.30'" in printed
    assert "runs on" not in printed
    with raises(ImportError, seen=("onnxruntime-gpu", "1.9.0"), expected="1.30"):
        devices.require_onnxruntime()


def test_dependencies_have_lower_bounds_and_matching_pins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    allowed = {
        each.name: each.specifier
        for each in map(Requirement, lines)
        if each.name != project["name"]
    }
    pins = dict(
        line.lower().split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    )
    for name, versions in allowed.items():
        assert [bound.operator for bound in versions].count(">=") == 1, name
        # cannot be installed beside onnxruntime
        assert name == "onnxruntime-gpu" or versions.contains(pins[name.lower()]), name
    assert str(allowed["onnxruntime"]) == f">={'.'.join(map(str, devices.ONNXRUNTIME))}"
    printed = subprocess.run(
        [sys.executable, ROOT / ".ci/floors.py"], capture_output=True, text=True, check=True
    ).stdout
    floors = dict(line.split("==") for line in printed.splitlines())
    assert {name: f">={floor}" for name, floor in floors.items()} == {
        name: next(str(bound) for bound in versions if bound.operator == ">=")
        for name, versions in allowed.items()
    }


def required(requirement: Requirement) -> list[Requirement]:
    """Return what the installed package of `requirement` requires here, with its extras."""
    requirements = map(Requirement, metadata.requires(requirement.name) or [])
    extras = ["", *requirement.extras]
    return [
        each
        for each in requirements
        if not each.marker or any(each.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def test_packages_in_pinned_versions_require_only_pinned_packages():
    """Other versions, as in the environments of `make test-versions`, may require others."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(pin.name): pin.specifier for pin in map(Requirement, lines)}
    pins["vanilla-transformer"] = SpecifierSet()
    waiting, seen = [Requirement("vanilla-transformer[cpu,test]")], set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{requirement} has no pin"
        if str(requirement) not in seen and pins[name].contains(metadata.version(name)):
            waiting += required(requirement)
        seen.add(str(requirement))


@pytest.mark.parametrize(
    "name", ["seq2seq", "seq2seq-rotary", "causal", "causal-learned", "encoder", "pretraining"]
)
def test_bare_session_matches_runtime(exported, name):
    """`make test-versions` makes the same comparison in other environments."""
    directory = exported(name).directory
    expected, actual = torch_free.results(directory), torch_free.bare_results(directory)
    assert torch_free.differences(actual, expected) == [] and actual
    for output, values in actual.items():  # a changed output is reported
        other = (np.array(values) + 1).tolist()
        [difference] = torch_free.differences({output: other}, expected)
        assert difference.startswith(f"{output}: ")


def test_repeated_export_gives_same_results(tmp_path):
    """`make test-versions` does this with the extra `export`."""
    directory = tmp_path / "seq2seq-cpu-int8"
    build("seq2seq").save_pretrained(tmp_path / "checkpoints" / "seq2seq")
    export(tmp_path / "checkpoints" / "seq2seq", directory, cases=1, target="cpu", dtype="int8")
    expected = torch_free.results(directory)
    assert (
        torch_free.differences(torch_free.results_again(directory), expected) == []
        and expected["greedy"]
    )
