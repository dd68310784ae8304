"""Tests of `export --calibrate`: activation scales that are fixed from a text."""

import collections
import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from checkpoints import default_graphs
from command_line import main
from heads import MANY, save_head, tokenizer_for
from messages import raises
from transformers import AutoTokenizer
from written import operators, run, write

from vanilla_transformer_export import Options, Runtime, export, load_checkpoint
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.exporting.calibration import calibrate
from vanilla_transformer_export.graphs.input_scales import (
    SAMPLED,
    Calibration,
    InputStatistics,
    choose,
)
from vanilla_transformer_export.graphs.layers import linear
from vanilla_transformer_export.inference.rows import GenerationRequest

CARDS = Path(__file__).resolve().parents[2] / "model_cards"
CARD = CARDS / "vanilla-encoder-tiny-trec"
TRANSLATOR = CARDS / "vanilla-seq2seq-tiny-multi30k-en-de"
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
WIDTHS = {"head_dim": 8, "value_head_dim": 8}  # supported by onnxruntime's decoder attention
GROUPED = {
    "num_key_value_heads": 1,
    "use_qk_norm": True,
    "norm_first": True,
    "sandwich_norm": True,
    "position_embedding_type": "rotary",
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("\n".join(MANY) + "\n")
    return path


def save_model(directory, architecture=CLASSES, tokenizer="bpe", **fields):
    tokenizer = tokenizer_for(tokenizer, architecture)
    save_head(architecture, tokenizer, directory, **fields)
    return tokenizer


def load_graph(path):
    """Return the graph, and the number of nodes by operator."""
    graph = ir.load(path).graph
    return graph, collections.Counter(node.op_type for node in graph)


def test_calibrated_scales_match_activation_range_of_text(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("\n".join(QUESTIONS) + "\n")
    arguments = ["export", str(CARD), str(tmp_path / "out"), "--target", "cpu", "--dtype", "int8"]
    with raises(SystemExit, seen="nowhere"):
        main([*arguments, "--calibrate", str(tmp_path / "nowhere")])
    main([*arguments, "--calibrate", str(text)])
    graph, counts = load_graph(tmp_path / "out/onnx/model.onnx")
    # per layer: queries, keys, values, output, two of feed-forward
    assert counts["MatMulIntegerToFloat"] == 2 * 6
    assert counts["QuantizeLinear"] == 2 * 4  # queries, keys and values share their input
    model, tokenizer = load_checkpoint(CARD), AutoTokenizer.from_pretrained(CARD)
    rows = [torch.tensor([tokenizer(line)["input_ids"]]) for line in QUESTIONS]
    with torch.no_grad():
        states = torch.cat(
            [model(row, output_hidden_states=True).hidden_states[0][0] for row in rows]
        )
    first = next(node for node in graph if node.op_type == "QuantizeLinear")
    scale, zero = (value.const_value.numpy().item() for value in first.inputs[1:])
    assert scale == pytest.approx((states.max() - states.min()).item() / 255, rel=1e-5)
    assert zero == round(-states.min().item() / scale)
    runtime = Runtime(tmp_path / "out")
    unseen = [line.split("\t")[1] for line in (CARD / "examples.tsv").read_text().splitlines()]
    ids = [np.array([tokenizer(line)["input_ids"]]) for line in unseen]
    with torch.no_grad():
        exact = np.concatenate([model(torch.from_numpy(row)).logits.numpy() for row in ids])
    result = np.concatenate([runtime.encode(row, np.ones_like(row)) for row in ids])
    assert 0 < np.abs(result - exact).max() < 0.05 * exact.std()


def test_calibration_on_one_line_keeps_translator_logits(tmp_path):
    """The mean cosine with torch's fp32 logits falls by at most 0.002, on sentences outside of the
    calibration text."""
    (line, _), *unseen = [
        row.split("\t") for row in (TRANSLATOR / "examples.tsv").read_text().splitlines()
    ]
    (tmp_path / "text").write_text(f"{line}\n")
    settings = {"target": "cpu", "dtype": "int8", "cases": 1}
    export(TRANSLATOR, tmp_path / "rows", **settings)
    manifest = export(TRANSLATOR, tmp_path / "calibrated", calibrate=tmp_path / "text", **settings)
    calibrated, row_scales = (
        cosine_with_torch(tmp_path / name, unseen) for name in ("calibrated", "rows")
    )
    assert row_scales - 0.002 < calibrated < 1
    assert manifest["calibration"]["row_scales"] < manifest["calibration"]["matmuls"]


def cosine_with_torch(directory, pairs):
    """Return the mean cosine between the logits of the export and of torch, over all tokens of the
    translations `pairs`."""
    model, tokenizer, runtime = (
        load_checkpoint(TRANSLATOR),
        AutoTokenizer.from_pretrained(TRANSLATOR),
        Runtime(directory),
    )
    cosines = []
    for source, target in pairs:
        ids = torch.tensor([tokenizer(source)["input_ids"]])
        read = torch.tensor(
            [[model.config.decoder_start_token_id, *tokenizer(text_target=target)["input_ids"]]]
        )
        with torch.no_grad():
            expected = model(input_ids=ids, decoder_input_ids=read).logits[0]
        cosines.append(
            torch.cosine_similarity(
                torch.from_numpy(forced_logits(runtime, ids.numpy(), read.numpy())), expected
            )
        )
    return torch.cat(cosines).mean().item()


def forced_logits(runtime, ids, read):
    """Return the logits (T, V) after each token of `read` (1, T), for a source `ids` (1, S)."""
    first, mask = read[:, :1], np.ones((1, 1), int)
    options = Options(max_new_tokens=read.shape[1] + 1)
    decoder = runtime.model.factory.open(
        GenerationRequest(options, first, mask, (ids, np.ones_like(ids)))
    )
    logits = [decoder.prefill(first, mask)[0, -1].copy()]
    return np.stack(
        logits + [decoder.step(read[:, [place]])[0, -1].copy() for place in range(1, read.shape[1])]
    )


@pytest.mark.parametrize(
    "architecture, fields",
    [
        (GENERATORS[0], {"encoder_layers": 1, "decoder_layers": 1}),
        pytest.param(GENERATORS[1], {}, marks=pytest.mark.slow),
        (GENERATORS[1], GROUPED),
    ],
)
def test_calibrated_generator_has_no_row_scales(tmp_path, text, architecture, fields):
    tokenizer = save_model(tmp_path / "model", architecture, **fields, **WIDTHS)
    tokens = range(len(tokenizer) // 2, len(tokenizer))
    settings = {"target": "cpu", "dtype": "int8", "shortlist": tokens, "calibrate": text}
    manifest = export(tmp_path / "model", tmp_path / "out", cases=1, **settings)
    graphs = default_graphs(manifest)
    graphs.pop("alignment", None)  # attention in standard operators
    for file in graphs.values():
        _, counts = load_graph(tmp_path / "out" / file)
        assert counts["MatMulIntegerToFloat"] > 4 and counts["MatMul"] == counts["ReduceMax"] == 0
    ids = np.array([tokenizer(line)["input_ids"][:4] for line in MANY])
    runtime = Runtime(tmp_path / "out")
    together = runtime.generate(ids, max_new_tokens=8)
    with torch.no_grad():
        # Tokens outside the shortlist cannot be generated, so torch suppresses them too.
        left_out = sorted(set(range(len(tokenizer))) - set(manifest["shortlist"]))
        settings = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": left_out}
        expected = (
            load_checkpoint(tmp_path / "model").generate(torch.from_numpy(ids), **settings).numpy()
        )
    length = min(together.shape[1], expected.shape[1])
    assert (together[:, :length] == expected[:, :length]).mean() > 0.9
    for row, reference in zip(ids, together):
        alone = runtime.generate(row[None], max_new_tokens=8)[0]
        assert alone.tolist() == reference[: len(alone)].tolist()


def test_features_of_different_sizes_are_smoothed():
    """One feature is 100 times as large as the others, so that a common scale leaves one or two
    levels to each of the others."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((400, 64)).astype(np.float32)
    matrix = rng.standard_normal((64, 32)).astype(np.float32)
    for size in (1, 100):
        rows[:, 5] *= size
        seen, unseen = rows[:200], rows[200:].astype(np.float64)
        step = (seen.max() - seen.min()) / 255
        plain = np.abs((np.rint(unseen / step) * step - unseen) @ matrix).std()
        result, is_smoothed = multiply_calibrated(seen, rows[200:], matrix)
        assert is_smoothed == (size == 100)
        assert np.abs(result - unseen @ matrix).std() < plain * (0.5 if is_smoothed else 2)


def multiply_calibrated(seen, rows, matrix, kept=0):
    """Return `rows` x `matrix` in integers with scales calibrated on `seen`, and whether features
    were smoothed. Check that `kept` matmuls keep row scales."""
    calibration = Calibration()
    for rows_of_batch in (seen[:100], seen[100:]):
        calibration.observe(
            "w", InputStatistics.sample(rows_of_batch, np.random.default_rng(len(rows_of_batch)))
        )
    weights = {"w.weight": matrix.T.copy()}
    model = write(
        lambda g, x: [linear(g, x, "w")],
        weights,
        {"x": rows},
        dtype="int8",
        calibration=calibration,
    )
    assert operators(model).count("ReduceMax") == kept
    return run(model, {"x": rows})[0], "Mul" in operators(model)


def relative_errors(products, exact):
    """Return the squared error of each row relative to its squared norm."""
    return np.square(products - exact).sum(axis=1) / np.square(exact).sum(axis=1)


def rows_with_special_tokens():
    """Return rows and a matrix, as after GELU: most values are near 0, and two features of each
    tenth row are as large as 100."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(0, 0.05, (512, 32))
    matrix[:2] *= 4  # smoothing cannot move the size of the large features there
    rows = np.maximum(rng.normal(-1, 1, (400, 512)), -0.17)
    rows[::10] *= 0.1
    rows[::10, :2] = 100
    return rows.astype(np.float32), matrix.astype(np.float32)


def test_row_scales_are_kept_if_outlier_rows_would_ruin_others():
    rows, matrix = rows_with_special_tokens()
    exact = rows.astype(np.float64) @ matrix
    step = (rows.max() - rows.min()) / 255
    lost_with_one_scale = np.median(relative_errors(np.rint(rows / step) * step @ matrix, exact))
    result, _ = multiply_calibrated(rows[:200], rows, matrix, kept=1)
    assert np.median(relative_errors(result, exact)) < 0.001 < 0.01 < lost_with_one_scale
    choice = choose(InputStatistics.sample(rows, np.random.default_rng(0)), [matrix])
    # smoothing helps, and not enough
    assert choice.steps is None and 0.01 < choice.error < lost_with_one_scale
    assert choice.row_error == pytest.approx(np.median(relative_errors(result, exact)), rel=0.3)
    usual = np.delete(rows, np.s_[::10], axis=0)  # without the large rows one scale is enough
    assert choose(InputStatistics.sample(usual, np.random.default_rng(0)), [matrix]).error < 0.001


def test_worst_matrix_decides_for_all_matrices_with_same_input():
    """The first matrix reads a feature that is large in all rows, the second the other features. No
    smoothing suits both."""
    rows, second = rows_with_special_tokens()
    rows[:, 0] = np.where(rows[:, 0] == 100, 100, 20)
    rows[:, 1], second[0] = 0, 0
    first = np.zeros_like(second)
    first[0] = 10
    inputs = InputStatistics.sample(rows, np.random.default_rng(0))
    assert all(choose(inputs, [matrix]).steps is not None for matrix in (first, second))
    expected = np.median(
        relative_errors(np.rint(rows / (100 / 255)) * (100 / 255) @ second, rows @ second)
    )
    for matrices in ([first, second], [second, first]):
        together = choose(inputs, matrices)
        assert (
            together.steps is None
            and together.error == pytest.approx(expected, rel=0.2)
            and expected > 0.01
        )


def test_features_rarely_large_in_short_text_are_not_smoothed():
    """Each feature is 30 in one of 100 rows. In a text of 20 rows most features are at most 1, and
    smoothing would clip them in other rows."""
    rng = np.random.default_rng(0)
    rows = rng.uniform(-1, 1, (6000, 64)).astype(np.float32)
    rows[rng.random(rows.shape) < 0.01] = 30
    matrix = rng.standard_normal((64, 32)).astype(np.float32)
    short, others = rows[:20], rows[20:]
    exact, clipped = others @ matrix, np.minimum(others, np.abs(short).max(axis=0)) @ matrix
    assert np.square(clipped - exact).sum() > 0.1 * np.square(exact).sum()
    steps = choose(InputStatistics.sample(short, np.random.default_rng(0)), [matrix]).steps
    assert steps is None or steps.smoothing is None
    assert (
        choose(InputStatistics.sample(rows, np.random.default_rng(0)), [matrix]).steps is not None
    )


def test_zero_rows_do_not_change_errors():
    rows, matrix = rows_with_special_tokens()
    usual = np.delete(rows, np.s_[::10], axis=0)[:80]
    padded = np.concatenate([usual, np.zeros_like(usual), np.zeros_like(usual)])
    alone, beside = (
        choose(InputStatistics.sample(part, np.random.default_rng(0)), [matrix])
        for part in (usual, padded)
    )
    assert beside.error == pytest.approx(alone.error, rel=1e-3)
    assert beside.row_error == pytest.approx(alone.row_error, rel=1e-3)
    nothing = choose(
        InputStatistics.sample(np.zeros_like(usual), np.random.default_rng(0)), [matrix]
    )
    assert nothing.steps is not None and nothing.error == nothing.row_error == 0


@pytest.mark.parametrize("batch", [1, 8, 16])
def test_sampled_rows_cover_all_positions_and_texts(batch):
    """Row i of 6400 holds the number i. Of 256 sampled rows, 25.6 are expected at each of ten
    positions and 128 in the first half of the texts."""
    rows = np.arange(6400, dtype=np.float32)[:, None]
    generator = np.random.default_rng(0)
    first, *others = (
        InputStatistics.sample(part, generator) for part in np.split(rows, 640 // batch)
    )
    for inputs in others:
        first = inputs.merge(first)
    kept = first.rows[:, 0]
    assert len(set(kept.tolist())) == len(kept) == SAMPLED
    per_position = np.bincount(kept.astype(int) % 10, minlength=10)
    # four standard deviations of the binomial distribution
    assert per_position.min() >= 8 and per_position.max() <= 45
    assert 96 <= (kept < 3200).sum() <= 160
    assert (first.lowest.min(), first.highest.max()) == (0, 6399)


def test_decoder_calibration_matches_inputs_of_single_line_generation(tmp_path, text):
    tokenizer = save_model(tmp_path / "model", GENERATORS[0], encoder_layers=1, decoder_layers=1)
    model = load_checkpoint(tmp_path / "model")
    calibration = calibrate(model, tokenizer, text)
    read = collections.defaultdict(list)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(
                lambda layer, inputs, name=name: read[name].append(inputs[0].flatten(0, -2))
            )
    for line in text.read_text().splitlines():
        ids = torch.tensor([tokenizer(line)["input_ids"]])
        model.generate(ids, num_beams=1, do_sample=False, max_new_tokens=2 * ids.shape[1] + 10)
    assert set(calibration.inputs) == {name.removeprefix("model.") for name in read}
    for name, rows in ((name, torch.cat(rows).numpy()) for name, rows in read.items()):
        inputs = calibration.inputs[name.removeprefix("model.")]
        np.testing.assert_allclose(inputs.lowest.min(axis=0), rows.min(axis=0), atol=1e-4)
        np.testing.assert_allclose(inputs.highest.max(axis=0), rows.max(axis=0), atol=1e-4)
        assert len(inputs.rows) == min(len(rows), SAMPLED)


def save_with_large_feature(directory):
    """Save an encoder with a feature in the first layer that is 1e5 for the first token and 0 for
    others. Return its model and tokenizer."""
    tokenizer = save_model(directory, tokenizer="pieces")
    model = load_checkpoint(directory)
    up = model.model.layers[0].feed_forward.up_proj
    with torch.no_grad():
        # makes the first token unlike all others
        model.get_input_embeddings().weight[tokenizer.cls_token_id, 0] = 10
    states = []
    hook = up.register_forward_pre_hook(lambda layer, inputs: states.append(inputs[0][0]))
    with torch.no_grad():
        for line in MANY:
            model(torch.tensor([tokenizer(line)["input_ids"]]))
        hook.remove()
        firsts, others = (
            torch.stack([rows[0] for rows in states]),
            torch.cat([rows[1:] for rows in states]),
        )
        direction = firsts.mean(axis=0) - others.mean(axis=0)
        low, high = (others @ direction).max(), (firsts @ direction).min()
        assert high > low
        size = 1e5 / (high - low)
        up.weight[0], up.bias[0] = direction * size, -low * size
    model.save_pretrained(directory)
    return model, tokenizer


def test_export_reports_calibration_errors_and_number_of_row_scales(tmp_path, text, capsys):
    model, tokenizer = save_with_large_feature(tmp_path / "model")
    arguments = [
        str(tmp_path / "model"),
        str(tmp_path / "out"),
        "--target",
        "cpu",
        "--dtype",
        "int8",
    ]
    main(["export", *arguments, "--calibrate", str(text)])
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    reported = json.loads(capsys.readouterr().out.splitlines()[-1])["calibration"]
    left_out = manifest["calibration"].pop("left_out")
    assert reported == manifest["calibration"]
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)
    }
    assert reported["matmuls"] == 6  # queries, keys, values, output, two of feed-forward
    _, counts = load_graph(tmp_path / "out/onnx/model.onnx")
    assert (
        reported["row_scales"] == counts["ReduceMax"] == 1 and counts["MatMulIntegerToFloat"] == 6
    )
    [(name, errors)] = left_out.items()
    rows = []
    layer = layers[f"model.{name}"]
    layer.register_forward_pre_hook(lambda layer, inputs: rows.append(inputs[0][0].numpy()))
    with torch.no_grad():
        for line in MANY:
            model(torch.tensor([tokenizer(line)["input_ids"]]))
    rows, matrix = np.concatenate(rows), layer.weight.detach().numpy().T
    # SmoothQuant, equation 4
    divisor = np.sqrt(rows.max(axis=0).clip(1e-5) / np.abs(matrix).max(axis=1))
    step = (rows / divisor).max() / 255
    weights = matrix * divisor[:, None]
    scales = np.abs(weights).max(axis=0) / 127
    products = np.rint(rows / divisor / step) * step @ (np.rint(weights / scales) * scales)
    expected = np.median(relative_errors(products, rows @ matrix))
    assert (
        errors["error"] == pytest.approx(expected, rel=0.2)
        and expected > 0.01 > errors["row_error"]
    )
    assert errors["row_error"] / 6 < reported["row_error"] <= reported["error"] < 0.01


@pytest.mark.parametrize(
    "content, seen",
    [
        (b"", (0, "tokenizer")),
        (b"\n  \n", 0),
        ("\u4e2d\u6587\n\u4e2d\n".encode(), (2, "tokenizer")),
        (b"the man\n\xff\n", 2),
    ],
)
def test_unusable_text_is_rejected_before_files_are_written(tmp_path, content, seen):
    save_model(tmp_path / "model", tokenizer="pieces")
    (tmp_path / "text").write_bytes(content)
    with raises(ValueError, seen=seen):
        export(
            tmp_path / "model",
            tmp_path / "out",
            target="cpu",
            dtype="int8",
            calibrate=tmp_path / "text",
        )
    assert not (tmp_path / "out").exists()


def test_tokenizer_beyond_vocab_size_is_rejected(tmp_path, text):
    save_model(tmp_path / "model", vocab_size=12)
    with raises(ValueError, expected=12):
        export(tmp_path / "model", tmp_path / "out", target="cpu", dtype="int8", calibrate=text)


@pytest.mark.parametrize(
    "settings",
    [
        {"target": "cpu"},
        {"target": "portable", "dtype": "int8"},
        {"target": "cpu", "dtype": "int4"},
    ],
)
def test_calibrate_is_rejected_for_other_targets_and_dtypes(tmp_path, text, settings):
    with raises(UsageError, seen="calibrate", expected=("cpu", "int8")):
        export(tmp_path / "model", tmp_path / "out", calibrate=text, **settings)
