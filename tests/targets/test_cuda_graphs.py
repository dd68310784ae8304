"""Tests of the operators of the cuda target's graphs. `make test-cuda-dry` runs them on CUDA."""

import numpy as np
import pytest
from targets import SIZES, exports_for, generators, graph, ops
from written import operators, run, write

import vanilla_transformer
from vanilla_transformer_export import export
from vanilla_transformer_export.graphs.sequences import last_state
from vanilla_transformer_export.targets.cuda.graphs import packed_linears

exported = exports_for("cuda")


@generators
def test_each_layer_has_two_scatters_and_one_operator_per_attention(exported, name):
    model, directory = exported(name)
    layers = len(model.get_decoder().layers)
    result = ops(graph(directory, name))
    assert result["TensorScatter"] == 2 * layers + 1  # one more for the tokens
    assert result["Attention"] == (2 if name == "seq2seq" else 1) * layers
    assert result["Softmax"] == 0
    # One matmul computes all of queries, keys and values that have the same width.
    assert result["Split"] == layers
    matmuls = {"seq2seq": 6, "causal-grouped": 5}.get(name, 4)
    assert result["MatMul"] == matmuls * layers + 1
    # Each norm adds the residual, except the first of a pre-norm model, and norms of other things.
    norms = {"seq2seq": (3, 0), "causal-grouped": (0, 6)}.get(name, (2, 0))
    assert result["SkipLayerNormalization"] == norms[0] * layers
    assert result["LayerNormalization"] == norms[1] * layers + model.config.norm_first


def test_rotary_embedding_is_one_operator_for_queries_and_one_for_keys(exported):
    model, directory = exported("causal-window")
    result = ops(graph(directory, "causal-window"))
    assert result["RotaryEmbedding"] == 2 * len(model.get_decoder().layers)
    assert result["Sin"] == result["Cos"] == 1


@pytest.mark.slow
def test_relative_bias_is_computed_once(exported):
    model, directory = exported("causal-relative")
    result = graph(directory, "causal-relative")
    layers = len(model.get_decoder().layers)
    biases = [node.input[3] for node in result.node if node.op_type == "Attention"]
    assert len(biases) == layers and len(set(biases)) == 1
    assert ops(result)["Log"] == 0 and ops(result)["Where"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rms_norm_and_residual_are_one_operator(exported, dtype):
    model, directory = exported("seq2seq-t5", dtype)
    for role, norms in ((0, 2), (1, 3 * len(model.get_decoder().layers))):
        result = ops(graph(directory, "seq2seq-t5", role))
        assert (
            result["SimplifiedLayerNormalization"],
            result["SkipSimplifiedLayerNormalization"],
        ) == (1, norms)
        assert result["RMSNormalization"] == result["Pow"] == 0
    # One matmul computes queries, keys and values, and another both gated projections.
    assert result["Split"] == 2 * len(model.get_decoder().layers)


def test_one_matmul_computes_keys_and_values_of_all_layers(exported):
    _, directory = exported("seq2seq")  # one layer in the encoder, two in the decoder
    result = graph(directory, "seq2seq", 0)
    assert ops(result)["MatMul"] == 4 + 1 and ops(result)["SkipLayerNormalization"] == 2
    assert [len(node.output) for node in result.node if node.op_type == "Split"] == [3, 4]


def test_values_of_other_width_than_keys_have_separate_matmul(exported):
    _, directory = exported("encoder")
    result = graph(directory, "encoder")
    assert [len(node.output) for node in result.node if node.op_type == "Split"] == [2, 2]
    assert ops(result)["MatMul"] == 5 * 2 + 1 and ops(result)["SkipLayerNormalization"] == 4


def test_packed_matmuls_are_limited_to_32_outputs_of_split():
    """34 matmuls of one input become two, with 32 and 2 outputs and the same values."""
    rng = np.random.default_rng(0)
    x, matrices = (
        rng.standard_normal((3, 16)).astype(np.float32),
        rng.standard_normal((34, 16, 8)).astype(np.float32),
    )
    weights = {f"w{i}.weight": matrix.T.copy() for i, matrix in enumerate(matrices)}
    model = write(
        lambda g, value: packed_linears(g, value, *(f"w{i}" for i in range(34))),
        weights,
        {"x": x},
        "cuda",
    )
    assert [len(node.output) for node in model.graph.node if node.op_type == "Split"] == [32, 2]
    for result, matrix in zip(run(model, {"x": x}), matrices, strict=True):
        np.testing.assert_allclose(result, x @ matrix, atol=1e-5)


def test_last_state_uses_no_argmax():
    """The CUDA provider has no ArgMax of integers. Indices would be copied to the host and back."""
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
def test_gelu_and_bias_are_one_operator(act, operator, tmp_path):
    """`export` compares the values with torch."""
    model_class = vanilla_transformer.VanillaEncoderModel
    model_class(
        model_class.config_class(**SIZES, num_hidden_layers=2, hidden_act=act)
    ).save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", target="cuda", dtype="fp32", cases=6)
    result = ops(graph(tmp_path / "out", "encoder"))
    assert result[operator] == 2
    assert result["Pow"] == result["Tanh"] == result["Gelu"] == 0
