"""The cuda target, checked without a GPU: what its graphs hold, that they run on the CPU in
float32, and what is said where CUDA is asked for and cannot be used."""

import copy
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from checkpoints import default_parity
from targets import FILES, GENERATORS, MODELS, SIZES, exports_for, generators, graph, ops, prompts
from written import operators, run, write

import vanilla_transformer
from vanilla_transformer_export import Options, Runtime, export
from vanilla_transformer_export.cli import main as cli
from vanilla_transformer_export.graphs import quantization
from vanilla_transformer_export.graphs.precisions import WEIGHT_ONLY
from vanilla_transformer_export.graphs.sequences import last_state
from vanilla_transformer_export.inference import devices
from vanilla_transformer_export.inference.decoder import GenerationRequest
from vanilla_transformer_export.targets.cuda.graphs import packed_linear_each
from vanilla_transformer_export.targets.cuda.overflow import overflow
from vanilla_transformer_export.targets.registry import get_target

exported = exports_for("cuda")
HALF = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}
FLOATS = {
    onnx.TensorProto.FLOAT: "fp32",
    onnx.TensorProto.FLOAT16: "fp16",
    onnx.TensorProto.BFLOAT16: "bf16",
}

# Floating-point types for which onnxruntime's CUDA provider has each operator, from its
# docs/OperatorKernels.md; integers and booleans where they occur here are covered by all of them.
ANY = {"fp32", "fp16", "bf16"}
REGISTERED = {
    **dict.fromkeys(
        ("Add", "Cast", "Concat", "Gather", "GatherND", "Gelu", "LayerNormalization", "MatMul"), ANY
    ),
    **dict.fromkeys(
        (
            "Gemm",
            "Mul",
            "MultiHeadAttention",
            "Relu",
            "Reshape",
            "Slice",
            "Softmax",
            "Split",
            "Sub",
            "Tanh",
        ),
        ANY,
    ),
    **dict.fromkeys(
        (
            "BiasGelu",
            "MatMulNBits",
            "SimplifiedLayerNormalization",
            "SkipSimplifiedLayerNormalization",
        ),
        ANY,
    ),
    **dict.fromkeys(
        (
            "SkipLayerNormalization",
            "TensorScatter",
            "Transpose",
            "Unsqueeze",
            "Where",
            "Squeeze",
            "Neg",
        ),
        ANY,
    ),
    "RotaryEmbedding": ANY,
    **dict.fromkeys(
        ("Equal", "Not", "Or", "And", "Mod", "CumSum", "GatherElements", "Clip"), ANY
    ),  # of integers and booleans only
    **dict.fromkeys(
        ("ArgMax", "Cos", "GreaterOrEqual", "Greater", "Less", "LogSoftmax", "Sin", "TopK"),
        {"fp32", "fp16"},
    ),
    **dict.fromkeys(("Div", "Pow", "ReduceMax", "ReduceMin"), {"fp32", "fp16"}),
}
# Inputs that kernels read on the host: as constants they are there, anything else would be copied
# from the device each step.
ON_HOST = dict.fromkeys(("TopK", "CumSum", "Reshape", "Unsqueeze", "Squeeze", "Split"), (1,)) | {
    "Slice": (1, 2, 3, 4),
    "Clip": (1, 2),
}


# --------------------------------------------------------------------------------------- the graphs


@generators
def test_each_layer_has_two_scatters_and_one_operator_for_each_attention(exported, name):
    model, directory = exported(name)
    layers = len(model.get_decoder().layers)
    found = ops(graph(directory, name))
    assert found["TensorScatter"] == 2 * layers + 1  # and the tokens
    assert found["MultiHeadAttention"] == (2 if name == "seq2seq" else 1) * layers
    assert found["Softmax"] == 0
    # One product for queries, keys and values, and each norm but the first of a model that begins
    # with one adds the residual.
    assert found["Split"] == layers
    assert found["MatMul"] == (6 if name == "seq2seq" else 4) * layers + 1
    assert found["SkipLayerNormalization"] == (3 if name == "seq2seq" else 2) * layers
    assert found["LayerNormalization"] == (1 if model.config.norm_first else 0)


def test_rotary_positions_are_one_operator_for_queries_and_one_for_keys(exported):
    model, directory = exported("causal-window")
    found = ops(graph(directory, "causal-window"))
    assert found["RotaryEmbedding"] == 2 * len(model.get_decoder().layers)
    assert found["Sin"] == found["Cos"] == 1


@pytest.mark.slow
def test_what_relative_positions_add_is_computed_once(exported):
    model, directory = exported("causal-relative")
    found = graph(directory, "causal-relative")
    layers = len(model.get_decoder().layers)
    added = [node.input[5] for node in found.node if node.op_type == "MultiHeadAttention"]
    assert len(added) == layers and len(set(added)) == 1
    assert ops(found)["Log"] == 0 and ops(found)["Where"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_rms_norm_is_one_operator_which_adds_the_residual(exported, dtype):
    model, directory = exported("seq2seq-t5", dtype)
    for role, norms in ((0, 2), (1, 3 * len(model.get_decoder().layers))):
        found = ops(graph(directory, "seq2seq-t5", role))
        assert (
            found["SimplifiedLayerNormalization"],
            found["SkipSimplifiedLayerNormalization"],
        ) == (1, norms)
        assert found["RMSNormalization"] == found["Pow"] == 0
    # Queries, keys and values are one product, and so are the two of a gated feed-forward network.
    assert found["Split"] == 2 * len(model.get_decoder().layers)


def test_the_keys_and_values_of_all_layers_come_from_one_product(exported):
    _, directory = exported("seq2seq")  # one layer in the encoder, two in the decoder
    found = graph(directory, "seq2seq", 0)
    assert ops(found)["MatMul"] == 4 + 1 and ops(found)["SkipLayerNormalization"] == 2
    assert [len(node.output) for node in found.node if node.op_type == "Split"] == [3, 4]


def test_values_of_another_width_than_keys_have_a_product_of_their_own(exported):
    _, directory = exported("encoder")
    found = graph(directory, "encoder")
    assert [len(node.output) for node in found.node if node.op_type == "Split"] == [2, 2]
    assert ops(found)["MatMul"] == 5 * 2 + 1 and ops(found)["SkipLayerNormalization"] == 4


def test_no_more_products_become_one_than_a_split_can_replay():
    """34 of one x: 32 and 2, with the values of each."""
    rng = np.random.default_rng(0)
    x, matrices = (
        rng.standard_normal((3, 16)).astype(np.float32),
        rng.standard_normal((34, 16, 8)).astype(np.float32),
    )
    weights = {f"w{i}.weight": matrix.T.copy() for i, matrix in enumerate(matrices)}
    model = write(
        lambda g, value: packed_linear_each(g, value, *(f"w{i}" for i in range(34))),
        weights,
        {"x": x},
        "cuda",
    )
    assert [len(node.output) for node in model.graph.node if node.op_type == "Split"] == [32, 2]
    for found, matrix in zip(run(model, {"x": x}), matrices, strict=True):
        np.testing.assert_allclose(found, x @ matrix, atol=1e-5)


def test_the_state_of_the_last_token_needs_no_argmax_of_integers():
    """The provider has none: the indices would be copied to the host and back."""
    states = np.random.default_rng(0).standard_normal((4, 5, 3)).astype(np.float32)
    flags = np.array([[1, 1, 0, 0, 0], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]], bool)
    inputs = {"states": states, "flags": flags}
    model = write(lambda g, states, flags: [last_state(g, states, flags)], {}, inputs, "cuda")
    assert "ReduceMax" in operators(model) and "ArgMax" not in operators(model)
    np.testing.assert_array_equal(run(model, inputs)[0], states[np.arange(4), [1, 4, 0, 0]])


@pytest.mark.parametrize(
    "act, operator",
    [("gelu", "BiasGelu"), pytest.param("gelu_new", "FastGelu", marks=pytest.mark.slow)],
)
def test_a_gelu_is_one_operator_with_its_bias(act, operator, tmp_path):
    """With the values of torch, which `export` compares."""
    model_class = vanilla_transformer.VanillaEncoderModel
    model_class(
        model_class.config_class(**SIZES, num_hidden_layers=2, hidden_act=act)
    ).save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", target="cuda", dtype="fp32", cases=6)
    found = ops(graph(tmp_path / "out", "encoder"))
    assert found[operator] == 2
    assert found["Pow"] == found["Tanh"] == found["Gelu"] == 0


STEPS = [("seq2seq", "fp16")]
SLOW_STEPS = [
    ("causal", "int4"),
    ("causal-relative", "fp32"),
    ("seq2seq", "bf16"),
    ("causal-window", "int8"),
    ("seq2seq-t5", "fp16"),
    ("seq2seq-t5", "bf16"),
]
STEPS += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_STEPS]


@pytest.mark.parametrize("name, dtype", [*((name, "fp32") for name in GENERATORS), *STEPS])
def test_a_step_can_be_replayed_every_operator_is_cudas_and_nothing_is_read_on_the_host(
    exported, name, dtype
):
    check_operators(graph(exported(name, dtype)[1], name))


def test_a_step_of_beam_search_can_be_replayed_too(exported, tmp_path):
    """As onnxruntime has it once all sizes are constants."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fixed.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    for axis, size in dict(batch_size=2, slots=64, num_beams=4, candidates=8, num_ends=1).items():
        options.add_free_dimension_override_by_name(axis, size)
    path = exported("seq2seq", "fp16")[1] / "onnx/beam_search.onnx"
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    check_operators(onnx.load(tmp_path / "fixed.onnx").graph)


def check_operators(found):
    constants = {weight.name for weight in found.initializer}
    types = node_types(found)
    for node in found.node:
        assert node.op_type in REGISTERED, node.op_type  # no Shape, Range, If or Loop among them
        assert types[node.name] <= REGISTERED[node.op_type], (node.op_type, types[node.name])
        for index in ON_HOST.get(node.op_type, ()):
            assert (
                not node.input[index:] or node.input[index] in constants or not node.input[index]
            ), node.op_type


def node_types(found):
    """The floating-point types of what each node reads and returns, by the node's name."""
    inferred = onnx.shape_inference.infer_shapes(
        onnx.helper.make_model(found, opset_imports=OPSETS)
    ).graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in [*inferred.value_info, *found.input, *found.output]
    }
    types |= {weight.name: weight.data_type for weight in found.initializer}
    # onnx does not know onnxruntime's operators: they return the type of their first input
    for node in found.node:
        if node.domain == "com.microsoft":
            types |= dict.fromkeys(node.output, types.get(node.input[0], 0))
    values = {node.name: [*node.input, *node.output] for node in found.node}
    return {
        name: {FLOATS[types[value]] for value in used if types.get(value) in FLOATS}
        for name, used in values.items()
    }


OPSETS = [onnx.helper.make_opsetid("", 24), onnx.helper.make_opsetid("com.microsoft", 1)]


@pytest.mark.parametrize("dtype", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["seq2seq", pytest.param("encoder", marks=pytest.mark.slow)])
def test_weights_and_caches_are_of_the_type_asked_for_and_outputs_are_float32(
    exported, name, dtype
):
    _, directory = exported(name, dtype)
    for role in range(len(FILES.get(name, [0]))):
        found = graph(directory, name, role)
        weights = [
            weight
            for weight in found.initializer
            if weight.data_type in FLOATS and len(weight.dims) == 2
        ]
        assert weights and {weight.data_type for weight in weights} == {HALF[dtype]}
        for value in [*found.input, *found.output]:
            kind = value.type.tensor_type.elem_type
            is_cache = value.name.startswith(("past_key_values", "present"))
            assert kind not in FLOATS or kind == (
                HALF[dtype] if is_cache else onnx.TensorProto.FLOAT
            ), value.name
    manifest = json.loads((directory / "manifest.json").read_text())
    assert (manifest["target"], manifest["default_dtype"]) == ("cuda", dtype)
    if dtype == "fp16" or devices.gpu():
        assert (
            default_parity(manifest)["failures"]
            == 0
            < default_parity(manifest)["max_error"]
            < default_parity(manifest)["tolerance"]
            < 0.05
        )
    else:
        assert default_parity(manifest) is None
        assert manifest["parity_reason"].startswith("onnxruntime computes bf16 on a GPU only, and ")


def test_parity_of_integer_weights_is_measured_with_activations_in_half_precision(exported):
    manifest = json.loads((exported("encoder", "int8")[1] / "manifest.json").read_text())
    parity = default_parity(manifest)
    assert parity["failures"] == 0 and 1e-3 < parity["mean_error"] < 0.1


def test_a_command_says_why_an_export_in_bf16_was_not_compared(exported, tmp_path, capsys):
    exported("encoder")[0].save_pretrained(tmp_path / "model")
    cli.main(
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
    assert printed["parity"] is None or devices.gpu()
    assert "bf16 on a GPU only" in printed.get("parity_reason", "") or devices.gpu()


@pytest.mark.parametrize(
    "dtype, tolerance", [("fp16", 2e-3), pytest.param("bf16", 2e-2, marks=pytest.mark.slow)]
)
def test_half_precision_weights_are_the_models_rounded(exported, dtype, tolerance):
    """Run in float32, which the CPU has all operators for."""
    model, directory = exported("encoder", dtype)
    found = onnx.load(directory / "onnx/model.onnx")
    widen(found)
    session = onnxruntime.InferenceSession(
        found.SerializeToString(), providers=["CPUExecutionProvider"]
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
def test_products_are_those_of_rounded_weights_and_all_else_is_in_half_precision(
    exported, dtype, bits
):
    """The graph, run in float32, against torch in float64 with weights rounded by a formula of its
    own."""
    model, directory = exported("encoder", dtype)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert (manifest["default_dtype"], manifest["activations"]) == (dtype, "fp16")
    found = onnx.load(directory / "onnx/model.onnx")
    counts = ops(found.graph)
    assert counts["MatMul"] == 0 and counts["MatMulNBits"] == 11
    tables = {node.input[0] for node in found.graph.node if node.op_type == "Gather"}
    for weight in found.graph.initializer:
        assert (
            weight.data_type in (onnx.TensorProto.FLOAT16, onnx.TensorProto.UINT8)
            or len(weight.dims) < 2
        ), weight.name
        assert (
            weight.name not in tables
            or len(weight.dims) < 2
            or weight.data_type == onnx.TensorProto.FLOAT16
        )
    widen(found)
    session = onnxruntime.InferenceSession(
        found.SerializeToString(), providers=["CPUExecutionProvider"]
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
        # which are no `MatMul`
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
    """(N, K): each 32 of a row are multiples of a step, a 127th of the largest, or of -8 with its
    sign, in 4 bits."""
    rows = []
    for row in weight:
        for block in row.split(32):
            largest = block[block.abs().argmax()]
            step = (largest.abs() / 127 if bits == 8 else largest / -8).half().double()
            limits = (-127, 127) if bits == 8 else (-8, 7)
            rows.append((block / step).round().clamp(*limits) * step)
    return torch.cat(rows).view_as(weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_matrices_of_integers_have_columns_in_multiples_of_8_and_outputs_only_those_of_the_model(
    bits,
):
    """27 and 3 columns: 32 in the graph, which gives what the 30 rounded by a formula of its own
    give."""
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
    expected = x @ rounded_in_blocks(matrix, bits).T + 1
    np.testing.assert_allclose(run(model, {"x": x})[0], expected, atol=1e-4)


def rounded_in_blocks(matrix, bits):
    """(N, K) float32: each 32 of a row are multiples of a step, a 127th of the largest, or of -8
    with its sign, in 4 bits."""
    rounded = np.zeros_like(matrix)
    for row, start in np.ndindex(len(matrix), -(-matrix.shape[1] // 32)):
        block = matrix[row, start * 32 : start * 32 + 32]
        largest = block[np.abs(block).argmax()]
        step = np.abs(largest) / 127 if bits == 8 else largest / -8
        limits = (-127, 127) if bits == 8 else (-8, 7)
        rounded[row, start * 32 : start * 32 + 32] = np.clip(np.rint(block / step), *limits) * step
    return rounded


def test_blocks_of_zeros_or_of_what_a_half_cannot_scale_become_zeros():
    matrix = np.zeros((70, 4), np.float16)
    matrix[:32, 1], matrix[5, 2] = 6e-8, 1.0
    for blocks in (quantization.int8_blocks, quantization.int4_blocks):
        integers, scales = blocks(matrix)
        assert (
            scales.dtype == np.float16
            and np.all(scales != 0)
            and integers.shape[:2] == scales.shape == (4, 3)
        )


def test_activations_of_integer_weights_are_in_bf16_where_float16_cannot_hold_them():
    assert get_target("cuda").activations(large(lm_head=1e7), "int8") == "bf16"
    assert (
        get_target("cuda").activations(large(), "int4") == "fp16"
        and get_target("cpu").activations(large(), "int4") == "fp32"
    )


def widen(model):
    """Every number in half precision becomes float32."""
    for weight in model.graph.initializer:
        if weight.data_type in HALF.values():
            values = onnx.numpy_helper.to_array(weight).astype(np.float32)
            weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in HALF.values():
                attribute.i = onnx.TensorProto.FLOAT


# --------------------------------------------------------------------------------------- the caches


def addresses(buffers):
    return {name: bound.data_ptr() for name, bound in buffers.states.items()}


@generators
def test_buffers_are_used_again_by_the_next_batch_of_like_size(exported, name):
    runtime = Runtime(exported(name)[1], device="cpu")
    ids, mask = prompts(name)
    first = runtime.generate(ids, mask, max_new_tokens=5)
    [buffers] = runtime.model.decoders.pool.free
    places, graphs = addresses(buffers), dict(buffers.steps)
    second = runtime.generate(ids[::-1], mask[::-1], max_new_tokens=7)
    assert (
        list(runtime.model.decoders.pool.free) == [buffers]
        and addresses(buffers) == places
        and buffers.steps == graphs
    )
    third = runtime.generate(ids, mask, max_new_tokens=5)
    assert np.array_equal(first, third) and not np.array_equal(first, second)
    runtime.generate(ids[:2], mask[:2], max_new_tokens=5)
    assert len(runtime.model.decoders.pool.free) == 2


@generators
def test_two_batches_at_a_time_have_buffers_of_their_own(exported, name):
    runtime = Runtime(exported(name)[1], device="cpu")
    batches = [prompts(name, seed) for seed in (0, 1)]
    expected = [
        list(runtime.stream(*batch, max_new_tokens=6, eos_token_id=[])) for batch in batches
    ]
    streams = [runtime.stream(*batch, max_new_tokens=6, eos_token_id=[]) for batch in batches]
    found = list(zip(*streams, strict=True))
    assert all(
        np.array_equal(step[row], expected[row][number])
        for number, step in enumerate(found)
        for row in (0, 1)
    )


def test_beams_move_nothing_and_fill_a_slot_each(exported):
    runtime = Runtime(exported("seq2seq")[1], device="cpu")
    ids = np.full((4, 1), 1)
    request = GenerationRequest(
        Options(max_new_tokens=8, num_beams=3), ids, np.ones_like(ids), prompts("seq2seq")
    )
    decoder = runtime.model.decoders.start(request)
    decoder.prefill(ids, np.ones_like(ids))
    decoder.expand(3)
    before = {
        name: bound.numpy().copy()
        for name, bound in decoder.buffers.states.items()
        if name != "tokens"
    }
    decoder.step(np.full((12, 1), 5), np.arange(12)[::-1].reshape(4, 3)[::-1].ravel())
    for name, states in before.items():
        changed = np.flatnonzero(
            np.any(decoder.buffers.states[name].numpy() != states, axis=(0, 1, 3))
        )
        assert changed.tolist() == ([1, 2, 3] if ".decoder." in name else [])


# --------------------------------------------------------------------------- numbers beyond float16


def large(**factors):
    """A model with large weights in the modules named."""
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
    "factors, said",
    [
        ({f"{LAYER}feed_forward__up_proj": 1e7}, "model.layers.1.feed_forward.up_proj reaches"),
        (
            {f"{LAYER}self_attn__q_proj": 3e4, f"{LAYER}self_attn__k_proj": 3e4},
            "model.layers.1.self_attn, scores reaches",
        ),
        ({"lm_head": 1e7}, "lm_head reaches"),
    ],
)
def test_float16_is_refused_where_it_cannot_hold_a_number_and_bf16_is_the_default_there(
    factors, said
):
    model = large(**factors)
    with pytest.raises(ValueError, match=f"{said} .*, and float16 holds 65504: use --dtype bf16"):
        get_target("cuda").activations(model, "fp16")
    assert (
        get_target("cuda").activations(model, None)
        == get_target("cuda").activations(model, "bf16")
        == "bf16"
    )


def test_a_refused_export_leaves_nothing(tmp_path):
    large(lm_head=1e7).save_pretrained(tmp_path / "large")
    with pytest.raises(
        ValueError, match="lm_head reaches .*, and float16 holds 65504: use --dtype bf16"
    ):
        export(tmp_path / "large", tmp_path / "out", target="cuda", dtype="fp16")
    assert not (tmp_path / "out").exists()


def test_fp16_is_the_default_where_it_holds(exported):
    model = exported("causal")[0]
    assert overflow(model) is None
    assert (
        get_target("cuda").activations(model, None) == "fp16"
        and get_target("cpu").activations(model, None) == "fp32"
    )
    assert get_target("cuda").activations(model, "bf16") == "bf16"


def test_slots_that_are_not_read_add_nothing_even_in_float16():
    """A row that reads no slot is an average of all, not NaN, and the sum with a score does not
    overflow."""
    from vanilla_transformer_export.targets.cuda.graphs import MASK_VALUE

    scores = torch.tensor([[-30000.0, 20000.0], [0.0, 10.0]], dtype=torch.float16) + torch.tensor(
        MASK_VALUE, dtype=torch.float16
    )
    assert torch.isfinite(scores).all() and torch.isfinite(scores.softmax(-1)).all()
    assert torch.tensor([MASK_VALUE, 0.0], dtype=torch.bfloat16).float().softmax(-1).tolist() == [
        0,
        1,
    ]


# ----------------------------------------------------------------------------------------- refusals


GPU_BUILD = ["CUDAExecutionProvider", "CPUExecutionProvider"]
USED = dict(
    installed={"onnxruntime-gpu": "1.31.1"},
    providers=GPU_BUILD,
    gpu="NVIDIA H200, 580.0, 143771 MiB",
    libraries=(),
)


@pytest.mark.parametrize(
    "found, running, said",
    [
        (
            dict(installed={"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.0"}),
            None,
            "are both installed.*pip uninstall -y",
        ),
        (
            dict(providers=["CPUExecutionProvider"]),
            None,
            "has no CUDA, its providers are .*pip install onnxruntime-gpu",
        ),
        (dict(gpu=None), None, "no NVIDIA GPU or no driver"),
        (
            dict(libraries=("libnothing.so.1",)),
            None,
            "libnothing.so.1: pip install 'onnxruntime-gpu.cuda,cudnn.'",
        ),
        (
            dict(),
            ["CPUExecutionProvider"],
            "fell back to ..CPUExecutionProvider.., its warning says why",
        ),
        (dict(), GPU_BUILD, None),
    ],
)
def test_asking_for_cuda_where_it_cannot_run_says_what_to_do(monkeypatch, found, running, said):
    state = USED | found
    for name in ("installed", "providers"):
        monkeypatch.setattr(devices, name, lambda name=name: state[name])
    monkeypatch.setattr(devices, "LIBRARIES", state["libraries"])
    calls = []
    monkeypatch.setattr(devices, "gpu", lambda: calls.append("nvidia-smi") or state["gpu"])

    def ask():
        devices.require("cuda")
        devices.require_running(devices.CUDA, running)

    if said is None:
        ask()
    else:
        with pytest.raises(OSError, match=said):
            ask()
    assert calls == ["nvidia-smi"]


def test_a_runtime_never_falls_back_to_the_cpu(exported, monkeypatch):
    monkeypatch.setattr(devices, "providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(OSError, match="this onnxruntime has no CUDA"):
        Runtime(exported("causal")[1])
    with pytest.raises(
        ValueError,
        match="device 'tpu' does not go with .* target 'cuda', .* expected one of .'cpu', 'cuda'",
    ):
        Runtime(exported("causal")[1], device="tpu")
    with pytest.raises(
        ValueError,
        match="device 'tensorrt' does not go with .* target 'cuda', .* expected one of .'cpu'",
    ):
        Runtime(exported("causal")[1], device="tensorrt")


def test_doctor_says_what_runs_where(monkeypatch, capsys):
    monkeypatch.setattr(devices, "gpu", lambda: None)
    cli.main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["onnxruntime"] == onnxruntime.__version__ and found["cuda_problem"]
    assert found["providers"] == onnxruntime.get_available_providers()
    cli.main(["doctor"])
    printed = capsys.readouterr().out
    assert f"target cuda does not run: {found['cuda_problem']}" in printed
    assert "target portable runs on the CPU, with" in printed
    assert f"TensorRT does not run: {found['tensorrt_problem']}" in printed
    monkeypatch.setattr(devices, "providers", list)
    cli.main(["doctor"])
    assert "no target runs: pip install" in capsys.readouterr().out
