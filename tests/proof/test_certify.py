"""Tests of certification: correct exports, the report, and exports that cannot be certified."""

import dataclasses
import json

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import copy_folder, edit_json, list_file, seal
from command_line import main
from messages import check_message, raises

from vanilla_transformer_export import Runtime, export
from vanilla_transformer_export.engine.model import OnnxModel, open_export
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.inference.session import SessionChanges
from vanilla_transformer_export.proof import checks
from vanilla_transformer_export.proof.certify import certify
from vanilla_transformer_export.proof.checks import Subject, compare_manifests
from vanilla_transformer_export.proof.compare import TOLERANCES, Report
from vanilla_transformer_export.proof.kernels import count_copies, describe_kernels
from vanilla_transformer_export.proof.reference import FILE, Reference, sample

# in addition to the exports of test_faults.py
EXPORTS = [
    ("seq2seq-t5", "portable"),
    ("causal-relative", "cuda", "int4"),
    ("encoder-relative", "cpu", "int8"),
    ("seq2seq-values", "cuda", "fp16"),
    ("encoder", "cuda", "int8"),
    ("seq2seq", "cpu"),
]
SEARCHES = ["greedy search", "beam search"]
ALWAYS = ["second thread", "rows alone", "served requests", "speed"]
WITH_STEP = ["served requests", "second thread", "rows alone", "speed"]


def check_lines(certificate):
    return [str(check) for check in certificate.checks]


@pytest.mark.parametrize("kind", EXPORTS, ids="-".join)
def test_export_of_each_target_is_certified(exported_for, kind):
    certificate = certify(exported_for(*kind)[1], device="cpu")
    assert certificate.failures == [], check_lines(certificate)
    names = [check.name for check in certificate.checks]
    is_integer, generates = kind[-1].startswith("int"), not kind[0].startswith("encoder")
    assert names == [
        "files",
        "manifest",
        "separate sessions",
        "kernels",
        "outputs",
        *["recorded outputs"] * is_integer,
        *SEARCHES * generates,
        *["best tokens", "alignment"] * (kind[:2] == ("seq2seq", "cpu")),
        *(WITH_STEP if generates and kind[1] == "cpu" else ALWAYS),
    ]


def test_export_with_a_graph_for_prompt_lookup_is_certified(exported_for, tmp_path):
    """Exports had this graph before, and references of int8 exports its logits."""
    _, source = exported_for("seq2seq", "cpu", "int8")
    directory = copy_folder(source, tmp_path)
    file = "onnx/decoder_lookup_model.onnx"
    (directory / file).write_bytes(b"no graph that onnxruntime could open")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["variants"]["int8"]["graphs"]["lookup"] = file
    edit_json(directory / "manifest.json", **manifest)
    edit_json(directory / "generation_config.json", prompt_lookup_num_tokens=3)
    reference = Reference.read(directory)
    reference.results["int8"]["lookup"] = np.zeros((1, 5, 48), np.float32)
    reference.write(directory, manifest)
    list_file(directory, file)
    certificate = certify(directory)
    assert certificate.failures == [], check_lines(certificate)
    ids = np.array([[5, 6, 7, 5, 6]])
    for options in ({}, {"num_beams": 3}):
        actual, expected = (
            Runtime(path, threads=1).generate(ids, **options) for path in (directory, source)
        )
        np.testing.assert_array_equal(actual, expected)
    (directory / file).write_bytes(b"no graph that onnxruntime could OPEN")
    with raises(ValueError, seen=(file, "SHA-256"), expected="export again"):
        certify(directory)


@pytest.mark.parametrize("name", ["encoder-relative", "causal"])
def test_rows_alone_in_int8_of_cpu_have_the_same_bits(exported_for, monkeypatch, name):
    directory = exported_for(name, "cpu", "int8")[1]
    rows = {check.name: check for check in certify(directory).checks}["rows alone"]
    assert rows.ok and "the same bits" in str(rows)
    exact = checks.outcome

    def shifted(model, reference):
        """Return the outcome with an error far below the tolerance of int8 in single rows."""
        is_single = reference.num_rows == 1
        results = exact(model, reference)
        return {name: array + 1e-3 * is_single for name, array in results.items()}

    monkeypatch.setattr(checks, "outcome", shifted)
    assert not {check.name: check for check in certify(directory).checks}["rows alone"].ok


@pytest.mark.parametrize(
    "name", ["masked-lm", "classification", "answers", "causal-learned", "seq2seq-untied"]
)
def test_every_head_is_certified(exported, name):
    certificate = certify(exported(name).directory)
    assert certificate.failures == [], check_lines(certificate)


@pytest.mark.parametrize("size", ["trained", "free"])
def test_vision_export_is_certified(tmp_path, size):
    from vanilla_transformer import VanillaVisionConfig, VanillaVisionForImageClassification

    shape = dict(image_size=12, patch_size=4, hidden_size=16, num_attention_heads=2)
    config = VanillaVisionConfig(**shape, num_hidden_layers=1, intermediate_size=24)
    VanillaVisionForImageClassification(config).eval().save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", cases=1, image_size=size)
    certificate = certify(tmp_path / "out")
    assert certificate.failures == [], check_lines(certificate)
    assert certificate.speed["fp32"]["rows_per_second"] > 0


# -------------------------------------------------------------------------------------- the command


def test_command_prints_one_line_per_check_and_writes_report(exported_for, tmp_path, capsys):
    directory = exported_for("causal", "cpu", "int8")[1]
    main(["certify", str(directory), "--output", str(tmp_path / "report.json")])
    printed = capsys.readouterr().out.splitlines()
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(printed) == len(report["checks"]) and all(line[:3] == "ok " for line in printed)
    assert (report["certified"], report["device"], report["target"]) == (True, "cpu", "cpu")
    assert report["machine"]["packages"]["onnxruntime"] == onnxruntime.__version__
    assert report["machine"]["processor"] and report["machine"]["gpus"] == []
    assert report["files"] == json.loads((directory / "manifest.json").read_text())["files"]
    assert report["kernels"]["int8"]["decoder"]["CPUExecutionProvider"]["GroupQueryAttention"] == 2
    assert report["speed"]["int8"]["tokens_per_second"] > 0


def test_command_exits_with_names_of_failed_checks(exported_for, tmp_path, capsys):
    directory = copy_folder(exported_for("causal", "portable")[1], tmp_path)
    edit_json(directory / "manifest.json", opset=20)
    output = tmp_path / "report.json"
    with pytest.raises(SystemExit) as end:
        main(["certify", str(directory), "--output", str(output)])
    assert str(end.value) == f"{directory} is not certified: manifest"
    [failed] = [line for line in capsys.readouterr().out.splitlines() if line[:2] != "ok"]
    assert failed == "FAILED manifest: opset is 20, expected 18"
    assert json.loads(output.read_text())["certified"] is False


def test_field_that_only_the_reference_has_is_not_compared(exported):
    directory = exported("causal").directory
    manifest = json.loads((directory / "manifest.json").read_text())
    reference = Reference.read(directory)
    fields = {**reference.manifest, "default_dtype": "fp32"}
    assert compare_manifests(manifest, dataclasses.replace(reference, manifest=fields)).ok


def test_failing_check_does_not_stop_other_checks(exported_for, monkeypatch):
    def fail(*args):
        raise RuntimeError("a thread\nhas died")

    monkeypatch.setattr("vanilla_transformer_export.proof.checks.served_sequences", fail)
    certificate = certify(exported_for("causal", "portable")[1])
    [check] = certificate.failures
    assert check.name == "served requests"
    assert check.comparison[:3] == (False, "a thread has died", "no error")
    reports = {report["name"]: report for report in certificate.report()["checks"]}
    trace = reports.pop("served requests")["traceback"]
    assert "in fail\n" in trace and trace.endswith("has died\n")
    assert [report["traceback"] for report in reports.values()] == [""] * 10
    assert certificate.checks[-1].name == "speed"


# --------------------------------------------------------------------------- causes of failures


def test_certify_without_fusions_runs_the_operators_as_written(exported):
    directory = exported("seq2seq").directory
    certificate = certify(directory, without=["fusions"])
    assert certificate.failures == [], check_lines(certificate)
    report = certificate.report()
    assert (report["without"], report["attention"]) == (("fusions",), None)
    graph = onnx.load(directory / report["variants"]["fp32"]["graphs"]["encoder"]).graph
    written = {node.op_type for node in graph.node}

    def operators(certificate):
        return set(certificate.kernels["fp32"]["encoder"]["CPUExecutionProvider"])

    assert operators(certificate) <= written
    assert operators(certify(directory)) - written  # such as FusedMatMul


def test_half_precision_without_fusions_is_certified(exported_for):
    certificate = certify(
        exported_for("seq2seq-values", "cuda", "fp16")[1], device="cpu", without=["fusions"]
    )
    assert certificate.failures == [], check_lines(certificate)


@pytest.mark.parametrize(
    "changes, seen, expected",
    [
        (["--without", "capture"], ("capture", "cpu"), "cuda"),
        (["--attention", "flash"], ("flash", "cpu"), "cuda"),
        (["--without", "copies"], "copies", ("capture", "fusions")),
        (["--attention", "cudnn"], "cudnn", ("flash", "efficient", "math")),
    ],
)
def test_change_without_effect_is_an_error_before_any_check(
    exported, tmp_path, capsys, changes, seen, expected
):
    output = tmp_path / "report.json"
    with pytest.raises(SystemExit) as end:
        main(["certify", str(exported("causal").directory), *changes, "--output", str(output)])
    printed = capsys.readouterr()
    assert (end.value.code, printed.out, output.exists()) == (2, "", False)
    check_message(printed.err.splitlines()[-1], seen=seen, expected=expected)


def test_unknown_change_is_an_error_of_python_too(exported):
    with raises(UsageError, seen="copies", expected=("capture", "fusions")):
        certify(exported("causal").directory, without=["copies"])
    with raises(UsageError, seen="cudnn", expected=("flash", "efficient", "math")):
        Runtime(exported("causal").directory, changes=SessionChanges(attention="cudnn"))


def test_changes_become_options_of_the_cuda_provider(exported_for):
    """The numbers are those of onnxruntime's documentation of sdpa_kernel."""
    info = open_export(exported_for("seq2seq-values", "cuda", "fp16")[1])

    def options(role="decoder", **changes):
        model = OnnxModel(info, 1, device="cuda", changes=SessionChanges(**changes))
        [(name, selected), _] = model.loaded.providers(role)
        assert name == "CUDAExecutionProvider"
        return selected["enable_cuda_graph"], selected.get("sdpa_kernel")

    assert options() == ("1", "19") and options("encoder") == ("0", None)
    assert options(without=("capture",)) == options(without=("fusions",)) == ("0", "19")
    for name, number in (("flash", "1"), ("efficient", "2"), ("math", "16")):
        assert options(attention=name) == ("1", number)
        assert options("encoder", attention=name) == ("0", number)


@pytest.mark.parametrize("name", ["missing/report.json", "folder", "file/report.json"])
def test_report_that_cannot_be_written_is_an_error_before_any_check(
    exported, tmp_path, capsys, name
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    command = ["certify", str(exported("causal").directory), "--output", str(tmp_path / name)]
    with pytest.raises(SystemExit) as end:
        main(command)
    check_message(str(end.value), seen=str(tmp_path / name), expected="a file in a folder")
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_report_replaces_an_earlier_one_only_when_all_checks_ran(exported, tmp_path, monkeypatch):
    output = tmp_path / "report.json"
    output.write_text("an earlier report")

    def interrupt(*args):
        assert output.read_text() == "an earlier report"
        raise KeyboardInterrupt

    monkeypatch.setattr("vanilla_transformer_export.proof.certify.check_files", interrupt)
    with pytest.raises(BaseException):  # noqa: B017 - the command ends by the signal
        main(["certify", str(exported("causal").directory), "--output", str(output)])
    assert output.read_text() == "an earlier report" and len([*tmp_path.iterdir()]) == 1


def test_certify_checks_all_dtypes_or_the_selected_one(exported, tmp_path):
    export(exported("causal").checkpoint, tmp_path / "out", dtype=["int8", "fp32"], cases=1)
    both = certify(tmp_path / "out")
    assert both.failures == [], check_lines(both)
    assert [*both.speed] == ["int8", "fp32"]
    assert [*certify(tmp_path / "out", dtype="fp32").speed] == ["fp32"]


# ----------------------------------------------------------------- exports that cannot be certified


def test_modified_graph_file_raises(exported, tmp_path):
    directory = copy_folder(exported("causal").directory, tmp_path)
    path = directory / "onnx/model.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with raises(ValueError, seen=("onnx/model.onnx", "SHA-256")):
        certify(directory)


def test_missing_reference_raises_and_asks_to_export_again(exported, tmp_path):
    directory = copy_folder(exported("causal").directory, tmp_path)
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["files"][FILE]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    (directory / FILE).unlink()
    with raises(ValueError, seen=FILE, expected="export again"):
        certify(directory)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"{}"])
def test_invalid_reference_file_raises(exported, tmp_path, content):
    directory = copy_folder(exported("causal").directory, tmp_path)
    (directory / FILE).write_bytes(content)
    with raises(ValueError, seen=(FILE, "SHA-256")):
        certify(directory)
    seal(directory)
    with raises(ValueError, seen="is not a reference", expected="export again"):
        certify(directory)


def test_one_graph_export_cannot_be_certified(exported, tmp_path):
    export(exported("causal").checkpoint, tmp_path / "out", cases=1, generate="greedy")
    assert not (tmp_path / "out" / FILE).exists()
    with raises(ValueError, seen="--generate greedy"):
        certify(tmp_path / "out")


# --------------------------------------------------------------------------------- the reference


def test_reference_file_is_small_and_reproducible(exported, tmp_path):
    directory = exported("seq2seq").directory
    export(exported("seq2seq").checkpoint, tmp_path / "out", cases=1)
    content = (directory / FILE).read_bytes()
    assert content == (tmp_path / "out" / FILE).read_bytes() and len(content) < 50_000


def test_reference_has_scores_of_beams_and_older_ones_with_tokens_are_read(exported, tmp_path):
    directory = exported("causal").directory
    with np.load(directory / FILE) as file:
        arrays = dict(file)
    assert "torch/beam_scores" in arrays and "torch/beams" not in arrays
    np.savez(tmp_path / FILE, **arrays, **{"torch/beams": arrays["torch/greedy"]})
    subject = Subject(Runtime(directory), Reference.read(tmp_path), TOLERANCES["fp32"])
    comparison = subject.checks["beam search"]()
    assert comparison.ok and comparison.seen.startswith("largest error")


def test_reference_row_has_no_padding(exported):
    reference = Reference.read(exported("causal").directory)
    lengths = reference.inputs["attention_mask"].sum(axis=1)
    for row, length in enumerate(lengths):
        inputs = reference.row(row).inputs
        assert inputs["input_ids"].shape == (1, length) and inputs["attention_mask"].all()
        assert inputs["tokens"].shape == (1, reference.inputs["tokens"].shape[1])
    assert len(set(lengths)) == 3


def test_sample_keeps_48_positions_with_first_and_last():
    values = np.arange(2 * 100 * 3).reshape(2, 100, 3)
    assert sample(values).shape == (2, 48, 3)
    assert np.array_equal(sample(values)[:, [0, -1]], values[:, [0, -1]])


# ------------------------------------------------------------------------------------ comparisons


def test_tokens_are_compared_up_to_the_first_near_tie():
    expected = {
        "greedy": np.array([[5, 6, 7]]),
        "greedy_margins": np.array([[0.5, 0.01, 0.5]]),
    }
    same, other = np.array([5, 9, 9]), np.array([4, 6, 7])

    def compared(dtype, *rows):
        report = Report(TOLERANCES[dtype])
        report.compare_greedy(rows, expected)
        return report

    report = compared("fp16", same, same)
    assert (report.failures, report.choices, report.agreeing, report.ties) == ([], 6, 2, 4)
    assert report.comparison.is_weak and "compared 2 of 6 choices" in report.comparison.seen
    assert "row 1: 1 of 1 " in compared("fp16", same, other).failures[0]
    assert "2 of 3 " in compared("fp32", same).failures[0]
    assert compared("fp16", same[:0]).failures


def test_20_tokens_or_all_of_them_are_enough():
    for count, is_weak in ((19, True), (20, False)):
        tokens = np.arange(30)[None]
        report = Report()
        report.compare_greedy(tokens, {"greedy": tokens, "greedy_margins": 1.0 * (tokens < count)})
        assert report.comparison.ok and report.comparison.is_weak == is_weak
    report, tokens = Report(), tokens[:, :9]
    report.compare_greedy(tokens, {"greedy": tokens, "greedy_margins": np.ones((1, 9))})
    assert report.comparison.ok and not report.comparison.is_weak


def test_other_shapes_and_non_finite_values_do_not_match():
    expected, real = np.ones((2, 3)), np.ones(2, bool)
    report = Report(TOLERANCES["int4"])
    report.compare("logits", np.ones((2, 4)), expected, real)
    assert report.failures == ["logits has shape (2, 4), expected (2, 3)"]
    for value in (np.nan, np.inf, -np.inf):
        report = Report(TOLERANCES["int4"])
        report.compare("logits", np.full((2, 3), value), expected, real)
        assert report.failures == ["logits: some values are not finite"]


def test_copies_between_host_and_device_are_counted():
    kernels = {
        "decoder": {
            "CUDAExecutionProvider": {"MatMul": 4, "MemcpyToHost": 1},
            "CPUExecutionProvider": {"Gather": 1},
        }
    }
    assert count_copies(kernels, "decoder") == 1
    expected = "decoder 5 nodes on CUDA and 1 nodes on CPU, 1 Memcpy"
    assert describe_kernels(kernels) == expected
