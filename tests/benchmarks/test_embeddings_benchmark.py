"""Tests of benchmarks/embeddings.py: the table, and a worker without sentence-transformers."""

import io
import json

import embeddings
import numpy as np
import pytest
from heads import save_head, word_pieces

from vanilla_transformer_export import export


def test_table_has_speed_relative_to_torch():
    seconds = {"torch": 4.0, "runtime-int8": 2.0}
    engines = {
        engine: {
            "per_second": 100 / value,
            "max_difference": 0.02,
            "min_cosine": 0.99,
            "max_change_by_batch": 0.0,
        }
        for engine, value in seconds.items()
    }
    _, _, first, second = embeddings.table({"engines": engines}).splitlines()
    assert first == "| sentence-transformers, torch fp32 | 25 | 1.00 | 2.0e-02 | 0.9900 | 0.0e+00 |"
    assert second == "| `TextRuntime.embed`, int8 | 50 | 2.00 | 2.0e-02 | 0.9900 | 0.0e+00 |"


def test_cosines_are_computed_row_by_row():
    vectors = np.array([[3.0, 0.0], [1.0, 1.0]])
    assert embeddings.cosines(vectors, np.array([[2.0, 0.0], [0.0, 5.0]])).tolist() == (
        pytest.approx([1.0, 0.5**0.5])
    )


def test_worker_prints_versions_and_seconds_per_input_line(tmp_path, monkeypatch, capsys):
    save_head("VanillaEncoderModel", word_pieces(), tmp_path / "model")
    export(tmp_path / "model", tmp_path / "fp32", cases=1)
    (tmp_path / "texts.json").write_text(json.dumps(["the old man", "two dogs run"]))
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    capsys.readouterr()
    arguments = ["--texts", str(tmp_path), "--worker", "runtime-fp32", "--threads", "1"]
    embeddings.main([str(tmp_path / "model"), *arguments])
    versions, *seconds = map(json.loads, capsys.readouterr().out.splitlines())
    assert [*versions] == ["onnxruntime"]
    assert len(seconds) == 2 and min(seconds) > 0
    together, alone = (np.load(tmp_path / f"runtime-fp32{name}.npy") for name in ("", "-alone"))
    assert together.shape == (2, 32)
    np.testing.assert_allclose(together, alone, atol=1e-6)
