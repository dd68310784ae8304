"""Exports that the release before wrote, one for each variant, target and dtype: they load, and give what they gave then.

`exports/0.1.0.tar.xz` has them, of random weights, and `expected.json`: the tokens of greedy and of beam search, or what an
encoder returned, as that release computed them. In half precision the CPU computes nothing: there graphs are only opened."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from vanilla_transformer_export import Runtime

ARCHIVE = Path(__file__).parent / "exports" / "0.1.0.tar.xz"
DTYPES = {
    "portable": ("fp32", "int8"),
    "cpu": ("fp32", "int8", "int4"),
    "cuda": ("fp32", "fp16", "bf16", "int8", "int4"),
}
VARIANTS = ("encoder", "decoder", "seq2seq")
# Batches of two rows, the second of two tokens.
RIGHT = np.array([[5, 9, 12, 7], [8, 6, 0, 0]]), np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
LEFT = np.array([[5, 9, 12, 7], [0, 0, 8, 6]]), np.array([[1, 1, 1, 1], [0, 0, 1, 1]])


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("dtype", [f"{target}-{dtype}" for target, dtypes in DTYPES.items() for dtype in dtypes])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_export_of_the_release_before_gives_what_it_gave(exports, variant, dtype):
    expected = json.loads((exports / "expected.json").read_text())[f"{variant}-{dtype}"]
    runtime = Runtime(exports / f"{variant}-{dtype}", device="cpu", threads=1)
    assert (runtime.target.name, runtime.dtype) == tuple(dtype.split("-"))
    if expected is None:
        assert runtime.specs.keys() >= runtime.sessions.keys() > set()
    elif variant == "encoder":
        found = runtime.outputs(*RIGHT)
        assert found.keys() == expected.keys()
        mask = RIGHT[1] == 1
        for name, values in expected.items():
            real = mask if np.ndim(values) == 3 else slice(None)  # what is returned for padding is of no use
            np.testing.assert_allclose(found[name][real], np.array(values)[real], atol=2e-3 if "int" in dtype else 1e-5)
    else:
        prompts = RIGHT if variant == "seq2seq" else LEFT
        assert runtime.generate(*prompts, max_new_tokens=8).tolist() == expected["greedy"]
        assert runtime.generate(*prompts, max_new_tokens=8, num_beams=3).tolist() == expected["beams"]


def test_what_is_tested_is_what_was_written_and_small(exports):
    written = {path.name for path in exports.iterdir() if path.is_dir()}
    assert written == {f"{variant}-{target}-{dtype}" for variant in VARIANTS for target in DTYPES for dtype in DTYPES[target]}
    assert ARCHIVE.stat().st_size < 2_000_000
