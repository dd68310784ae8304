"""Tests of the cuda target's weights in half precision and in integers, on the CPU."""

import copy
import json
import warnings
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from checkpoints import default_parity
from command_line import main
from messages import raises
from targets import FILES, MODELS, SIZES, exports_for, graph, ops
from written import run, write

import vanilla_transformer
from vanilla_transformer_export import export
from vanilla_transformer_export.exporting.export import DiffersFromTorch
from vanilla_transformer_export.graphs import quantization
from vanilla_transformer_export.graphs.precisions import WEIGHT_ONLY
from vanilla_transformer_export.inference import devices
from vanilla_transformer_export.proof.compare import TOLERANCES
from vanilla_transformer_export.targets import registry
from vanilla_transformer_export.targets.cuda import CUDA
from vanilla_transformer_export.targets.cuda.overflow import overflow
from vanilla_transformer_export.targets.registry import get_target

exported = exports_for("cuda")
HALF = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}
FLOATS = {
    onnx.TensorProto.FLOAT: "fp32",
    onnx.TensorProto.FLOAT16: "fp16",
    onnx.TensorProto.BFLOAT16: "bf16",
}


@pytest.mark.parametrize("dtype", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["seq2seq", pytest.param("encoder", marks=pytest.mark.slow)])
def test_weights_and_caches_have_requested_dtype_and_outputs_are_float32(exported, name, dtype):
    _, directory = exported(name, dtype)
    for role in range(len(FILES.get(name, [0]))):
        result = graph(directory, name, role)
        weights = [
            weight
            for weight in result.initializer
            if weight.data_type in FLOATS and len(weight.dims) == 2
        ]
        assert weights and {weight.data_type for weight in weights} == {HALF[dtype]}
        for value in [*result.input, *result.output]:
            kind = value.type.tensor_type.elem_type
            is_cache = value.name.startswith(("past_key_values", "present"))
            assert kind not in FLOATS or kind == (
                HALF[dtype] if is_cache else onnx.TensorProto.FLOAT
            ), value.name
    manifest = json.loads((directory / "manifest.json").read_text())
    assert (manifest["target"], manifest["default_dtype"]) == ("cuda", dtype)
    if dtype == "fp16" or devices.gpus():
        assert (
            default_parity(manifest)["failures"]
            == 0
            < default_parity(manifest)["max_error"]
            < TOLERANCES[dtype].max_error
        )
    else:
        assert default_parity(manifest) is None
        assert manifest["parity_reason"].startswith("onnxruntime computes bf16 on a GPU only, and ")
    assert manifest["variants"][dtype]["tolerance"] == TOLERANCES[dtype]._asdict()


def test_parity_of_integer_weights_uses_half_precision_activations(exported):
    manifest = json.loads((exported("encoder", "int8")[1] / "manifest.json").read_text())
    parity = default_parity(manifest)
    assert parity["failures"] == 0 and 1e-3 < parity["mean_error"] < 0.1


def test_export_command_reports_why_bf16_was_not_compared(exported, tmp_path, capsys):
    exported("encoder")[0].save_pretrained(tmp_path / "model")
    main(
        [
            "export",
            str(tmp_path / "model"),
            str(tmp_path / "out"),
            "--target",
            "cuda",
            "--dtype",
            "bf16",
        ]
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed["parity"] is None or devices.gpus()
    assert "bf16 on a GPU only" in printed.get("parity_reason", "") or devices.gpus()


@pytest.mark.parametrize(
    "dtype, tolerance", [("fp16", 2e-3), pytest.param("bf16", 2e-2, marks=pytest.mark.slow)]
)
def test_half_precision_weights_are_rounded_model_weights(exported, dtype, tolerance):
    """The graph runs in float32, for which the CPU has all operators."""
    model, directory = exported("encoder", dtype)
    actual = onnx.load(directory / "onnx/model.onnx")
    widen(actual)
    session = onnxruntime.InferenceSession(
        actual.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    ids = np.random.default_rng(0).integers(0, 48, (3, 9))
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
    }
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).prediction_logits.numpy()
    logits = session.run(["prediction_logits"], feeds)[0]
    assert 1e-6 < np.abs(logits - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize("dtype, bits", [("int8", 8), ("int4", 4)])
def test_integer_matmuls_match_rounded_weights_and_rest_is_half_precision(exported, dtype, bits):
    """The graph runs in float32, and torch in float64 with weights rounded by the test."""
    model, directory = exported("encoder", dtype)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert (manifest["default_dtype"], manifest["activations"]) == (dtype, "fp16")
    result = onnx.load(directory / "onnx/model.onnx")
    counts = ops(result.graph)
    assert counts["MatMul"] == 0 and counts["MatMulNBits"] == 11
    tables = {node.input[0] for node in result.graph.node if node.op_type == "Gather"}
    for weight in result.graph.initializer:
        assert (
            weight.data_type in (onnx.TensorProto.FLOAT16, onnx.TensorProto.UINT8)
            or len(weight.dims) < 2
        ), weight.name
        assert (
            weight.name not in tables
            or len(weight.dims) < 2
            or weight.data_type == onnx.TensorProto.FLOAT16
        )
    widen(result)
    session = onnxruntime.InferenceSession(
        result.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    ids = np.random.default_rng(0).integers(0, 48, (3, 9))
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
    }
    rounded = copy.deepcopy(model).half().double()
    rounded.model.embeddings.scale = float(np.float16(rounded.model.embeddings.scale))
    for name, module in rounded.named_modules():
        # these two are not a `MatMul` in the graph
        if isinstance(module, torch.nn.Linear) and name not in (
            "model.pooler.dense",
            "next_sentence",
        ):
            module.weight = torch.nn.Parameter(round_blocks(module.weight.detach(), bits))
    with torch.no_grad():
        outputs = rounded(torch.from_numpy(ids))
    for name, got in zip(
        ("prediction_logits", "seq_relationship_logits"), session.run(None, feeds), strict=True
    ):
        np.testing.assert_allclose(got, outputs[name].numpy(), atol=2e-5)
        with torch.no_grad():
            assert np.abs(got - model(torch.from_numpy(ids))[name].numpy()).max() > 1e-3


def round_blocks(weight, bits):
    """Round each block of 32 in a row of `weight` (N, K) to multiples of a step.

    The step is the block's largest weight / 127 in 8 bits, and / -8 with its sign in 4 bits.
    """
    rows = []
    for row in weight:
        for block in row.split(32):
            largest = block[block.abs().argmax()]
            step = (largest.abs() / 127 if bits == 8 else largest / -8).half().double()
            limits = (-127, 127) if bits == 8 else (-8, 7)
            rows.append((block / step).round().clamp(*limits) * step)
    return torch.cat(rows).view_as(weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_integer_matrices_are_padded_to_multiples_of_8_columns(
    bits,
):
    """The 27 and 3 columns become 32 in the graph, which returns the products of the first 30."""
    rng = np.random.default_rng(0)
    weights = {
        "a.weight": rng.standard_normal((27, 40)),
        "b.weight": rng.standard_normal((3, 40)),
        "bias": np.ones(30),
    }
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    x = rng.standard_normal((3, 40)).astype(np.float32)

    def part(g, x):
        return [WEIGHT_ONLY[bits].matmul(g, x, ["a", "b"], g.weight("bias"))]

    model = write(part, weights, {"x": x}, "cuda")
    assert {a.name: a.i for a in model.graph.node[0].attribute}["N"] == 32
    matrix = np.concatenate([weights["a.weight"], weights["b.weight"]])
    expected = x @ round_matrix_blocks(matrix, bits).T + 1
    np.testing.assert_allclose(run(model, {"x": x})[0], expected, atol=1e-4)


def round_matrix_blocks(matrix, bits):
    """Round each block of 32 in a row of `matrix` (N, K) to multiples of a step, in float32.

    The step is the block's largest weight / 127 in 8 bits, and / -8 with its sign in 4 bits.
    """
    rounded = np.zeros_like(matrix)
    for row, start in np.ndindex(len(matrix), -(-matrix.shape[1] // 32)):
        block = matrix[row, start * 32 : start * 32 + 32]
        largest = block[np.abs(block).argmax()]
        step = np.abs(largest) / 127 if bits == 8 else largest / -8
        limits = (-127, 127) if bits == 8 else (-8, 7)
        rounded[row, start * 32 : start * 32 + 32] = np.clip(np.rint(block / step), *limits) * step
    return rounded


def test_zero_and_tiny_blocks_have_nonzero_scales_and_zero_integers():
    matrix = np.zeros((70, 4), np.float16)
    matrix[:32, 1], matrix[5, 2] = 6e-8, 1.0
    # the zero points are 128, and 8 in both halves of a byte
    for blocks, zero in ((quantization.int8_blocks, 128), (quantization.int4_blocks, 0x88)):
        integers, scales = blocks(matrix)
        assert np.all(integers[[0, 1, 3]] == zero) and np.all(integers[2, 1:] == zero)
        assert (
            scales.dtype == np.float16
            and np.all(scales != 0)
            and integers.shape[:2] == scales.shape == (4, 3)
        )


def test_integer_weights_use_bf16_activations_if_float16_overflows():
    assert get_target("cuda").activations(large_model(lm_head=1e7), "int8") == "bf16"
    assert (
        get_target("cuda").activations(large_model(), "int4") == "fp16"
        and get_target("cpu").activations(large_model(), "int4") == "fp32"
    )


def widen(model):
    """Convert all half-precision numbers of `model` to float32."""
    for weight in model.graph.initializer:
        if weight.data_type in HALF.values():
            values = onnx.numpy_helper.to_array(weight).astype(np.float32)
            weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in HALF.values():
                attribute.i = onnx.TensorProto.FLOAT
            elif attribute.t.data_type in HALF.values():
                values = onnx.numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(values))


def large_model(**factors):
    """Return a model with the weights of modules multiplied by `factors`."""
    architecture, fields = MODELS["causal"]
    model_class = getattr(vanilla_transformer, architecture)
    model = model_class(
        model_class.config_class(**SIZES, **fields, tie_word_embeddings=False)
    ).eval()
    for name, factor in factors.items():
        module = dict(model.named_modules())[name.replace("__", ".")]
        module.weight.data *= factor
    return model


LAYER = "model__layers__1__"


@pytest.mark.parametrize(
    "factors, seen",
    [
        ({f"{LAYER}feed_forward__up_proj": 1e7}, ("model.layers.1.feed_forward.up_proj",)),
        (
            {f"{LAYER}self_attn__q_proj": 3e4, f"{LAYER}self_attn__k_proj": 3e4},
            ("model.layers.1.self_attn",),
        ),
        ({"lm_head": 1e7}, ("lm_head",)),
    ],
)
def test_fp16_overflow_raises_and_bf16_is_then_default(factors, seen):
    model = large_model(**factors)
    with raises(ValueError, seen=("float16", 65504, "--dtype", "bf16", *seen)):
        get_target("cuda").activations(model, "fp16")
    assert (
        get_target("cuda").activations(model, None)
        == get_target("cuda").activations(model, "bf16")
        == "bf16"
    )


def test_rejected_export_writes_no_files(tmp_path):
    large_model(lm_head=1e7).save_pretrained(tmp_path / "large")
    with raises(ValueError, seen=("lm_head", "float16", 65504, "--dtype", "bf16")):
        export(tmp_path / "large", tmp_path / "out", target="cuda", dtype="fp16")
    assert not (tmp_path / "out").exists()


def test_fp16_is_default_without_overflow(exported):
    model = exported("causal")[0]
    assert overflow(model) is None
    assert (
        get_target("cuda").activations(model, None) == "fp16"
        and get_target("cpu").activations(model, None) == "fp32"
    )
    assert get_target("cuda").activations(model, "bf16") == "bf16"


@pytest.fixture(scope="module")
def strong_t5(tmp_path_factory):
    """The folder of a T5 whose logits reach 30: its rounding in float16 is above the tolerance."""
    transformers.set_seed(0)
    sizes = dict(d_model=64, d_kv=64, d_ff=128, num_layers=2, num_heads=2, vocab_size=512)
    settings = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    config = transformers.T5Config(**sizes, **settings, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=min(parameter.shape) ** -0.5)
    folder = tmp_path_factory.mktemp("t5")
    model.save_pretrained(folder)
    return folder


def test_automatic_dtype_follows_the_comparison_with_torch(strong_t5, tmp_path):
    allowed = TOLERANCES["fp16"].max_error
    with pytest.warns(UserWarning, match=f"at most {allowed:g}: the dtype is .* instead of fp16"):
        manifest = export(strong_t5, tmp_path / "out", target="cuda", cases=2)
    dtype = manifest["default_dtype"]
    assert dtype == ("bf16" if devices.gpus() else "fp32")
    assert manifest["activations"] == dtype and manifest["variants"].keys() == {dtype}
    assert default_parity(manifest)["failures"] == 0
    assert set(manifest["files"]) == files_in(tmp_path / "out") - {"manifest.json", "README.md"}
    assert TOLERANCES[dtype]._asdict() == manifest["variants"][dtype]["tolerance"]


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_dtype_of_the_user_is_not_changed(strong_t5, tmp_path):
    with raises(ValueError, seen="error", expected=TOLERANCES["fp16"].max_error):
        export(strong_t5, tmp_path / "out", target="cuda", dtype="fp16", cases=2)
    assert not (tmp_path / "out").exists()


def test_only_dtypes_that_can_be_compared_are_tried(strong_t5, monkeypatch, tmp_path):
    """The first is bf16 with a GPU."""
    tried = []

    def compare(checkpoint, info, *args):
        tried.append(info.manifest["activations"])
        raise DiffersFromTorch("a difference")

    monkeypatch.setattr("vanilla_transformer_export.exporting.export.compare_with_torch", compare)
    for has_gpu, expected in ((False, ["fp16", "fp32"]), (True, ["fp16", "bf16", "fp32"])):

        def device(activations, has_gpu=has_gpu):
            if activations == "bf16" and not has_gpu:
                raise OSError("no GPU")
            return "cpu"

        monkeypatch.setitem(registry._TARGETS, "cuda", replace(CUDA, parity_device=device))
        tried.clear()
        with pytest.raises(ValueError, match="a difference"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            export(strong_t5, tmp_path / "out", target="cuda")
        assert tried == expected


def test_mask_value_does_not_overflow_in_half_precision():
    """A row of masked slots only gives their average, not NaN. Adding a score does not overflow."""
    from vanilla_transformer_export.targets.cuda.graphs import MASK_VALUE

    scores = torch.tensor([[-30000.0, 20000.0], [0.0, 10.0]], dtype=torch.float16) + torch.tensor(
        MASK_VALUE, dtype=torch.float16
    )
    assert torch.isfinite(scores).all() and torch.isfinite(scores.softmax(-1)).all()
    assert torch.tensor([MASK_VALUE, 0.0], dtype=torch.bfloat16).float().softmax(-1).tolist() == [
        0,
        1,
    ]
