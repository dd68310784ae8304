"""Tests with a local Hub: exports and checkpoints are downloaded, opened and pushed."""

import shutil

import pytest
from hub import running

CODE = """
import sys
import numpy as np
from transformers.utils import logging
from vanilla_transformer_export.ort_models import (
    ORTModelForSequenceClassification as Model, pipeline
)
logging.disable_progress_bar()
ids = np.array([[5, 6, 7, 8]])
expected = Model.from_pretrained(sys.argv[1])
for name in ("someone/export", "someone/checkpoint"):
    model = Model.from_pretrained(name, revision="main")
    np.testing.assert_allclose(model(ids).logits, expected(ids).logits, rtol=1e-5)
    pipeline("text-classification", model=name)(["the man"])
expected.push_to_hub("someone/pushed")
model = Model.from_pretrained("someone/pushed")
np.testing.assert_array_equal(model(ids).logits, expected(ids).logits)
for options, graphs in (
    ({"file_name": "model_q4.onnx"}, ["model_q4.onnx"]),
    ({}, ["model.onnx", "model_q4.onnx"]),
    ({"subfolder": "sub"}, ["model.onnx", "model_int8.onnx", "model_q4.onnx"]),
):
    model = Model.from_pretrained("someone/graphs", **options)
    np.testing.assert_allclose(model(ids).logits, expected(ids).logits, rtol=1e-5)
    root = model.runtime.info.directory
    root = root.parent if "subfolder" in options else root
    assert sorted(path.name for path in root.rglob("*.onnx")) == graphs, options
try:
    Model.from_pretrained("someone/nothing")
except OSError as error:
    print(str(error).splitlines()[0])
"""


@pytest.mark.slow
def test_exports_and_checkpoints_are_downloaded_and_pushed(saved, tmp_path):
    """Repositories without a manifest are downloaded without the graphs of other dtypes."""
    exported = saved("classify")
    graphs = tmp_path / "graphs"
    for name in ("onnx/model.onnx", "onnx/model_q4.onnx", "sub/model_int8.onnx"):
        (graphs / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(exported.directory / "onnx/model.onnx", graphs / name)
    for folder in (graphs, graphs / "sub"):
        shutil.copy(exported.directory / "config.json", folder)
    with running() as hub:
        hub.add("someone/export", exported.directory)
        hub.add("someone/checkpoint", exported.checkpoint)
        hub.add("someone/graphs", graphs)
        process = hub.run(tmp_path, "-c", CODE, str(exported.directory))
        assert process.returncode == 0, process.stderr
        assert (
            "someone/nothing is neither a checkpoint directory nor on the Hub: the Hub has no"
            in process.stdout
        )
        assert "manifest.json" in hub.files("someone/pushed")
