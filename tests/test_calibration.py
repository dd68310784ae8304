"""`export --calibrate`: one scale for all rows, found on a text."""

import collections
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from heads import MANY, save_head, tokenizer_for

from vanilla_transformer.checkpoint import load_tokenizer
from vanilla_transformer_export import Runtime, cli, export, load_checkpoint
from vanilla_transformer_export.activations import Calibration, Inputs
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.passes.quantization import (
    CALIBRATED,
    name_of_weights,
    quantize_calibrated,
)

CARD = Path(__file__).resolve().parents[1] / "model_cards" / "vanilla-encoder-tiny-trec"
QUESTIONS = [
    "How far is it from the earth to the moon ?",
    "Who wrote the first book about the river ?",
    "What is the name of the largest city in the world ?",
    "When did the war end ?",
    "What does CPR stand for ?",
    "Where is the house of the president ?",
    "Why do people laugh ?",
    "How many teeth does a dog have ?",
]
CLASSES = "VanillaEncoderForSequenceClassification"
GENERATORS = ("VanillaSeq2SeqForConditionalGeneration", "VanillaDecoderForCausalLM")
WIDTHS = {"head_dim": 8, "value_head_dim": 8}  # as onnxruntime's attention of decoders takes


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("\n".join(MANY) + "\n")
    return path


def saved(directory, architecture=CLASSES, tokenizer="bpe", **fields):
    tokenizer = tokenizer_for(tokenizer, architecture)
    save_head(architecture, tokenizer, directory, **fields)
    return tokenizer


def opened(path):
    """A graph, and how often it has each operator."""
    graph = ir.load(path).graph
    return graph, collections.Counter(node.op_type for node in graph)


def test_the_integers_hold_what_torch_computes_on_the_text(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("\n".join(QUESTIONS) + "\n")
    arguments = ["export", str(CARD), str(tmp_path / "out"), "--target", "cpu", "--dtype", "int8"]
    with pytest.raises(SystemExit, match="nowhere"):
        cli.main([*arguments, "--calibrate", str(tmp_path / "nowhere")])
    cli.main([*arguments, "--calibrate", str(text)])
    graph, counts = opened(tmp_path / "out/onnx/model.onnx")
    assert counts["MatMulIntegerToFloat"] == 2 * 6  # of each layer queries, keys, values, output, two of feed-forward
    assert counts["QuantizeLinear"] == 2 * 4  # of three the same input
    model, tokenizer = load_checkpoint(CARD), load_tokenizer(CARD)
    rows = [torch.tensor([tokenizer(line)["input_ids"]]) for line in QUESTIONS]
    with torch.no_grad():
        states = torch.cat([model(row, output_hidden_states=True).hidden_states[0][0] for row in rows])
    first = next(node for node in graph if node.op_type == "QuantizeLinear")
    scale, zero = (value.const_value.numpy().item() for value in first.inputs[1:])
    assert scale == pytest.approx((states.max() - states.min()).item() / 255, rel=1e-5)
    assert zero == round(-states.min().item() / scale)
    runtime = Runtime(tmp_path / "out")
    unseen = [line.split("\t")[1] for line in (CARD / "examples.tsv").read_text().splitlines()]
    ids = [np.array([tokenizer(line)["input_ids"]]) for line in unseen]
    with torch.no_grad():
        exact = np.concatenate([model(torch.from_numpy(row)).logits.numpy() for row in ids])
    found = np.concatenate([runtime.encode(row, np.ones_like(row)) for row in ids])
    assert 0 < np.abs(found - exact).max() < 0.05 * exact.std()


@pytest.mark.parametrize("architecture", [GENERATORS[0], pytest.param(GENERATORS[1], marks=pytest.mark.slow)])
def test_the_graphs_of_a_generator_have_no_scale_of_a_row_left(tmp_path, text, architecture):
    layers = {"encoder_layers": 1, "decoder_layers": 1} if "Seq2Seq" in architecture else {}
    tokenizer = saved(tmp_path / "model", architecture, **layers, **WIDTHS)
    tokens = range(len(tokenizer) // 2, len(tokenizer))
    settings = {"target": "cpu", "dtype": "int8", "shortlist": tokens, "calibrate": text}
    manifest = export(tmp_path / "model", tmp_path / "out", cases=1, **settings)
    for role, file in manifest["graphs"].items():
        _, counts = opened(tmp_path / "out" / file)
        assert counts["MatMulIntegerToFloat"] == manifest["optimized"][role]["quantize_calibrated"] > 4
        assert counts["MatMul"] == counts["ReduceMax"] == manifest["optimized"][role]["quantize_products"] == 0
    ids = np.array([tokenizer(line)["input_ids"][:4] for line in MANY])
    runtime = Runtime(tmp_path / "out")
    together = runtime.generate(ids, max_new_tokens=8)
    with torch.no_grad():
        # What a shortlist leaves out cannot be generated, with torch neither.
        left_out = sorted(set(range(len(tokenizer))) - set(manifest["shortlist"]))
        settings = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": left_out}
        expected = load_checkpoint(tmp_path / "model").generate(torch.from_numpy(ids), **settings).numpy()
    length = min(together.shape[1], expected.shape[1])
    assert (together[:, :length] == expected[:, :length]).mean() > 0.9
    for row, wanted in zip(ids, together):
        alone = runtime.generate(row[None], max_new_tokens=8)[0]
        assert alone.tolist() == wanted[: len(alone)].tolist()


def test_features_of_unlike_size_are_made_alike():
    """One feature is a hundred times as large as the others, which have a level or two each with one scale for all."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((400, 64)).astype(np.float32)
    matrix = rng.standard_normal((64, 32)).astype(np.float32)
    for size in (1, 100):
        rows[:, 5] *= size
        seen, unseen = rows[:200], rows[200:].astype(np.float64)
        step = (seen.max() - seen.min()) / 255
        plain = np.abs((np.rint(unseen / step) * step - unseen) @ matrix).std()
        found, is_smoothed = product_by_calibration(seen, rows[200:], matrix)
        assert is_smoothed == (size == 100)
        assert np.abs(found - unseen @ matrix).std() < plain * (0.5 if is_smoothed else 2)


def product_by_calibration(seen, rows, matrix):
    """`rows` x `matrix` in integers, with the scales that `seen` has led to; whether features were made alike."""
    import onnxruntime

    x, w = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 64])), ir.tensor(matrix, name="w")
    weights = ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=w.shape, const_value=w)
    product = ir.node("MatMul", [x, weights])
    [y] = product.outputs
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["n", 32])
    graph = ir.Graph([x], [y], nodes=[product], initializers=[weights], opset_imports={"": 21, "com.microsoft": 1}, name="g")
    model = ir.Model(graph, ir_version=10)
    model.meta[CALIBRATED] = Calibration()
    for rows_of_batch in (seen[:100], seen[100:]):
        inputs = Inputs.sample(rows_of_batch, np.random.default_rng(len(rows_of_batch)))
        model.meta[CALIBRATED].observe(name_of_weights(matrix), "w", inputs)
    assert quantize_calibrated(model) == 1
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    return session.run(None, {"x": rows})[0], any(node.op_type == "Mul" for node in graph)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "has 0 lines and no token that the tokenizer knows"),
        (b"\n  \n", "has 0 lines and no token"),
        (
            "\u4e2d\u6587\n\u4e2d\n".encode(),
            "has 2 lines and no token that the tokenizer knows, expected text as the model reads it",
        ),
        (b"the man\n\xff\n", "line 2 is not UTF-8 text"),
    ],
)
def test_text_that_says_nothing_is_refused_before_anything_is_written(tmp_path, content, said):
    saved(tmp_path / "model", tokenizer="pieces")
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        export(tmp_path / "model", tmp_path / "out", target="cpu", dtype="int8", calibrate=tmp_path / "text")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path, text):
    saved(tmp_path / "model", vocab_size=12)
    with pytest.raises(ValueError, match=r"the tokenizer gives the token \d+, expected one of \[0, 11\], the vocabulary"):
        export(tmp_path / "model", tmp_path / "out", target="cpu", dtype="int8", calibrate=text)


@pytest.mark.parametrize(
    "settings", [{"target": "cpu"}, {"target": "portable", "dtype": "int8"}, {"target": "cpu", "dtype": "int4"}]
)
def test_other_products_have_no_use_for_it(tmp_path, text, settings):
    with pytest.raises(UsageError, match="calibrate is '.*text' for the target .*, expected 'cpu' with 'int8'"):
        export(tmp_path / "model", tmp_path / "out", calibrate=text, **settings)
