"""Exports that the release before wrote, one for each variant, target and dtype: they load, and give what they gave then.

`exports/0.1.0.tar.xz` has them, of random weights, and `expected.json`: the tokens of greedy and of beam search, or what an
encoder returned, as that release computed them on a CPU."""

import json
import tarfile
from pathlib import Path

import numpy as np
import onnx
import pytest

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.runtime.artifact import read_artifact
from vanilla_transformer_export.targets.registry import get_target

ARCHIVE = Path(__file__).parent / "exports" / "0.1.0.tar.xz"
DTYPES = {
    "portable": ("fp32", "int8"),
    "cpu": ("fp32", "int8", "int4"),
    "cuda": ("fp32", "fp16", "bf16", "int8", "int4"),
}
VARIANTS = ("encoder", "decoder", "seq2seq")
NAMES = [f"{target}-{dtype}" for target, dtypes in DTYPES.items() for dtype in dtypes]
BFLOAT16 = "cuda-bf16"
ONNX_NAMES = {"float32": "FLOAT", "bfloat16": "BFLOAT16", "int64": "INT64", "bool": "BOOL"}
# Batches of two rows, the second of two tokens.
RIGHT = np.array([[5, 9, 12, 7], [8, 6, 0, 0]]), np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
LEFT = np.array([[5, 9, 12, 7], [0, 0, 8, 6]]), np.array([[1, 1, 1, 1], [0, 0, 1, 1]])


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("dtype", [name for name in NAMES if name != BFLOAT16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_export_of_the_release_before_gives_what_it_gave(exports, variant, dtype):
    expected = json.loads((exports / "expected.json").read_text())[f"{variant}-{dtype}"]
    runtime = Runtime(exports / f"{variant}-{dtype}", device="cpu", threads=1)
    assert (runtime.target, runtime.dtype) == tuple(dtype.split("-"))
    if variant == "encoder":
        found = runtime.outputs(*RIGHT)
        assert found.keys() == expected.keys()
        mask = RIGHT[1] == 1
        for name, values in expected.items():
            real = mask if np.ndim(values) == 3 else slice(None)  # what is returned for padding is of no use
            np.testing.assert_allclose(found[name][real], np.array(values)[real], atol=1e-5 if "fp32" in dtype else 2e-3)
    else:
        prompts = RIGHT if variant == "seq2seq" else LEFT
        assert runtime.generate(*prompts, max_new_tokens=8).tolist() == expected["greedy"]
        assert runtime.generate(*prompts, max_new_tokens=8, num_beams=3).tolist() == expected["beams"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_export_in_bf16_of_the_release_before_is_what_a_gpu_would_be_given(exports, variant):
    """Which onnxruntime does not load on the CPU, as it did not then: the graphs take and return what this release binds."""
    directory = exports / f"{variant}-{BFLOAT16}"
    with pytest.raises(ValueError, match="onnxruntime .* cannot load .*NOT_IMPLEMENTED"):
        Runtime(directory, device="cpu")
    artifact = read_artifact(directory)
    facts = artifact.manifest
    specs = get_target("cuda").graph_specs(artifact.config, facts["architecture"], "bf16", facts["activations"])
    for spec in specs.values():
        graph = onnx.load(directory / spec.file, load_external_data=False).graph
        for values, tensors in ((graph.input, spec.inputs), (graph.output, spec.outputs)):
            found = {value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) for value in values}
            assert found == {tensor.name: ONNX_NAMES[tensor.dtype] for tensor in tensors}


def test_what_is_tested_is_what_was_written_and_small(exports):
    written = {path.name for path in exports.iterdir() if path.is_dir()}
    assert written == {f"{variant}-{name}" for variant in VARIANTS for name in NAMES}
    assert sum(path.stat().st_size for path in exports.rglob("*") if path.is_file()) < 2_000_000
