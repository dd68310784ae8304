"""Verification passes for correct exports, and fails for exports with the faults below."""

import copy
import json
import shutil

import numpy as np
import onnx
import pytest
import torch
import transformers
from checkpoints import (
    CHECKPOINTS,
    VOCABULARY,
    build,
    copy_folder,
    edit_graph,
    perturbed,
    seal,
)
from graph_variants import ENCODER, SIZES
from messages import raises
from onnx import helper, numpy_helper

from vanilla_transformer import VanillaEncoderConfig
from vanilla_transformer_export import export, load_checkpoint, verify
from vanilla_transformer_export.engine.model import open_export
from vanilla_transformer_export.proof import verify as proof
from vanilla_transformer_export.proof.certify import certify
from vanilla_transformer_export.proof.compare import TOLERANCES, Report, Tolerance
from vanilla_transformer_export.proof.reference import FILE, Reference, case_inputs
from vanilla_transformer_export.proof.torch import long_length


@pytest.mark.parametrize("name", ["encoder", "causal", "seq2seq"])
def test_100_cases_agree(exported, name):
    report = verify(exported(name).directory, exported(name).model, cases=100, seed=1)
    assert (report.cases, report.failures, report.ties) == (100, [], 0)
    assert report.values > 100_000
    assert 0 < report.max_error < TOLERANCES["fp32"].max_error
    assert (report.choices > 1_500) == (name != "encoder")


@pytest.mark.parametrize(
    "name", [name for name in CHECKPOINTS if name not in ("encoder", "causal", "seq2seq")]
)
def test_every_other_kind_of_checkpoint_agrees(exported, name):
    assert verify(exported(name).directory, exported(name).model, cases=15, seed=2).failures == []


def test_seed_determines_cases(exported):
    values = [
        verify(exported("encoder").directory, exported("encoder").model, 5, seed).values
        for seed in (0, 0, 1)
    ]
    assert values[0] == values[1] != values[2]


def test_cases_have_1_to_5_rows_of_1_to_33_tokens(exported):
    info, rng = open_export(exported("encoder").directory), np.random.default_rng(0)
    batches = [case_inputs(info, rng, "right").inputs["input_ids"].shape for _ in range(1000)]
    assert {rows for rows, _ in batches} == {1, 2, 3, 4, 5}
    assert {length for _, length in batches} == set(range(1, 34))


def test_seq2seq_decoder_starts_with_1_to_4_tokens(exported, monkeypatch):
    """Generation starts with one token, but a decoder accepts several."""
    start_lengths, outcome = set(), proof.outcome

    def observed(model, case, steps):
        start_lengths.add(case.inputs["start"].shape[1])
        return outcome(model, case, steps)

    monkeypatch.setattr(proof, "outcome", observed)
    verify(exported("seq2seq").directory, exported("seq2seq").model, cases=40)
    assert start_lengths == {1, 2, 3, 4}


# -------------------------------------------------------- faults; test_faults.py has more of them


def graph_files(name):
    return (
        ["onnx/encoder_model.onnx", "onnx/decoder_model_merged.onnx"]
        if name == "seq2seq"
        else ["onnx/model.onnx"]
    )


@pytest.mark.parametrize("share", [0, 0.5, 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize(
    "name, file",
    [(name, file) for name in ("encoder", "causal", "seq2seq") for file in graph_files(name)],
)
def test_changed_weight_is_detected_in_first_middle_and_last_matmul(
    exported, tmp_path, name, file, share
):
    """The change is 1e-2, in the middle of the weight."""

    def change(graph):
        names = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
        matrices = [weight for weight in graph.initializer if weight.name in names]
        matrix = matrices[int(share * (len(matrices) - 1))]
        values = numpy_helper.to_array(matrix).copy()
        values[values.shape[0] // 2, values.shape[1] // 2] += 1e-2
        matrix.CopyFrom(numpy_helper.from_array(values, matrix.name))

    directory = copy_folder(exported(name).directory, tmp_path)
    edit_graph(directory, file, change)
    first = verify(directory, exported(name).model, cases=4).failures[0]
    assert "5e-05" in first
    # the states of the encoder are compared too
    assert (", last_hidden_state: " in first) == (
        file != graph_files(name)[-1] or name == "encoder"
    )


@pytest.mark.parametrize(
    "name, file, mask",
    [
        ("encoder", "onnx/model.onnx", "attention_mask"),
        ("causal", "onnx/model.onnx", "attention_mask"),
        ("seq2seq", "onnx/encoder_model.onnx", "attention_mask"),
        ("seq2seq", "onnx/decoder_model_merged.onnx", "encoder_attention_mask"),
    ],
)
def test_ignored_mask_is_detected_only_in_padded_cases(exported, tmp_path, name, file, mask):
    def change(graph):
        for node in graph.node:
            node.input[:] = ["all_ones" if name == mask else name for name in node.input]
        graph.node.insert(
            0, helper.make_node("Cast", ["true"], ["all_ones"], to=onnx.TensorProto.INT64)
        )
        graph.node.insert(0, helper.make_node("Equal", [mask, mask], ["true"]))

    directory = copy_folder(exported(name).directory, tmp_path)
    edit_graph(directory, file, change)
    result = verify(directory, exported(name).model, cases=6).failures
    assert result
    assert not any("padding: none" in line for line in result)


# --------------------------------------------------------------------------------------- tolerances


@pytest.mark.parametrize("name", ["encoder", "causal", "seq2seq"])
def test_mean_error_is_detected(exported, monkeypatch, tmp_path, name):
    """Every matrix is rounded to 5 bits less than float16 has, and the tolerance is that of
    float16."""

    def change(graph):
        for weight in graph.initializer:
            if weight.data_type == onnx.TensorProto.FLOAT and len(weight.dims) == 2:
                fraction, exponent = np.frexp(numpy_helper.to_array(weight))
                rounded = np.ldexp(np.rint(fraction * 64) / 64, exponent).astype(np.float32)
                weight.CopyFrom(numpy_helper.from_array(rounded, weight.name))

    monkeypatch.setitem(TOLERANCES, "fp32", TOLERANCES["fp16"])
    directory = copy_folder(exported(name).directory, tmp_path)
    for file in graph_files(name):
        edit_graph(directory, file, change)
    report = verify(directory, exported(name).model, cases=6)
    assert report.failures[-1] == f"mean error {report.mean_error:.1e}, expected at most 0.003"


@pytest.fixture(scope="module")
def strong_t5(tmp_path_factory):
    """A T5 that amplifies rounding, and its export."""
    folder = tmp_path_factory.mktemp("strong")
    transformers.set_seed(0)
    sizes = dict(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    config = transformers.T5Config(**sizes, initializer_factor=3.0, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder / "t5")
    export(folder / "t5", folder / "out", cases=6)
    return load_checkpoint(folder / "t5"), folder / "out"


def test_tolerance_follows_the_rounding_of_torch_itself(strong_t5):
    model, directory = strong_t5
    tolerance = json.loads((directory / "manifest.json").read_text())["variants"]["fp32"][
        "tolerance"
    ]
    assert 5e-5 < tolerance["max_error"] <= TOLERANCES["fp16"].max_error
    report = verify(directory, model, cases=9, seed=1)
    assert report.failures == [] and report.max_error > TOLERANCES["fp32"].max_error
    ids = torch.arange(1, 60).reshape(1, -1)  # the rounding, by hand
    with torch.no_grad():
        single = model(ids, decoder_input_ids=ids).logits
        exact = copy.deepcopy(model).double()(ids, decoder_input_ids=ids).logits
    assert (single - exact).abs().max() / exact.abs().max() > TOLERANCES["fp32"].max_error
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert certify(directory).failures == []


def failures(directory, model, cases):
    """Return what `verify` finds. `certify` must find something too."""
    assert certify(directory).failures
    return verify(directory, model, cases).failures


def test_faults_of_a_model_that_amplifies_rounding_are_detected(strong_t5, tmp_path):
    def change(graph):
        names = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
        matrix = next(weight for weight in graph.initializer if weight.name in names)
        values = numpy_helper.to_array(matrix) * np.float32(1.1)
        matrix.CopyFrom(numpy_helper.from_array(values, matrix.name))

    model, directory = strong_t5
    directory = copy_folder(directory, tmp_path)
    edit_graph(directory, "onnx/decoder_model_merged.onnx", change)
    assert failures(directory, model, cases=3)


def test_rounding_excuses_no_more_than_float16_has():
    own = Tolerance(0.4, 1e-9)
    assert proof.widened(own) == (TOLERANCES["fp16"].max_error, TOLERANCES["fp32"].mean_error)
    assert proof.widened(Tolerance(1e-4, 1e-5)) == pytest.approx((4e-4, 4e-5))


def test_tolerances_grow_with_fewer_bits():
    for names in (("fp32", "fp16", "bf16"), ("fp16", "int8", "int4")):
        rows = [TOLERANCES[name] for name in names]
        assert sorted(rows) == rows
        assert sorted(row.mean_error for row in rows) == [row.mean_error for row in rows]


FIRST, SECOND = 5, 9  # two tokens that tie


def export_of_tied_tokens(tmp_path, difference):
    """Return a model whose two most likely tokens tie, and its export, which adds `difference` to
    the bias of the second token."""
    model = build("causal-learned")
    model.lm_head.weight.data[SECOND] = model.lm_head.weight.data[FIRST]
    model.lm_head.bias.data[[FIRST, SECOND]] = 50.0
    model.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", cases=1)

    def change(graph):
        bias = next(weight for weight in graph.initializer if weight.name.endswith("lm_head.bias"))
        values = numpy_helper.to_array(bias).copy()
        values[SECOND] += difference
        bias.CopyFrom(numpy_helper.from_array(values, bias.name))

    edit_graph(tmp_path / "out", "onnx/model.onnx", change)
    return model, tmp_path / "out"


def test_ties_are_counted_and_are_not_failures(tmp_path):
    model, directory = export_of_tied_tokens(tmp_path, 1e-4)  # of 50: an error of 2e-6
    report = verify(directory, model, cases=9)
    assert report.failures == []
    assert report.ties == report.choices > 0
    certificate = certify(directory)
    assert certificate.failures == []
    checks = {check.name: str(check) for check in certificate.checks}
    assert "warn   fp32 greedy search: compared 0 of 60 choices" in checks["greedy search"]


def test_tie_in_torch_does_not_excuse_value_errors(tmp_path):
    model, directory = export_of_tied_tokens(tmp_path, 1.0)
    assert failures(directory, model, cases=9)


# ------------------------------------------------------------------------------------------- report


def test_report_ignores_padding():
    report = Report()
    actual, expected = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 4), np.float32)
    actual[0, 2] = 7
    real = np.array([[True, True, False], [True, True, True]])
    report.compare("case", actual, expected, real)
    assert (report.values, report.max_error, report.failures) == (20, 0.0, [])
    report.compare("case 9", actual, expected, np.ones_like(real))
    assert report.problems == ["case 9: largest error 7.0e+00, expected at most 5e-05"]


def test_error_is_relative_to_vector_maximum_or_1():
    report, real = Report(), np.ones((1, 1), bool)
    report.compare("large", np.array([[[1000.03, 2.0]]]), np.array([[[1000.0, 2.03]]]), real)
    assert report.problems == []
    report.compare("small", np.array([[[0.0005, 0.5]]]), np.array([[[0.0, 0.5]]]), real)
    assert len(report.problems) == 1
    assert report.max_error == pytest.approx(5e-4)
    assert report.mean_error == pytest.approx((5e-4 + 2 * 0.03 / 1000) / 4)
    assert report.summary()["mean_error"] == report.mean_error


def test_tokens_outside_shortlist_must_be_minus_infinity():
    expected, real = np.array([[[1.0, -np.inf]]]), np.ones((1, 1), bool)
    for value in (-np.inf, -1e9, np.nan):
        report = Report()
        report.compare("case", np.array([[[1.0, value]]]), expected, real)
        assert bool(report.failures) == (value != -np.inf)


def test_clearly_different_greedy_token_is_a_failure():
    report = Report()
    expected, actual = np.array([[0.0, 1.0, 0.5]]), np.array([[0.0, 0.5, 1.0]])
    report.compare_choices("case 0", actual, expected)
    assert (report.ties, report.failures) == (0, ["case 0: 1 of 1 choices differ"])


def test_single_label_has_no_choice_to_compare():
    report = Report()
    report.compare("logits", np.array([[1.0]]), np.array([[1.0]]), np.ones(1, bool))
    assert (report.values, report.choices, report.failures) == (1, 0, [])


@pytest.mark.parametrize(
    "name, least",
    [("masked-lm", 200), ("classification", 10), ("answers", 20), ("pretraining", 200)],
)
def test_top_choices_of_heads_are_compared(exported, name, least):
    report = verify(exported(name).directory, exported(name).model, cases=10, seed=3)
    assert report.failures == [] and report.agreeing == report.choices >= least


# --------------------------------------------------------------------------------- wrong checkpoint


@pytest.mark.parametrize(
    "export, checkpoint",
    [
        ("causal", "encoder"),
        ("encoder", "seq2seq"),
        ("masked-lm", "classification"),
        ("encoder", "masked-lm"),
    ],
)
def test_error_names_architectures_of_export_and_wrong_checkpoint(exported, export, checkpoint):
    names = tuple(type(exported(name).model).__name__ for name in (export, checkpoint))
    with raises(ValueError, seen=names):
        verify(exported(export).directory, exported(checkpoint).model, 3)


@pytest.mark.parametrize("field, value", [("vocab_size", VOCABULARY + 1), ("hidden_size", 16)])
def test_checkpoint_of_other_size_is_rejected_with_both_sizes(exported, field, value):
    model = exported("encoder").model
    config = type(model.config)(**{**model.config.to_dict(), field: value})
    with raises(ValueError, seen=getattr(model.config, field), expected=value):
        verify(exported("encoder").directory, type(model)(config).eval(), 3)


def test_other_weights_of_same_shape_are_detected(exported, tmp_path):
    torch.manual_seed(5)
    other = type(exported("encoder").model)(exported("encoder").model.config).eval()
    directory = exported("encoder").directory
    assert verify(directory, other, cases=3).failures
    other.save_pretrained(tmp_path / "other")
    export(tmp_path / "other", tmp_path / "out", cases=1)
    shutil.copyfile(directory / FILE, tmp_path / "out" / FILE)
    seal(tmp_path / "out")
    assert failures(tmp_path / "out", other, cases=3)[0].startswith("reference, outputs: ")


def test_changed_export_is_rejected_before_comparison(exported, tmp_path, monkeypatch):
    directory = copy_folder(exported("encoder").directory, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with raises(ValueError, seen="config.json"), monkeypatch.context() as patched:
        patched.setattr(proof, "prove", None)
        verify(directory, exported("encoder").model, 3)
    with raises(ValueError, seen="config.json"):
        certify(directory)
    seal(directory)
    assert verify(directory, exported("encoder").model, cases=3).failures == []
    assert certify(directory).failures == []


# ------------------------------------------------------------------------------------------ blocks


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A model of windows, and its export."""
    folder = tmp_path_factory.mktemp("windowed")
    fields = ENCODER["modernbert"] | {"max_position_embeddings": 544}
    model = perturbed("VanillaEncoderModel", SIZES | fields)
    model.save_pretrained(folder / "model")
    export(folder / "model", folder / "out", cases=1)
    return model, folder / "out"


def transpose_weights_of_blocks(graph):
    """Let the softmax of all layers that work in blocks be over the queries."""
    branches = [a.g for node in graph.node if node.op_type == "If" for a in node.attribute]
    nodes = [
        node
        for branch in branches
        if any(node.op_type == "Pad" for node in branch.node)
        for node in branch.node
        if node.op_type == "Softmax"
    ]
    assert nodes
    for node in nodes:
        node.attribute[0].CopyFrom(helper.make_attribute("axis", -2))


def test_blocks_of_windows_are_compared_by_verify_and_by_the_reference(windowed, tmp_path):
    model, directory = windowed
    shape = Reference.read(directory).inputs["input_ids"].shape
    assert shape == (3, 512 + 32)
    report = verify(directory, model, cases=3)
    assert report.failures == []
    assert certify(directory, device="cpu").failures == []
    copy = copy_folder(directory, tmp_path)
    edit_graph(copy, "onnx/model.onnx", transpose_weights_of_blocks)
    assert "reference, outputs: " in verify(copy, model, cases=3).failures[0]
    failed = [check.name for check in certify(copy, device="cpu").failures]
    assert "outputs" in failed and "rows alone" in failed


@pytest.mark.parametrize(
    "fields, length",
    [
        ({"sliding_window": 3, "max_position_embeddings": 544}, 544),
        ({"sliding_window": 3, "max_position_embeddings": 543}, 0),
        ({"sliding_window": 200}, 900),
        ({"sliding_window": 3, "layer_types": ["full_attention"] * 2}, 0),
        ({"sliding_window": 3, "position_embedding_type": "relative"}, 0),
        ({}, 0),
    ],
)
def test_only_encoders_that_work_in_blocks_have_a_long_row(fields, length):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = VanillaEncoderConfig(**{"max_position_embeddings": 8192} | sizes | fields)
    assert long_length(config) == length


def test_choices_that_errors_can_swap_are_ties():
    """Two logits, each within its tolerance, change places up to a margin of twice that."""
    report = Report(Tolerance(0.1, 0.1))
    report.compare("logits", np.float32([[0.54, 0.46]]), np.float32([[0.45, 0.55]]))
    assert (report.choices, report.agreeing, report.ties, report.failures) == (1, 0, 1, [])
    report.compare("logits", np.float32([[1.0, 0.76]]), np.float32([[0.7, 1.0]]))
    assert "logits: 1 of 1 choices differ" in report.failures


@pytest.mark.parametrize("name", ["causal", "seq2seq"])
def test_reference_compares_greedy_search_up_to_the_end_of_each_row(exported, name):
    """A token after the end has no margin, so nothing is compared there."""
    info = open_export(exported(name).directory)
    expected = Reference.read(info.directory).results["torch"]
    ends = set(np.ravel(info.config["eos_token_id"]).tolist())
    for tokens, margins in zip(expected["greedy"].tolist(), expected["greedy_margins"]):
        length = next(
            (place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens)
        )
        assert (margins[:length] > 0).all() and not margins[length:].any()
