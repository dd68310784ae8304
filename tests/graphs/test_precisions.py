"""Tests of several dtypes in one export directory, and of the opsets of portable graphs."""

import json

import numpy as np
import onnx
import pytest
from checkpoints import add_to_output, copy_folder, default_graphs, default_parity, seal
from command_line import main
from messages import raises
from onnx import TensorProto
from targets import build, prompts
from tokenizers import Tokenizer, models, pre_tokenizers

from vanilla_transformer_export import Runtime, export
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.proof.compare import TOLERANCES

FILES = ["onnx/decoder_model_merged.onnx", "onnx/encoder_model.onnx"]
INT8_FILES = [file.replace(".onnx", "_int8.onnx") for file in FILES]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("precisions") / "checkpoint"
    build("seq2seq").save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(48)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def both_dtypes(checkpoint):
    """Return the directory of `export --dtype int8,fp32`, with weights in separate files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "vanilla_transformer_export.graphs.saving.PROTOBUF_LIMIT", 10_000
        )  # instead of 2 GB, which take minutes
        main(["export", str(checkpoint), str(checkpoint.with_name("both")), "--dtype", "int8,fp32"])
    return checkpoint.with_name("both")


def count_integer_matmuls(file):
    """Return the number of integer matrix multiplications in a graph."""
    return sum(
        node.op_type == "MatMulInteger"
        for node in onnx.load(file, load_external_data=False).graph.node
    )


def test_each_dtype_has_hub_file_names_and_own_parity(both_dtypes):
    manifest = json.loads((both_dtypes / "manifest.json").read_text())
    result = {path.relative_to(both_dtypes).as_posix() for path in both_dtypes.glob("onnx/*")}
    assert (
        result
        == {f"{file}{end}" for file in (*FILES, *INT8_FILES) for end in ("", "_data")}
        <= {*manifest["files"]}
    )
    other = manifest["variants"]["fp32"]
    assert (manifest["default_dtype"], [*manifest["variants"]]) == ("int8", ["int8", "fp32"])
    assert (
        sorted(default_graphs(manifest).values()) == INT8_FILES
        and sorted(other["graphs"].values()) == FILES
    )
    for dtype, variant in manifest["variants"].items():
        assert variant["tolerance"] == TOLERANCES[dtype]._asdict()
    assert default_parity(manifest)["max_error"] > 1e-3
    assert (
        other["tolerance"]["max_error"]
        > other["parity"]["max_error"]
        > 0
        == other["parity"]["failures"]
    )
    for file in FILES:
        counts = [
            count_integer_matmuls(both_dtypes / name)
            for name in (file, file.replace(".onnx", "_int8.onnx"))
        ]
        assert counts[0] == 0 and counts[1] > 5


@pytest.mark.slow
def test_first_dtype_is_default_and_dtype_selects_another(exported_for, both_dtypes):
    ids, mask = prompts("seq2seq")
    for dtype in ("fp32", "int8"):
        alone, result = (
            Runtime(exported_for("seq2seq", "portable", dtype)[1]),
            Runtime(both_dtypes, dtype=dtype),
        )
        assert result.dtype == dtype and {spec.file for spec in result.specs.values()} == {
            *(FILES if dtype == "fp32" else INT8_FILES)
        }
        np.testing.assert_array_equal(result.encode(ids, mask), alone.encode(ids, mask))
        np.testing.assert_array_equal(
            result.generate(ids, mask, num_beams=2), alone.generate(ids, mask, num_beams=2)
        )
    assert Runtime(both_dtypes).dtype == "int8"
    with raises(UsageError, seen="int4", expected=("int8", "fp32")):
        Runtime(both_dtypes, dtype="int4")


def test_commands_accept_each_dtype_and_verify_checks_all(
    both_dtypes, checkpoint, tmp_path, capsys
):
    main(["verify", str(both_dtypes), str(checkpoint), "--cases", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["int8", "fp32"]
    assert (
        str(TOLERANCES["int8"]) in lines[0]
        and str(TOLERANCES["fp32"]) in lines[1]
        and lines[1].endswith("0 failures")
    )
    (tmp_path / "in").write_text("w5 w6 w7\nw9\n")
    result = {}
    for dtype in ("fp32", "int8"):
        main(
            [
                "generate",
                str(both_dtypes),
                "--input",
                str(tmp_path / "in"),
                "--scores",
                "--dtype",
                dtype,
            ]
        )
        result[dtype] = capsys.readouterr().out
        main(
            [
                "evaluate",
                str(both_dtypes),
                "--source",
                str(tmp_path / "in"),
                "--references",
                str(tmp_path / "in"),
                "--dtype",
                dtype,
            ]
        )
        assert json.loads(capsys.readouterr().out)["sentences"] == 2
    assert result["fp32"] != result["int8"]
    for arguments in (
        ["generate", both_dtypes, "w5"],
        ["evaluate", both_dtypes, "--source", tmp_path / "in", "--references", tmp_path / "in"],
    ):
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, arguments), "--dtype", "fp16"])
        assert stopped.value.code == 2 and "'fp16'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "file", [FILES[0], INT8_FILES[0], f"{FILES[0]}_data", f"{INT8_FILES[0]}_data"]
)
def test_changed_file_of_any_dtype_is_rejected_for_every_dtype(both_dtypes, tmp_path, file):
    damaged = copy_folder(both_dtypes, tmp_path)
    (damaged / file).write_bytes((damaged / file).read_bytes()[:-1] + b"x")
    for dtype in ("fp32", "int8"):
        with raises(ValueError, seen=(file, "SHA-256")):
            Runtime(damaged, dtype=dtype)


@pytest.mark.parametrize("file", [FILES[0], INT8_FILES[0]])
def test_external_data_outside_export_is_rejected(both_dtypes, tmp_path, file):
    damaged = copy_folder(both_dtypes, tmp_path)

    def add_outside_tensor(graph):
        tensor = TensorProto(
            name="out", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL
        )
        tensor.external_data.add(key="location", value="../../secret")
        graph.initializer.append(tensor)
        add_to_output(graph, "out")

    model = onnx.load(damaged / file, load_external_data=False)
    add_outside_tensor(model.graph)
    (damaged / file).write_bytes(model.SerializeToString())
    seal(damaged)
    with raises(ValueError, seen=file):
        Runtime(damaged, dtype="fp32" if file == FILES[0] else "int8")


@pytest.mark.parametrize(
    "options, seen, expected",
    [
        (dict(target="cpu", dtype=["fp32", "int8"]), "portable", "cpu"),
        (dict(dtype=["fp32", "int4"]), ("portable", "int4"), ("fp32", "int8")),
        (dict(dtype=["int8", "int8"]), "int8", ()),
        (dict(dtype=[]), "portable", ()),
        (dict(dtype=5), 5, "fp32"),
        (dict(target=3), 3, ("portable", "cpu", "cuda")),
        (dict(dtyp="fp32"), "dtyp", "dtype"),
        (dict(cases=0), ("cases", 0), 1),
        (dict(cases="3"), ("cases", "'3'"), 1),
        (dict(opset=17), ("opset", 17, "portable"), (18, 23)),
        (dict(opset=24), ("opset", 24, "portable"), (18, 23)),
        (dict(target="cpu", opset=20), ("opset", 20, "cpu"), 23),
    ],
    ids=str,
)
def test_invalid_export_options_raise_before_checkpoint_is_read(tmp_path, options, seen, expected):
    with raises(UsageError, seen=seen, expected=expected):
        export(tmp_path / "nothing", tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name, opset",
    [
        pytest.param(name, opset, marks=[pytest.mark.slow] * ((name, opset) != ("encoder", 23)))
        for name in ("seq2seq", "causal", "encoder")
        for opset in range(18, 24)
    ],
)
def test_each_opset_matches_torch(tmp_path, name, opset):
    build(name).save_pretrained(tmp_path / "checkpoint")
    manifest = export(
        tmp_path / "checkpoint", tmp_path / "out", cases=6, dtype=["fp32", "int8"], opset=opset
    )
    files = [
        *default_graphs(manifest).values(),
        *manifest["variants"]["int8"]["graphs"].values(),
    ]
    imports = [onnx.load(tmp_path / "out" / file).opset_import for file in files]
    assert [
        [(result.domain, result.version) for result in opset_imports] for opset_imports in imports
    ] == [[("", opset)]] * len(files)
    assert (
        manifest["opset"] == opset
        and default_parity(manifest)["failures"] == 0 < default_parity(manifest)["cases"]
    )
    int8 = manifest["variants"]["int8"]
    assert int8["parity"]["mean_error"] < 0.1
    assert (
        min(count_integer_matmuls(tmp_path / "out" / file) for file in int8["graphs"].values()) > 3
    )


def test_graphs_have_the_opset_of_the_option(tmp_path):
    build("encoder").save_pretrained(tmp_path / "checkpoint")
    manifest = export(tmp_path / "checkpoint", tmp_path / "out", cases=1, opset=21)
    [file] = default_graphs(manifest).values()
    [opset] = onnx.load(tmp_path / "out" / file, load_external_data=False).opset_import
    assert (opset.domain, opset.version, manifest["opset"]) == ("", 21, 21)
