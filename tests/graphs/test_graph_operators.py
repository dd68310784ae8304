"""Tests of operator counts in graphs, which reveal a lost fusion.

The layers are those of the paper's base model, BERT-base and GPT-2."""

import collections

import onnx
import onnx_ir as ir
import pytest
from checkpoints import perturbed
from messages import raises

from vanilla_transformer.source import Source
from vanilla_transformer_export.exporting.graphs import (
    Graphs,
    check_standard,
    write_graphs,
)
from vanilla_transformer_export.graphs.config import Config
from vanilla_transformer_export.graphs.ops import IR_VERSION
from vanilla_transformer_export.graphs.weights import CheckpointWeights
from vanilla_transformer_export.targets.registry import get_target

# small sizes, which do not change the counts
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
LEARNED = {
    "position_embedding_type": "learned",
    "hidden_act": "gelu",
    "scale_embedding": False,
    "layer_norm_eps": 1e-12,
}
MODELS = {
    "base": ("VanillaSeq2SeqForConditionalGeneration", {}),
    "bert": (
        "VanillaEncoderForMaskedLM",
        {
            **LEARNED,
            "num_hidden_layers": 12,
            "type_vocab_size": 2,
            "lm_transform_act": "gelu",
            "embedding_norm": True,
        },
    ),
    "gpt2": (
        "VanillaDecoderForCausalLM",
        {**LEARNED, "num_hidden_layers": 12, "norm_first": True, "hidden_act": "gelu_new"},
    ),
}
# Model, target, dtype and role, then the operator counts.
TABLE = """
base portable fp32 encoder
  Add 55 Cast 2 Cos 1 Gather 1 LayerNormalization 12 MatMul 48 Mul 8 Range 1 Relu 6 Reshape 24
  Shape 1 Sin 1 Softmax 6 Squeeze 1 Transpose 30 Unsqueeze 3 Where 2

base portable fp32 decoder
  Add 95 Cast 2 Concat 24 Cos 1 Gather 1 LayerNormalization 18 LessOrEqual 1 MatMul 85 Mul 14
  Range 2 Relu 6 Reshape 48 Shape 4 Sin 1 Slice 1 Softmax 12 Squeeze 2 Sub 1 Transpose 61
  Unsqueeze 6 Where 3

base portable int8 encoder
  Add 55 Cast 39 Cos 1 DynamicQuantizeLinear 24 Gather 2 LayerNormalization 12 MatMul 12
  MatMulInteger 36 Mul 81 Range 1 Relu 6 Reshape 24 Shape 1 Sin 1 Softmax 6 Squeeze 1 Transpose 30
  Unsqueeze 3 Where 2

base portable int8 decoder
  Add 95 Cast 64 Concat 24 Cos 1 DynamicQuantizeLinear 38 Gather 2 LayerNormalization 18
  LessOrEqual 1 MatMul 24 MatMulInteger 61 Mul 137 Range 2 Relu 6 Reshape 48 Shape 4 Sin 1 Slice 1
  Softmax 12 Squeeze 2 Sub 1 Transpose 60 Unsqueeze 6 Where 3

base cpu fp32 encoder
  Add 61 And 1 Cast 3 Concat 1 Cos 1 Expand 1 Gather 1 GreaterOrEqual 1 If 6 LayerNormalization 12
  MatMul 48 Mul 2 Range 1 ReduceMin 1 Relu 6 Reshape 12 Shape 1 Sin 1 Squeeze 1 Transpose 12
  Unsqueeze 3 Where 2

base cpu fp32 decoder
  Add 56 Cast 3 Concat 1 Cos 1 DecoderMaskedMultiHeadAttention 6 Gather 1 LayerNormalization 18
  MatMul 37 Mul 2 MultiHeadAttention 6 Relu 6 Reshape 12 Shape 1 Sin 1 Split 6 Squeeze 1 Unsqueeze 2
  Where 1

base cpu fp32 step
  Add 56 Cast 1 Cos 1 Gather 1 GroupQueryAttention 12 LayerNormalization 18 MatMul 37 Mul 2 Relu 6
  Sin 1 Slice 1 Squeeze 1 Unsqueeze 1 Where 1

base cpu int8 encoder
  Abs 19 Add 61 And 1 Cast 3 Concat 1 Cos 1 Div 25 Expand 1 GatherBlockQuantized 1 GreaterOrEqual 1
  If 6 LayerNormalization 12 MatMulIntegerToFloat 48 Mul 50 QuantizeLinear 25 Range 1 ReduceMax 25
  ReduceMin 1 Relu 6 Reshape 12 Shape 1 Sin 1 Squeeze 1 Transpose 12 Unsqueeze 3 Where 2

base cpu int8 decoder
  Abs 31 Add 56 Cast 3 Concat 1 Cos 1 DecoderMaskedMultiHeadAttention 6 Div 37
  GatherBlockQuantized 1 LayerNormalization 18 MatMulIntegerToFloat 37 Mul 39 MultiHeadAttention 6
  QuantizeLinear 37 ReduceMax 37 Relu 6 Reshape 12 Shape 1 Sin 1 Split 6 Squeeze 1 Unsqueeze 2
  Where 1

base cpu int8 step
  Abs 31 Add 56 Cast 1 Cos 1 Div 37 GatherBlockQuantized 1 GroupQueryAttention 12
  LayerNormalization 18 MatMulIntegerToFloat 37 Mul 39 QuantizeLinear 37 ReduceMax 37 Relu 6 Sin 1
  Slice 1 Squeeze 1 Unsqueeze 1 Where 1

base cpu int4 encoder
  Add 13 And 1 Cast 3 Concat 1 Cos 1 Expand 1 GatherBlockQuantized 1 GreaterOrEqual 1 If 6
  LayerNormalization 12 MatMulNBits 48 Mul 2 Range 1 ReduceMin 1 Relu 6 Reshape 12 Shape 1 Sin 1
  Squeeze 1 Transpose 12 Unsqueeze 3 Where 2

base cpu int4 decoder
  Add 19 Cast 3 Concat 1 Cos 1 DecoderMaskedMultiHeadAttention 6 GatherBlockQuantized 1
  LayerNormalization 18 MatMulNBits 37 Mul 2 MultiHeadAttention 6 Relu 6 Reshape 12 Shape 1 Sin 1
  Split 6 Squeeze 1 Unsqueeze 2 Where 1

base cpu int4 step
  Add 19 Cast 1 Cos 1 GatherBlockQuantized 1 GroupQueryAttention 12 LayerNormalization 18
  MatMulNBits 37 Mul 2 Relu 6 Sin 1 Slice 1 Squeeze 1 Unsqueeze 1 Where 1

base cuda fp16 encoder
  Add 14 Attention 6 Cast 3 Concat 7 ConstantOfShape 3 Cos 1 Expand 1 Gather 1 MatMul 25 Mod 1 Mul 2
  Neg 1 Range 1 Relu 6 Shape 5 Sin 1 SkipLayerNormalization 12 Slice 1 Split 7 Squeeze 1 Unsqueeze 3
  Where 2

base cuda fp16 decoder
  Add 24 And 1 ArgMax 1 Attention 12 Cast 5 Cos 1 CumSum 1 Equal 1 Gather 2 GatherND 3
  GreaterOrEqual 2 MatMul 37 Mul 2 Or 1 Relu 6 Sin 1 SkipLayerNormalization 18 Split 6 Sub 2
  TensorScatter 13 Unsqueeze 10 Where 3

base cuda fp16 beams
  Add 4 And 6 Cast 9 Concat 4 CumSum 1 Div 3 Equal 3 GatherElements 4 GatherND 3 Greater 2
  GreaterOrEqual 1 Less 2 LogSoftmax 1 Mul 1 Not 2 Or 4 Pow 2 ReduceMax 2 ReduceMin 1 Reshape 3
  Shape 2 Slice 2 Sub 1 TensorScatter 1 TopK 4 Unsqueeze 9 Where 3

base cuda int4 encoder
  Add 14 Attention 6 Cast 3 Concat 7 ConstantOfShape 3 Cos 1 Expand 1 Gather 1 MatMulNBits 25 Mod 1
  Mul 2 Neg 1 Range 1 Relu 6 Shape 5 Sin 1 SkipLayerNormalization 12 Slice 1 Split 7 Squeeze 1
  Unsqueeze 3 Where 2

base cuda int4 decoder
  Add 24 And 1 ArgMax 1 Attention 12 Cast 5 Cos 1 CumSum 1 Equal 1 Gather 2 GatherND 3
  GreaterOrEqual 2 MatMulNBits 37 Mul 2 Or 1 Relu 6 Sin 1 SkipLayerNormalization 18 Split 6 Sub 2
  TensorScatter 13 Unsqueeze 10 Where 3

bert portable fp32 encoder
  Add 125 Cast 1 Erf 13 Gather 3 LayerNormalization 26 MatMul 98 Mul 51 Range 1 Reshape 48 Shape 1
  Softmax 12 Squeeze 1 Transpose 61 Unsqueeze 2 Where 1

bert cpu fp32 encoder
  Add 100 And 1 Cast 2 Concat 1 Expand 1 Gather 3 Gelu 13 GreaterOrEqual 1 If 12 LayerNormalization
  26 MatMul 74 Range 1 ReduceMin 1 Shape 1 Squeeze 1 Unsqueeze 2 Where 1

bert cuda fp16 encoder
  Add 15 Attention 12 BiasGelu 13 Cast 2 Concat 7 ConstantOfShape 3 Expand 1 Gather 3
  LayerNormalization 2 MatMul 50 Mod 1 Neg 1 Range 1 Shape 5 SkipLayerNormalization 24 Slice 1 Split
  12 Squeeze 1 Unsqueeze 2 Where 1

gpt2 portable fp32 decoder
  Add 136 And 1 Cast 1 Concat 24 Gather 2 LayerNormalization 25 LessOrEqual 1 MatMul 97 Mul 84
  Range 2 Reshape 48 Shape 2 Softmax 12 Squeeze 2 Sub 1 Tanh 12 Transpose 61 Unsqueeze 4 Where 1

gpt2 cpu fp32 decoder
  Add 74 Cast 1 Gather 2 GatherND 1 Gelu 12 GroupQueryAttention 12 LayerNormalization 25 MatMul 49
  Min 1 Shape 1 Sub 1 Unsqueeze 1

gpt2 cuda fp16 decoder
  Add 18 ArgMax 1 Attention 12 Cast 2 CumSum 1 Equal 1 FastGelu 12 Gather 3 GatherND 3
  GreaterOrEqual 1 LayerNormalization 1 MatMul 49 Or 1 SkipLayerNormalization 24 Split 12 Sub 2
  TensorScatter 25 Unsqueeze 7 Where 1
"""
ENTRIES = [entry.split("\n", 1) for entry in TABLE.strip().split("\n\n")]
EXPECTED = {tuple(names.split()): " ".join(counts.split()) for names, counts in ENTRIES}


def histogram(path):
    graph = onnx.load(path, load_external_data=False).graph
    counts = collections.Counter(node.op_type for node in graph.node)
    return " ".join(f"{name} {count}" for name, count in sorted(counts.items()))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, (architecture, fields) in MODELS.items():
        perturbed(architecture, {**SIZES, **fields}).save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name, target, dtype, role", EXPECTED)
def test_graphs_have_expected_operator_counts(checkpoints, name, target, dtype, role, tmp_path):
    result = write_and_count_operators(checkpoints / name, target, dtype, role, tmp_path)
    assert result == EXPECTED[name, target, dtype, role]


def write_and_count_operators(checkpoint, target, dtype, role, folder):
    source, kind = Source.open(checkpoint), get_target(target)
    config = Config(source.config(), source.architecture)
    activations = "fp16" if target == "cuda" else "fp32"
    spec = kind.graph_specs(config.to_dict(), config.architecture, dtype, activations)[role]
    form = kind, activations, kind.opsets[0], {dtype: {role: spec}}
    write_graphs(Graphs(config, CheckpointWeights(checkpoint, config), *form), folder)
    return histogram(folder / spec.file)


def test_onnxruntime_operator_in_standard_graph_raises():
    node = ir.node("SimplifiedLayerNormalization", [], domain="com.microsoft")
    imports = {"": 18, "com.microsoft": 1}
    graph = ir.Graph([], [], nodes=[node], opset_imports=imports, name="encoder")
    with raises(ValueError, seen=("encoder", "com.microsoft"), expected="standard"):
        check_standard(ir.Model(graph, ir_version=IR_VERSION))
