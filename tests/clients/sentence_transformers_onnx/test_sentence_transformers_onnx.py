"""Tests of the ONNX backend of sentence-transformers with unmodified exports, against torch."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

HERE = Path(__file__).parent
# of the environment with this project
PYTHON = os.environ.get("VANILLA_TRANSFORMER_PYTHON", HERE.parents[2] / ".venv/bin/python")


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    subprocess.run([PYTHON, HERE / "make.py", out], check=True)
    return out


@pytest.mark.parametrize("kind", ["bpe", "word"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_embeddings_match_torch(exports, kind, batch_size):
    texts, expected = json.loads((exports / "expected.json").read_text())
    model = SentenceTransformer(str(exports / kind), backend="onnx", device="cpu")
    assert model.get_backend() == "onnx"
    np.testing.assert_allclose(
        model.encode(texts, batch_size=batch_size), expected[kind], rtol=1e-4, atol=1e-5
    )
