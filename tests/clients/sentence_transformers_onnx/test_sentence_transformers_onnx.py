"""sentence-transformers' ONNX backend loads an export as it is, and gives the mean of torch's
states."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

HERE = Path(__file__).parent
# has the project
PYTHON = os.environ.get("VANILLA_TRANSFORMER_PYTHON", HERE.parents[2] / ".venv/bin/python")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    subprocess.run([PYTHON, HERE / "make.py", out], check=True)
    return out


@pytest.mark.parametrize("kind", ["bpe", "word"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_embeddings_are_torch_s(made, kind, batch_size):
    texts, expected = json.loads((made / "expected.json").read_text())
    model = SentenceTransformer(str(made / kind), backend="onnx", device="cpu")
    assert model.get_backend() == "onnx"
    np.testing.assert_allclose(
        model.encode(texts, batch_size=batch_size), expected[kind], rtol=1e-4, atol=1e-5
    )
